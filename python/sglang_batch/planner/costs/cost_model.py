"""The cost model: compute time and memory time of a request, and the seconds of a step.

The model is BlendServe's (section 2.3). A request of ``p`` prompt tokens that generates
``d`` tokens, on a model of ``P`` parameters::

    Comp = ((p + d) * 2 * P + p^2 * H * L * 4) / compute
    Mem  = (p * d + d^2 / 2) * (KV bytes per token) / bandwidth

``Comp / Mem`` is its compute density: above 1 compute takes longer, below 1 memory. Steps
are timed by a table over their number of tokens, which compiled code reads.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...errors import ConfigError
from ..compiled import jit, jit_in_place
from ..requests import Floats, Int32s, Int64s
from .hardware import HardwareSpec, Parallelism
from .model_spec import ModelSpec

# Rows of a table.
TOKENS, COMPUTE, MEMORY, OTHER, HEAD_COMPUTE, HEAD_MEMORY = range(6)


class StepExtras(NamedTuple):
    """Seconds that an engine spends in a step besides its operators, where they were measured.

    prompt_step_s: of a step with prompts.
    prompt_s: for each request of which a part of the prompt is computed.
    decode_s, mixed_decode_s: for each request that decodes, the latter in a step with prompts.
    mixed_kv_token_s: for each token of KV that these read, besides its time in other steps.
    prompt_context_s, prompt_square_s: for each token of a prompt up to here, and for its square,
        those in the cache included.
    mixed_square_s: for each square of the KV of a row that decodes in a step with prompts.
    request_s: for the arrival and the end of each request.
    after_prompts_s: of a step that only decodes, after one with prompts.
    """

    prompt_step_s: float = 0.0
    prompt_s: float = 0.0
    decode_s: float = 0.0
    mixed_decode_s: float = 0.0
    mixed_kv_token_s: float = 0.0
    prompt_context_s: float = 0.0
    prompt_square_s: float = 0.0
    mixed_square_s: float = 0.0
    request_s: float = 0.0
    after_prompts_s: float = 0.0


NO_EXTRAS = StepExtras()


def linear_table(token_time_s: float, weight_read_time_s: float) -> Floats:
    """The table of a machine whose steps read all weights and compute at one rate: float64
    ``[6, 2]``, tokens, then seconds of operators limited by arithmetic, of those limited by reads,
    and of neither; then the first two of these for the output matrix, by the number of rows."""
    table = np.zeros((6, 2))
    table[TOKENS] = 0.0, 1.0
    table[COMPUTE, 1] = token_time_s
    table[MEMORY] = weight_read_time_s
    return table


@jit_in_place
def matrix_seconds(
    table: Floats, tokens: float, rows: float
) -> tuple[float, float, float]:
    """Seconds of a step without attention: of arithmetic, of reads, and of neither.

    Args:
        table: as :func:`linear_table` has it.
        tokens: of prompts and answers.
        rows: those whose logits are needed.
    """
    column = _segment(table, tokens)
    compute = _at(table, COMPUTE, column, tokens)
    memory = _at(table, MEMORY, column, tokens)
    other = _at(table, OTHER, column, tokens)
    column = _segment(table, rows)
    compute += _at(table, HEAD_COMPUTE, column, rows)
    memory += _at(table, HEAD_MEMORY, column, rows)
    return compute, memory, other


@jit_in_place
def _segment(table: Floats, tokens: float) -> int:
    """The column of a table that begins the interval of this number of tokens."""
    low, high = 0, table.shape[1] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if table[TOKENS, middle] <= tokens:
            low = middle
        else:
            high = middle
    return low


@jit_in_place
def _at(table: Floats, row: int, column: int, tokens: float) -> float:
    """A row's value at this number of tokens, on the line through two columns."""
    begin, end = table[TOKENS, column], table[TOKENS, column + 1]
    low, high = table[row, column], table[row, column + 1]
    return float(low + (high - low) * ((tokens - begin) / (end - begin)))


# A step runs as two forwards only if that is expected to be faster by this share or more.
MIN_SPLIT_GAIN = 0.05

