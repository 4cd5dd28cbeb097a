"""SGLang's norms, activations and rotary embeddings on a CPU, each one call of a kernel."""

from __future__ import annotations

from typing import Any

import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

from sgl_kernel_ext import token_layers as kernels
from sgl_kernel_ext.host_kernels import DTYPES


def use(platform: str) -> None:
    """Have SGLang's layers call the kernels on an out-of-tree platform, by its key."""
    ops = {SiluAndMul: _silu_and_mul, RMSNorm: _rms_norm, RotaryEmbedding: _rotate}
    for subclass in _subclasses(RotaryEmbedding):
        if rotates_plainly(subclass):
            ops[subclass] = _rotate
    for op, forward in ops.items():
        BaseFusedOp.register_oot_forward(op, forward, platform)


def rotates_plainly(kind: type[RotaryEmbedding]) -> bool:
    """Whether a class of embeddings rotates as the base class."""
    same: bool = kind.forward_native is RotaryEmbedding.forward_native
    return same


def is_plain_norm(layer: RMSNorm) -> bool:
    """Whether a norm of all values is computed and rounded as the kernel does."""
    return (
        layer.variance_size_override is None
        and not layer.cast_x_before_out_mul
        and not layer.fp32_residual
        and layer.override_orig_dtype is None
    )


def _subclasses(base: type) -> list[Any]:
    direct: list[Any] = base.__subclasses__()
    return [*direct, *(deeper for each in direct for deeper in _subclasses(each))]


def _is_known(*tensors: torch.Tensor) -> bool:
    return all(
        tensor.dtype in DTYPES
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad and torch.is_grad_enabled())
        for tensor in tensors
    )


def _silu_and_mul(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if not (_is_known(x) and x.is_contiguous()):
        found: torch.Tensor = layer.forward_native(x)
        return found
    return kernels.silu_and_mul(x)


def _rms_norm(
    layer: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: torch.nn.Module | None = None,
) -> Any:
    """As on a GPU, ``x`` and ``residual`` are overwritten where both are given."""
    tensors = (x, layer.weight) if residual is None else (x, layer.weight, residual)
    is_plain = (
        post_residual_addition is None
        and is_plain_norm(layer)
        and x.shape[-1] == layer.hidden_size
        and x.dtype == tensors[-1].dtype
    )
    contiguous = all(tensor.is_contiguous() for tensor in tensors)
    if not (is_plain and contiguous and _is_known(*tensors)):
        return layer.forward_native(x, residual, post_residual_addition, quant_linear)
    if residual is None:
        return kernels.rms_norm(x, layer.weight, layer.variance_epsilon)
    kernels.add_rms_norm_(x, residual, layer.weight, layer.variance_epsilon)
    return x, residual


def _rotate(
    layer: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As on a GPU, queries and keys are overwritten."""
    table, size = layer.cos_sin_cache, layer.head_size
    is_plain = (
        fused_set_kv_buffer_arg is None
        and not hasattr(layer, "sin_cos_cache")
        and positions.dim() == 1
        and _is_known(query, key, table)
        and all(
            x.dim() == 2 and x.stride(1) == 1 and not x.shape[1] % size
            for x in (query, key)
        )
    )
    if not is_plain:
        found: tuple[torch.Tensor, torch.Tensor] = layer.forward_native(
            positions, query, key, offsets, fused_set_kv_buffer_arg
        )
        return found
    at = positions if offsets is None else positions + offsets
    at = at.to(torch.int64).contiguous()
    for x in (query, key):
        kernels.rotate_(x, size, at, table, layer.is_neox_style)
    return query, key
