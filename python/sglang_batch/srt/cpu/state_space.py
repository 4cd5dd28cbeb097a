"""Mamba-2 layers (Nemotron-H, Granite 4, Falcon-H1) in PyTorch, for SGLang on a CPU.

Functions have the names and arguments of the kernels whose place they take, as far as SGLang
gives them. The recurrence is that of the paper, token by token: Dao and Gu, Transformers are
SSMs, 2024, equation 1 with the discretisation of section 7.
"""

from __future__ import annotations

import importlib
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from .linear_attention import causal_conv1d_fn, causal_conv1d_update

_MODULE = "sglang.srt.layers.attention.mamba.mamba"


def use_pytorch() -> None:
    """Have SGLang's Mamba-2 layers computed by this module. Later calls do nothing."""
    vars(importlib.import_module(_MODULE)).update(
        causal_conv1d_fn=causal_conv1d_fn,
        causal_conv1d_fn_triton=causal_conv1d_fn,
        causal_conv1d_update=causal_conv1d_update,
        causal_conv1d_update_triton=causal_conv1d_update,
        mamba_chunk_scan_combined=mamba_chunk_scan_combined,
        selective_state_update=selective_state_update,
    )


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor,
    initial_states: Tensor | None,
    out: Tensor,
    **_: object,
) -> tuple[None, Tensor, None]:
    """Scan prompts, one after the other.

    x: ``[1, num_tokens, heads, head_dim]``.
    dt: ``[1, num_tokens, heads]``, before its bias and softplus.
    A, D, dt_bias: ``[heads]``.
    B, C: ``[1, num_tokens, groups, state_dim]``, ``heads`` is a multiple of ``groups``.
    initial_states: ``[num_prompts, heads, head_dim, state_dim]``. None: zero.
    out: ``[1, num_tokens, heads, head_dim]``, written.

    Returns:
        The last states of the prompts, like ``initial_states``, between what nobody asks
        for here.
    """
    heads = x.shape[2]
    steps = functional.softplus(dt[0].float() + dt_bias.float())
    inputs, (write, read) = x[0].float(), (_per_head(y[0], heads) for y in (B, C))
    decays = (steps * A.float()).exp()
    ends = cu_seqlens.tolist()
    states = []
    for number, (begin, end) in enumerate(pairwise(ends)):
        if initial_states is None:
            state = inputs.new_zeros(heads, x.shape[3], B.shape[3])
        else:
            state = initial_states[number].float()
        for at in range(begin, end):
            state, output = _step(
                state, inputs[at], steps[at], decays[at], write[at], read[at]
            )
            out[0, at] = (output + D[:, None] * inputs[at]).to(out.dtype)
        states.append(state)
    return None, torch.stack(states), None


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    dt_bias: Tensor,
    state_batch_indices: Tensor,
    out: Tensor,
    **_: object,
) -> None:
    """Scan one token of each request.

    state: ``[num_slots, heads, head_dim, state_dim]``, changed in place.
    x: ``[num_requests, heads, head_dim]``, and ``dt`` the same for each channel.
    A: ``[heads, head_dim, state_dim]``, the same for each channel and dimension.
    B, C: ``[num_requests, groups, state_dim]``.
    D, dt_bias: ``[heads, head_dim]``, the same for each channel.
    out: ``[num_requests, heads, head_dim]``, written.
    """
    heads = x.shape[1]
    slots = state_batch_indices.long()
    steps = functional.softplus(dt[..., 0].float() + dt_bias[:, 0].float())
    new, output = _step(
        state[slots].float(),
        x.float(),
        steps,
        (steps * A[:, 0, 0].float()).exp(),
        _per_head(B, heads),
        _per_head(C, heads),
    )
    state[slots] = new.to(state.dtype)
    out[:] = (output + D * x.float()).to(out.dtype)


def _step(
    state: Tensor, x: Tensor, step: Tensor, decay: Tensor, write: Tensor, read: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: the new state ``[..., heads, head_dim, state_dim]``, and what is read
    from it ``[..., heads, head_dim]``."""
    change = (step.unsqueeze(-1) * x).unsqueeze(-1) * write.unsqueeze(-2)
    state = state * decay[..., None, None] + change
    return state, (state * read.unsqueeze(-2)).sum(-1)


def _per_head(x: Tensor, heads: int) -> Tensor:
    """``[n, groups, dim]``, repeated for all heads, float32."""
    return x.float().repeat_interleave(heads // x.shape[1], 1)