# SGLang's defaults: ``--mamba-full-memory-ratio``, memory for states over memory for KV, and
# ``--swa-full-tokens-ratio``, tokens in sliding-window layers over tokens in the others.
STATES_TO_KV, WINDOWS_TO_KV = 0.9, 0.8

Values = float | Floats | Int32s | Int64s


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds per token, per token squared, and per token of KV read.

    The methods take numbers or arrays of the same shape and compute in float64.

    token_time_s: compute time of one token in all matrices.
    kv_read_time_s: time to read one token's KV, in all layers that read all tokens.
    attention_time_s: compute time of attention per squared prompt token. The paper's
        ``4 * H * L`` counts the whole square, not the causal half; its algorithms leave it out.
    weight_read_time_s: time to read all weights once, which every step does. The paper leaves
        it out. For a mixture of experts it is an upper bound.
    shared_kv_read_once: whether the attention kernel reads a prefix that several
        running requests share once for all of them (cascade attention, section 6.2).
    interference_exponent: k of :func:`overlapped`, 1 or more. 1.47 reproduces the mean
        speedup of the paper's simulated grid (Fig. 9).
    row_share: w of :func:`tokens_read`, 0 or more: one row alone uses at most 1/w of the
        bandwidth. 0 where nobody measured it.
    padded: whether attention reads as many tokens for every row as for the longest.
    state_reads: a row's recurrent states, as tokens of KV that take as long to read.
    window: tokens that sliding-window layers read at most.
    window_reads: one token's KV in these layers, over its KV in the others.
    encoder_token_time_s: compute time of the encoder for each placeholder of an image or
        sound, besides ``token_time_s``.
    table: seconds of a step's matrices by its tokens, float64 ``[6, columns]`` as of
        :func:`linear_table`. With it, ``token_time_s`` and ``weight_read_time_s`` only order
        requests and share work out.
    extras: seconds of a step besides its operators.
    split_exponent: k of :func:`overlapped` for prompts and decodes of a step that runs as two
        forwards at the same time (``srt.overlap``), where that is faster. 1: none does.

    Raises:
        ConfigError: a number is negative or not finite, or the exponent is below 1.
    """

    token_time_s: float
    kv_read_time_s: float
    attention_time_s: float = 0.0
    weight_read_time_s: float = 0.0
    shared_kv_read_once: bool = False
    interference_exponent: float = 1.47
    row_share: float = 0.0
    padded: bool = False
    state_reads: float = 0.0
    window: int = 0
    window_reads: float = 0.0
    encoder_token_time_s: float = 0.0
    table: Floats | None = dataclasses.field(default=None, compare=False)
    extras: StepExtras = NO_EXTRAS
    split_exponent: float = 1.0

    @property
    def step_table(self) -> Floats:
        """``table``, or the linear one."""
        if self.table is not None:
            return self.table
        # Integers would make numba compile all steps again.
        return linear_table(float(self.token_time_s), float(self.weight_read_time_s))

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_time = field.name.endswith("_time_s")
            if is_time and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{field.name}={value!r} must be 0 or more seconds.")
        if not self.interference_exponent >= 1:
            raise ConfigError(
                f"interference_exponent={self.interference_exponent!r} must be 1 (no "
                "overlap) or more; infinity is perfect overlap."
            )
        if not (math.isfinite(self.row_share) and self.row_share >= 0):
            raise ConfigError(f"row_share={self.row_share!r} must be 0 or more.")

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        hardware: HardwareSpec,
        *,
        tp: int = 1,
        attention_flops: bool = False,
        weight_reads: bool = False,
        shared_kv_read_once: bool = False,
        interference_exponent: float = 1.47,
        fp8: bool = False,
    ) -> CostModel:
        """The model on ``tp`` of these devices.

        Communication is not counted (BlendServe, section 6.1): see :mod:`.step_costs`.

        Args:
            attention_flops: whether to count attention's p^2 term.
            weight_reads: whether to count reading the weights in every step.
            fp8: whether matrices, but not attention, are multiplied at the device's
                fp8 rate.

        Raises:
            ConfigError: a setting is out of range, or the device has no fp8 rate.
        """
        Parallelism(tp=tp)  # refuses what is no number of devices
        flops, bandwidth = (
            hardware.compute_flops * tp,
            hardware.bandwidth_bytes_per_s * tp,
        )
        matrix_flops = flops
        if fp8:
            if hardware.fp8_flops is None:
                raise ConfigError(
                    f"fp8=True, but {hardware.name} has no fp8_flops; use a device that "
                    "has, or fp8=False."
                )
            matrix_flops = hardware.fp8_flops * tp
        attention = 4 * model.hidden * model.num_layers / flops
        weights = model.weight_bytes / bandwidth
        kv_bytes = model.full_kv_bytes_per_token * model.kv_replicas(tp)
        others_s = model.other_flops_per_token / flops
        return cls(
            token_time_s=2 * model.num_active_params / matrix_flops + others_s,
            kv_read_time_s=kv_bytes / bandwidth,
            attention_time_s=attention if attention_flops else 0.0,
            weight_read_time_s=weights if weight_reads else 0.0,
            shared_kv_read_once=shared_kv_read_once,
            interference_exponent=float(interference_exponent),
            state_reads=2 * model.state_bytes / kv_bytes,
            window=model.window,
            window_reads=model.window_kv_bytes_per_token
            / model.full_kv_bytes_per_token,
            encoder_token_time_s=model.encoder_flops_per_token / flops,
        )

    def light_tokens(self, longer: float) -> int:
        """Most tokens of a step, without attention, that takes at most ``longer`` times as long
        as a step of one token."""

        def seconds(tokens: int) -> float:
            rows = float(tokens)
            compute, memory, other = matrix_seconds(self.step_table, rows, rows)
            return overlapped(compute, memory, self.interference_exponent) + other

        return bisect_right(range(1, 1 << 16), longer * seconds(1), key=seconds)

    def more_reads(self, input_len: Values) -> Floats:
        """States and windows of a request, as tokens of KV that take as long to read in a
        decode step. Windows count as they are when it begins."""
        windows = np.minimum(_floats(input_len), self.window) * self.window_reads
        return np.rint(windows + self.state_reads)

    def compute_time_s(self, input_len: Values, output_len: Values) -> Floats:
        """Comp(r): compute time of requests that share nothing, in seconds."""
        p, d = _floats(input_len), _floats(output_len)
        return (p + d) * self.token_time_s + p * p * self.attention_time_s

    def memory_time_s(
        self, input_len: Values, output_len: Values, output_len_sq: Values | None = None
    ) -> Floats:
        """Mem(r): time to read KV while requests generate, in seconds.

        Without states and windows: add :meth:`more_reads` to ``input_len``.

        Args:
            output_len: d, or an estimate E[d].
            output_len_sq: E[d^2], if d is an estimate. None: d^2.
        """
        p, d = _floats(input_len), _floats(output_len)
        d_sq = d * d if output_len_sq is None else _floats(output_len_sq)
        return (p * d + d_sq / 2) * self.kv_read_time_s

    def prefill_time_s(self, new_tokens: Values, prefix_len: Values) -> Floats:
        """Compute time in seconds of prompt tokens after a prefix computed before.

        The chunks of a prompt add up to the whole: attention is ``(prefix + new)^2 - prefix^2``.
        """
        new, prefix = _floats(new_tokens), _floats(prefix_len)
        attended = new * (new + 2 * prefix)
        return new * self.token_time_s + attended * self.attention_time_s

    def step_time_s(self, compute_time_s: Values, memory_time_s: Values) -> Floats:
        """The time of both together by :func:`overlapped`, elementwise, in seconds. The caller adds
        ``weight_read_time_s`` to ``memory_time_s`` once per step."""
        compute, memory = np.broadcast_arrays(
            _floats(compute_time_s), _floats(memory_time_s)
        )
        out = np.empty(compute.shape)
        _overlapped_each(
            compute.ravel(), memory.ravel(), self.interference_exponent, out.ravel()
        )
        return out[()]


def compute_density(compute_time_s: Values, memory_time_s: Values) -> Floats:
    """rho = compute time / memory time, elementwise, never NaN for finite times.

    Infinite for requests that generate nothing, which sort before all others. 1 for requests
    without any work, which belong to neither side.
    """
    compute, memory = np.broadcast_arrays(
        _floats(compute_time_s), _floats(memory_time_s)
    )
    density = np.where(compute > 0, np.inf, 1.0)
    with np.errstate(over="ignore"):
        np.divide(compute, memory, out=density, where=memory > 0)
    return density[()]


@jit
def tokens_read(
    total: float, longest: float, rows: float, row_share: float, padded: bool
) -> float:
    """Tokens of KV whose reading takes as long as a decode step's attention does.

    ``max(total, w * longest)``: a row cannot use the whole bandwidth alone. With balanced
    split-KV ``w``, the ``row_share``, is near 0. Dense batches read ``rows * longest``.

    Args:
        total: tokens that all rows read.
        longest: tokens that the longest row reads.
    """
    if padded:
        return rows * longest
    return max(total, row_share * longest)


@jit
def overlapped(compute_s: float, memory_s: float, k: float) -> float:
    """Seconds that compute and memory reads take together.

    ``(compute_s^k + memory_s^k)^(1/k)``: k = 1 is one after the other (the sum), infinity
    is perfect overlap (the maximum). It replaces the polynomial that BlendServe (section 5.1)
    fits to measurements and does not print. ``k`` is 1 or more, the times are 0 or more.
    """
    if k == 1.0:
        return compute_s + memory_s
    longer = max(compute_s, memory_s)
    # An infinite time would make the ratio NaN.
    if longer == 0.0 or math.isinf(k) or math.isinf(longer):
        return longer
    # The ratio is at most 1: its power may underflow to 0, but cannot overflow.
    ratio = min(compute_s, memory_s) / longer
    return longer * math.exp(math.log1p(ratio**k) / k)


@jit
def _overlapped_each(compute: Floats, memory: Floats, k: float, out: Floats) -> None:
    for i in range(len(out)):
        out[i] = overlapped(compute[i], memory[i], k)


def kv_capacity_tokens(
    model: ModelSpec, hardware: HardwareSpec, tp: int = 1, mem_fraction: float = 0.9
) -> int:
    """Tokens of KV that fit on ``tp`` devices together with the weights.

    Args:
        mem_fraction: share of each device's memory for weights and KV, 0 to 1.

    Raises:
        ConfigError: a setting is out of range, or the weights leave no memory for KV.
    """
    if not 0 < mem_fraction <= 1:
        raise ConfigError(f"mem_fraction={mem_fraction!r} must be above 0, at most 1.")
    Parallelism(tp=tp)  # refuses what is no number of devices
    usable = hardware.memory_bytes * tp * mem_fraction
    tokens = kv_tokens_in(model, usable - model.weight_bytes, tp)
    if tokens < 1:
        name = f"{tp}x {hardware.name}" if tp > 1 else hardware.name
        raise ConfigError(
            f"The weights take {model.weight_bytes / 1e9:.1f} GB and leave no room for KV "
            f"in the {usable / 1e9:.1f} GB usable of {name} (mem_fraction="
            f"{mem_fraction}); raise tp or mem_fraction, or quantise the weights."
        )
    return tokens


def kv_tokens_in(model: ModelSpec, num_bytes: float, tp: int = 1) -> int:
    """Tokens of KV that fit into so much memory of ``tp`` devices, all together. States and windows
    have the shares of memory that SGLang gives them by default."""
    if model.state_bytes:
        num_bytes /= 1.0 + STATES_TO_KV
    windows = model.window_kv_bytes_per_token
    if model.own_window_pool:
        windows *= WINDOWS_TO_KV
    held = model.full_kv_bytes_per_token + windows
    return math.floor(num_bytes / (held * model.kv_replicas(tp)))


def num_states(model: ModelSpec, kv_tokens: int, tp: int = 1) -> int:
    """Recurrent states that SGLang has room for next to so many tokens of KV."""
    if not model.state_bytes:
        return 0
    kv_bytes = kv_tokens * model.kv_bytes_per_token * model.kv_replicas(tp)
    return int(STATES_TO_KV * kv_bytes // model.state_bytes)


def num_window_tokens(model: ModelSpec, kv_tokens: int) -> int:
    """Tokens of KV in a pool for sliding-window layers, 0 if they have none."""
    return int(kv_tokens * WINDOWS_TO_KV) if model.own_window_pool else 0


def _floats(values: Values) -> Floats:
    return np.asarray(values, dtype=np.float64)


# Whether a step should compute prompts and decode together, or one after the other.
#
# Together they pass the matrices once and share the other costs of a step. Engines compute the
# attention of such a step with the kernels of prompts, which may take longer for rows that decode.
# By a machine's timed steps, the seconds that mixing loses are ::
#
#     decodes * a + KV * b + KV^2 / decodes * c - step
#         - (m(prompt tokens) + m(decodes) - m(both))
#
# with ``m`` the seconds of the matrices. Datasheets have no ``a``, ``b`` and ``c``: without timed
# steps, prompts and decodes are always mixed.

# ``m`` is known at 0 tokens and at powers of 2 below this exponent.
_POWERS = 16


class MixingCost(NamedTuple):
    """The costs and savings of mixing on a machine, in seconds.

    decode_s, kv_token_s, kv_square_s: a, b and c, of a row that decodes, a token of KV that it
        reads, and the square of these.
    step_s: of a step besides its tokens, and of the change from prompts to decodes.
    matrices_s: m at 0, 1, 2, 4, ... tokens.
    """

    decode_s: float
    kv_token_s: float
    kv_square_s: float
    step_s: float
    matrices_s: tuple[float, ...]

    @classmethod
    def of(cls, cost: CostModel) -> MixingCost | None:
        """None where mixing loses nothing."""
        extras = cost.extras
        decode_s = extras.mixed_decode_s - extras.decode_s
        if max(decode_s, extras.mixed_kv_token_s, extras.mixed_square_s) <= 0:
            return None
        table = cost.step_table
        tokens = [0.0, *(2.0**power for power in range(_POWERS))]
        seconds = np.interp(tokens, table[TOKENS], table[COMPUTE] + table[MEMORY])
        return cls(
            float(decode_s),
            float(extras.mixed_kv_token_s),
            float(extras.mixed_square_s),
            float(np.interp(1.0, table[TOKENS], table[OTHER])) + extras.after_prompts_s,
            tuple(seconds.tolist()),
        )


# For compiled code, which needs one of the same type.
ALWAYS_MIXED = MixingCost(0.0, 0.0, 0.0, 0.0, (0.0,) * (_POWERS + 1))


@jit_in_place
def mixing_loss_s(
    cost: MixingCost, prompt_tokens: float, decodes: float, kv_tokens: float
) -> float:
    """Seconds by which a mixed step takes longer than two, below 0 if it takes less, by its tokens
    of prompts, its rows that decode and their tokens of KV."""
    loss = decodes * cost.decode_s + kv_tokens * cost.kv_token_s - cost.step_s
    loss += cost.kv_square_s * kv_tokens * kv_tokens / max(decodes, 1.0)
    apart = _matrices(cost, prompt_tokens) + _matrices(cost, decodes)
    return float(loss - (apart - _matrices(cost, prompt_tokens + decodes)))


@jit_in_place
def _matrices(cost: MixingCost, tokens: float) -> float:
    """m, on lines between powers of 2."""
    if tokens <= 1.0:
        low = cost.matrices_s[0]
        return float(low + (cost.matrices_s[1] - low) * tokens)
    power = 0
    while power < len(cost.matrices_s) - 3 and 2.0 ** (power + 1) <= tokens:
        power += 1
    low, high = cost.matrices_s[power + 1], cost.matrices_s[power + 2]
    return float(low + (high - low) * (tokens / 2.0**power - 1.0))
