"""The planner's cost model of any machine, from the operators of its steps.

A matrix product of ``m`` tokens takes the longer of two times: its arithmetic, and the reading
of its weights. Its arithmetic runs in tiles, as many at a time as the device has
multiprocessors, so that its time grows in waves (NVIDIA, "Matrix Multiplication Background",
"Wave Quantization")::

    waves = ceil(ceil(m / tile_m) * ceil(N / tile_n) / cores)
    seconds = waves * tile_m * tile_n * 2 K * cores / rate

A mixture of ``E`` experts of which each token uses ``c`` reads those that any token chose. With
random choices these are ``E (1 - (1 - c / E)^m)``.

Under tensor parallelism, the sums behind attention and feed-forward networks are reduced over
all devices. A ring of ``g`` devices sends ``2 (g - 1) / g`` of the data over each link (Patarasuk
and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).

Operators run one after the other. Each has a limit, and the sum over all those of one limit is
in :class:`StepSeconds`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...errors import ConfigError
from ..requests import Floats
from .cost_model import (
    COMPUTE,
    HEAD_COMPUTE,
    HEAD_MEMORY,
    MEMORY,
    OTHER,
    TOKENS,
    CostModel,
    overlapped,
)
from .hardware import HardwareSpec, Parallelism
from .model_spec import ModelSpec
from .weights import Matrix, ModelShape, Split


class StepSample(NamedTuple):
    """A step that an engine measured.

    prompt_tokens, prompts: tokens of prompts that it computed, and their requests.
    decodes: requests that decoded, a token each.
    attended: sum of ``(before + new)^2 - before^2`` over the prompts, twice the pairs of
        tokens that attention computed.
    context, squares: sums of ``before + new``, and of ``(before + new)^2``: some engines compute a
        prompt's attention anew, with the tokens that are in the cache.
    kv_tokens: tokens of KV that the decodes read.
    requests: half of those that arrived or ended while it ran.
    after_prompts: 1 if the step before it computed prompts.
    """

    seconds: float
    prompt_tokens: float
    prompts: float
    decodes: float
    attended: float
    context: float
    squares: float
    kv_tokens: float
    requests: float = 0.0
    after_prompts: float = 0.0


ATTENTION_OF_ANSWERS, STATES = "attention of answers", "states"
# Tiles of products, by the share of the rate that they reach. The best of them is taken.
_TILES = ((128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.75), (64, 64, 0.5))
# Kernels of a layer besides its matrices: two norms, rotary embedding, writing KV, attention
# and its merge, activation.
_LAYER_KERNELS = 7
# And of a mixture: choice of experts, sorting of tokens, sum of their outputs.
_EXPERT_KERNELS = 4
# Of a step: embedding, last norm, sampling.
_STEP_KERNELS = 10
# Times that a layer reads or writes the hidden state between its products.
_RESIDUAL_PASSES = 8
_ACTIVATION_BYTES = 2
# Sampling reads logits in 32 bits for a scale, a softmax and a choice.
_LOGIT_BYTES, _LOGIT_PASSES = 4, 4
# Seconds of an all-reduce, however little it sends, and the share of a link that it reaches.
_REDUCE_S = 8e-6
_LINK_SHARE = 0.75
# Of devices without a figure: PCIe 4.
_LINK_BYTES_PER_S = 32e9


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step of one attention rank. All float64, one element for each step.

    tokens: of prompts and answers.
    rows: those whose logits are needed.
    decodes: requests that decode, each of which reads and writes its states.
    prompt_pairs: pairs of a prompt's token and one that it attends to, itself included.
    kv_tokens, window_kv_tokens: tokens of KV that decodes read in layers that read all, and in
        sliding-window layers.
    """

    tokens: Floats
    rows: Floats
    decodes: Floats
    prompt_pairs: Floats
    kv_tokens: Floats
    window_kv_tokens: Floats

    @classmethod
    def of(
        cls, tokens: float | Floats, rows: float | Floats, **others: float | Floats
    ) -> StepWork:
        """From numbers and arrays, broadcast against each other; other fields are 0."""
        given = dict.fromkeys(cls.__slots__, 0.0) | {"tokens": tokens, "rows": rows}
        given |= others
        arrays = np.broadcast_arrays(*given.values())
        named = zip(given, arrays, strict=True)
        return cls(**{name: array.astype(np.float64) for name, array in named})


