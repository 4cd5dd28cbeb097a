"""Kimi Delta Attention (Kimi Linear) in PyTorch, for SGLang on a CPU.

The recurrence is that of gated delta nets, with a decay of its own for each channel of a
key: Kimi Linear, 2025, equation 1.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor
from torch.nn import functional

from .linear_attention import (
    attend_prompts,
    attend_tokens,
    causal_conv1d_fn,
    causal_conv1d_update,
    rms_norm_gated,
    unit,
)


def use_pytorch() -> None:
    """Have SGLang's Kimi Delta Attention computed by this module. Later calls do nothing."""
    for module, functions in _PLACES.items():
        vars(importlib.import_module(module)).update(functions)


def decays_of(
    gates: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None
) -> Tensor:
    """What each channel of the state keeps at each token, in 0..1, float32.

    gates: ``[n, heads, key_dim]``, as projected.
    A_log: ``[heads]`` and dimensions of 1.
    dt_bias: ``[heads * key_dim]``.
    lower_bound: the most negative logarithm of a decay, None for no bound.
    """
    rate = A_log.float().reshape(-1, 1).exp()
    gates = gates.float() + dt_bias.float().view(gates.shape[1:])
    if lower_bound is None:
        return (-rate * functional.softplus(gates)).exp()
    return (lower_bound * (rate * gates).sigmoid()).exp()


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None = None,
    beta_is_raw: bool = False,
    **_: object,
) -> Tensor:
    """Attend the tokens of prompts, one after the other. Queries and keys are normalised.

    q, k, g: ``[1, num_tokens, heads, key_dim]``.
    v: ``[1, num_tokens, heads, value_dim]``.
    beta: ``[1, num_tokens, heads]``.
    initial_state: ``[num_slots, heads, value_dim, key_dim]``, changed in place.

    Returns:
        ``[1, num_tokens, heads, value_dim]``.
    """
    strengths = beta[0].float()
    return attend_prompts(
        unit(q[0].float()) * q.shape[-1] ** -0.5,
        unit(k[0].float()),
        v,
        decays_of(g[0], A_log, dt_bias, lower_bound),
        strengths.sigmoid() if beta_is_raw else strengths,
        initial_state,
        initial_state_indices,
        cu_seqlens,
    )


def packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    lower_bound: float | None = None,
    **_: object,
) -> None:
    """Attend one token of each request. Queries and keys are normalised.

    mixed_qkv: ``[num_requests, heads * (2 * key_dim + value_dim)]``.
    a: ``[num_requests, heads * key_dim]``, the gates of decays.
    b: ``[num_requests, heads]``.
    initial_state: ``[num_slots, heads, value_dim, key_dim]``, changed in place.
    out: ``[num_requests, 1, heads, value_dim]``, written.
    """
    _, heads, value_dim, key_dim = initial_state.shape
    sizes = [heads * key_dim, heads * key_dim, heads * value_dim]
    q, k, v = (x.unflatten(1, (heads, -1)).float() for x in mixed_qkv.split(sizes, 1))
    attend_tokens(
        unit(q) * scale,
        unit(k),
        v,
        decays_of(a.unflatten(1, (heads, key_dim)), A_log, dt_bias, lower_bound),
        b.float().sigmoid(),
        initial_state,
        ssm_state_indices,
        out,
    )


_PLACES: dict[str, dict[str, Any]] = {
    "sglang.srt.layers.attention.linear.kda_backend": {
        "causal_conv1d_fn": causal_conv1d_fn,
        "causal_conv1d_update": causal_conv1d_update,
    },
    "sglang.srt.layers.attention.linear.kernels.kda_triton": {
        "chunk_kda": chunk_kda,
        "fused_recurrent_kda_packed_decode": packed_decode,
    },
    "sglang.kernels.ops.attention.fla.fused_norm_gate": {
        "rms_norm_gated": rms_norm_gated
    },
}
"""The modules that name kernels, and what takes their places."""
