"""Memory of a device under any parallelism: its part of the weights, and the rest for KV."""

from __future__ import annotations

from ...errors import ConfigError
from ..costs.cost_model import kv_tokens_in
from ..costs.hardware import HardwareSpec
from ..costs.layer_matrices import Matrix, Split
from ..costs.model_spec import ModelSpec
from .parallelism import Parallelism


def device_weight_bytes(model: ModelSpec, parallel: Parallelism) -> float:
    """Bytes of weights on a device.

    Attention ranks each have a copy of the attention's matrices. What is in no matrix (norms,
    the embedding) is divided like one.
    """
    shape = model.shape
    if shape is None:
        return model.weight_bytes / (parallel.tp * parallel.pp)
    all_matrices = (*shape.mixers, *shape.feed_forward)
    others = model.weight_bytes - sum(map(_bytes, all_matrices))
    held = others / parallel.tp
    held += sum(_held(matrix, parallel.attention_tp) for matrix in shape.mixers)
    held += sum(_held(matrix, parallel.tp) for matrix in shape.feed_forward)
    return held / parallel.pp


def rank_kv_tokens(
    model: ModelSpec,
    hardware: HardwareSpec,
    parallel: Parallelism,
    mem_fraction: float = 0.9,
) -> int:
    """Tokens of KV that fit on the devices of one attention rank, in all stages.

    States and windows have the shares of memory that SGLang gives them by default.

    Args:
        mem_fraction: share of each device's memory for weights and KV, 0 to 1.

    Raises:
        ConfigError: the weights leave no memory for KV.
    """
    weights = device_weight_bytes(model, parallel)
    usable = hardware.memory_bytes * mem_fraction
    tp = parallel.attention_tp
    tokens = kv_tokens_in(model, (usable - weights) * tp * parallel.pp, tp)
    if tokens < 1:
        raise ConfigError(
            f"the weights take {weights / 1e9:.1f} GB of the {usable / 1e9:.1f} GB usable "
            f"of each {hardware.name} with {parallel}"
        )
    return tokens


def _bytes(matrix: Matrix) -> float:
    return matrix.params * matrix.bits / 8


def _held(matrix: Matrix, tp: int) -> float:
    return _bytes(matrix) / (1 if matrix.split is Split.WHOLE else tp)