@dataclass(frozen=True, slots=True)
class Operator:
    """One kind of operator in all layers.

    compute_s, memory_s, link_s: seconds of its arithmetic, of its reads and writes of memory, and
        on links between devices; arrays of the shape of the work, or numbers.
    kernels: that it starts.
    """

    name: str
    compute_s: Floats | float = 0.0
    memory_s: Floats | float = 0.0
    link_s: Floats | float = 0.0
    kernels: int = 0


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of a step by the limits of its operators, each of the shape of the work.

    compute_s, memory_s: operators whose arithmetic, or whose reads, take longer.
    kv_s: of the latter the reading of KV and states.
    link_s: sending to other devices.
    idle_s: starts of kernels, and the time that the device waits for the engine.
    """

    compute_s: Floats
    memory_s: Floats
    kv_s: Floats
    link_s: Floats
    idle_s: Floats

    @property
    def other_s(self) -> Floats:
        """Neither arithmetic nor reads."""
        return self.link_s + self.idle_s

    @property
    def by_limit(self) -> dict[str, Floats]:
        """The same in words that people read."""
        return {
            "arithmetic": self.compute_s,
            "reading weights": self.memory_s - self.kv_s,
            "reading KV": self.kv_s,
            "links between devices": self.link_s,
            "kernel starts and waiting": self.idle_s,
        }

    @property
    def total_s(self) -> Floats:
        """With operators one after the other."""
        return self.compute_s + self.memory_s + self.other_s


def step_seconds(
    model: ModelSpec, hardware: HardwareSpec, parallel: Parallelism, work: StepWork
) -> StepSeconds:
    """Seconds of a step on each of a replica's devices. With ``pp`` stages: of a round, in which
    each stage works on all of ``pp`` micro-batches, one of which is ``work``.

    Raises:
        ConfigError: the model's operators are not known.
    """
    compute, memory, kv, link = (np.zeros_like(work.tokens) for _ in range(4))
    kernels = _STEP_KERNELS
    for each in operators(model, hardware, parallel, work):
        by_compute = each.compute_s > each.memory_s
        compute += np.where(by_compute, each.compute_s, 0.0)
        reads = np.where(by_compute, 0.0, each.memory_s)
        memory += reads
        if each.name in (ATTENTION_OF_ANSWERS, STATES):
            kv += reads
        link += each.link_s
        kernels += each.kernels
    efficiency = hardware.efficiency
    idle = kernels * efficiency.kernel_s + efficiency.step_s * parallel.pp
    return StepSeconds(compute, memory, kv, link, np.full_like(link, idle))


def operators(
    model: ModelSpec, hardware: HardwareSpec, parallel: Parallelism, work: StepWork
) -> Iterator[Operator]:
    """All operators of :func:`step_seconds`. Raises ConfigError if they are not known."""
    shape = model.shape
    if shape is None:
        raise ConfigError(
            "The operators of this model are not known; count it with "
            "ModelSpec.from_hf_config()."
        )
    device = _Device(hardware)
    ranks = parallel.attention_ranks
    together = work.tokens * ranks
    for matrix in shape.mixers:
        yield _product(
            "attention matrices", device, matrix, work.tokens, parallel.attention_tp
        )
    for matrix in shape.feed_forward:
        if matrix.experts:
            yield _experts(device, matrix, together, parallel)
        else:
            yield _product("feed-forward", device, matrix, together, parallel.tp)
    yield _product("output matrix", device, shape.head, work.rows * ranks, parallel.tp)
    tp, rate = parallel.attention_tp, device.flops[16]
    flops = 4.0 * model.hidden * model.num_layers * work.prompt_pairs
    others = model.other_flops_per_token * work.tokens
    yield Operator("attention of prompts", (flops + others) / tp / rate)
    copies = model.kv_replicas(tp) / tp
    read = model.full_kv_bytes_per_token * work.kv_tokens
    read = read + model.window_kv_bytes_per_token * work.window_kv_tokens
    arithmetic = shape.decode_flops_per_kv_token * work.kv_tokens / tp / rate
    yield Operator(ATTENTION_OF_ANSWERS, arithmetic, read * copies / device.bandwidth)
    if model.state_bytes:
        states = 2.0 * model.state_bytes * work.decodes / tp
        yield Operator(STATES, memory_s=states / device.bandwidth)
    residual_bytes = shape.residual * _ACTIVATION_BYTES * work.tokens
    layer_bytes = _RESIDUAL_PASSES * residual_bytes * shape.num_layers
    kernels = _LAYER_KERNELS * shape.num_layers + _EXPERT_KERNELS * shape.expert_layers
    between_s = layer_bytes / device.bandwidth
    yield Operator("between", memory_s=between_s, kernels=kernels)
    logits = work.rows * shape.head.outputs * _LOGIT_BYTES * _LOGIT_PASSES
    yield Operator("sampling", memory_s=logits / device.bandwidth)
    yield from _reductions(shape, device, parallel, residual_bytes)


class _Device:
    """Rates that engines reach on a device."""

    def __init__(self, hardware: HardwareSpec) -> None:
        share = hardware.efficiency.matrix_share
        fp8 = hardware.fp8_flops or hardware.compute_flops
        self.flops = {
            16: hardware.compute_flops * share,
            8: fp8 * share,
            # Without units for 4 bits, weights become 16 bits before they are multiplied.
            4: (hardware.fp4_flops or hardware.compute_flops) * share,
        }
        self.bandwidth = hardware.bandwidth_bytes_per_s * hardware.efficiency.read_share
        self.cores = hardware.num_cores
        link = hardware.link_bytes_per_s or _LINK_BYTES_PER_S
        self.link = link * _LINK_SHARE

    def product_s(
        self, tokens: Floats, inputs: int, outputs: int, rate_bits: int, number: Floats
    ) -> Floats:
        """Seconds of the arithmetic of ``number`` products of ``tokens`` each, run as one
        kernel."""
        rate = self.flops[rate_bits]
        if self.cores is None:
            return 2.0 * inputs * outputs * tokens * number / rate
        best = np.full_like(tokens, np.inf)
        for tile_m, tile_n, share in _TILES:
            tiles = np.ceil(tokens / tile_m) * np.ceil(outputs / tile_n) * number
            tile_s = 2.0 * inputs * tile_m * tile_n * self.cores / (rate * share)
            # Engines divide the sums of the last wave among idle cores where that helps.
            waves = np.ceil(tiles / self.cores)
            best = np.minimum(best, waves * tile_s)
        return best


def _product(
    name: str, device: _Device, matrix: Matrix, tokens: Floats, tp: int
) -> Operator:
    inputs, outputs = _part(matrix, tp)
    once = np.ones_like(tokens)
    compute = device.product_s(tokens, inputs, outputs, matrix.rate_bits, once)
    moved: Floats = tokens * (inputs + outputs) * _ACTIVATION_BYTES
    moved = moved + inputs * outputs * matrix.bits / 8
    return _in_all_layers(name, device, matrix, compute, moved)


def _in_all_layers(
    name: str, device: _Device, matrix: Matrix, compute_s: Floats, moved: Floats
) -> Operator:
    """A product by the seconds of its arithmetic and the bytes that it moves in one layer."""
    return Operator(
        name,
        compute_s * matrix.count,
        moved / device.bandwidth * matrix.count,
        kernels=matrix.count,
    )


def _experts(
    device: _Device, matrix: Matrix, tokens: Floats, parallel: Parallelism
) -> Operator:
    """A matrix of each expert, in one kernel for all experts of a device."""
    inputs, outputs = _part(matrix, parallel.tp // parallel.ep)
    routed = tokens * matrix.chosen
    used = experts_used(matrix.experts, matrix.chosen, tokens)
    each = routed / np.maximum(used, 1.0)
    here = used / parallel.ep
    compute = device.product_s(each, inputs, outputs, matrix.rate_bits, here)
    moved = here * inputs * outputs * matrix.bits / 8
    moved = moved + routed / parallel.ep * (inputs + outputs) * _ACTIVATION_BYTES
    return _in_all_layers("experts", device, matrix, compute, moved)


def experts_used(experts: int, chosen: int, tokens: Floats) -> Floats:
    """Experts of a layer whose weights are read, if tokens choose at random."""
    idle: Floats = (1.0 - chosen / experts) ** tokens
    return experts * (1.0 - idle)


def _part(matrix: Matrix, tp: int) -> tuple[int, int]:
    """Inputs and outputs of a device's part."""
    if matrix.split is Split.COLUMNS:
        return matrix.inputs, max(1, -(-matrix.outputs // tp))
    if matrix.split is Split.ROWS:
        return max(1, -(-matrix.inputs // tp)), matrix.outputs
    return matrix.inputs, matrix.outputs


def _reductions(
    shape: ModelShape, device: _Device, parallel: Parallelism, residual_bytes: Floats
) -> Iterator[Operator]:
    """The reductions over devices, and the sends between stages."""

    def reduce_s(sent: Floats, devices: int) -> Floats:
        if devices == 1:
            return np.zeros_like(sent)
        ring = 2.0 * (devices - 1) / devices * sent / device.link
        return ring + _REDUCE_S

    layers, ranks = shape.num_layers, parallel.attention_ranks
    behind_attention = reduce_s(residual_bytes, parallel.attention_tp)
    # Attention ranks gather the tokens of all and scatter the sums: as much as a reduction.
    behind_others = reduce_s(residual_bytes * ranks, parallel.tp)
    link = (behind_attention + behind_others) * layers
    if parallel.pp > 1:
        link = link + residual_bytes / device.link * (parallel.pp - 1)
    yield Operator("links", link_s=link)


# Tokens of a step at which products are timed: each number at first, as experts are read one
# by one there, and then at this distance, as tiles are. With so many a step reads nearly all
# weights, and computes little. Beyond, waves are too many to be seen.
_EACH, _DISTANCE, _MOST, _LAST = 64, 64, 16384, 65536
# Requests, tokens of KV and pairs that are counted for the time of one.
_MANY = 1e6


def step_costs(
    model: ModelSpec,
    hardware: HardwareSpec,
    parallel: Parallelism,
    *,
    shared_kv_read_once: bool = False,
    interference_exponent: float = 1.0,
) -> CostModel:
    """Costs of one attention rank's requests, the other ranks' steps being like its own.

    With ``pp`` stages, a step is a round in which each micro-batch passes all of them.

    Raises:
        ConfigError: the model's operators are not known, or a setting is out of range.
    """
    tokens = np.concatenate(
        [[0.0], np.arange(1, _EACH), np.arange(_EACH, _MOST + 1, _DISTANCE), [_LAST]]
    )
    batch, pp = tokens / parallel.pp, parallel.pp

    def timed(work: StepWork) -> StepSeconds:
        return step_seconds(model, hardware, parallel, work)

    layers, with_head = timed(StepWork.of(batch, 0.0)), timed(StepWork.of(batch, batch))
    table = np.zeros((6, len(tokens)))
    table[TOKENS] = tokens
    table[COMPUTE] = layers.compute_s
    table[MEMORY] = layers.memory_s
    table[OTHER] = layers.other_s
    table[HEAD_COMPUTE] = with_head.compute_s - layers.compute_s
    table[HEAD_MEMORY] = with_head.memory_s - layers.memory_s

    def of_one(**work: float) -> float:
        """Seconds of one of these, less those of a step without any."""
        many = timed(StepWork.of(0.0, 0.0, **{k: _MANY * x for k, x in work.items()}))
        none = timed(StepWork.of(0.0, 0.0))
        return float(many.total_s - none.total_s) / _MANY / pp

    kv_read_s = of_one(kv_tokens=1.0)
    encoder_rate = hardware.compute_flops * hardware.efficiency.matrix_share
    encoder_rate *= parallel.attention_tp
    return CostModel(
        token_time_s=least_token_s(table, interference_exponent),
        kv_read_time_s=kv_read_s,
        # Tokens attend to half of the square of a prompt.
        attention_time_s=of_one(prompt_pairs=0.5),
        weight_read_time_s=float((layers.memory_s + layers.other_s)[_EACH]),
        shared_kv_read_once=shared_kv_read_once,
        interference_exponent=float(interference_exponent),
        state_reads=of_one(decodes=1.0) / kv_read_s,
        window=model.window,
        window_reads=of_one(window_kv_tokens=1.0) / kv_read_s,
        encoder_token_time_s=model.encoder_flops_per_token / encoder_rate,
        table=table,
    )


def least_token_s(table: Floats, exponent: float) -> float:
    """Seconds of a token in the step that takes least for each of its tokens."""
    seconds = [
        overlapped(compute, memory, exponent) + other
        for compute, memory, other in zip(
            *table[[COMPUTE, MEMORY, OTHER], 1:].tolist(), strict=True
        )
    ]
    return float(min(seconds / table[TOKENS, 1:]))
