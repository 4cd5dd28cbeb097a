"""Recurrent layers in PyTorch, for SGLang on a CPU.

Each function has the arguments of the kernel whose place it takes, as far as SGLang gives
them. All recurrences are those of the papers, token by token:

- gated delta nets (Qwen3-Next, Qwen3.5 and later): Yang et al., Gated Delta Networks, 2024,
  equation 10;
- Kimi Delta Attention (Kimi Linear), with a decay of its own for each channel of a key:
  Kimi Linear, 2025, equation 1;
- Mamba-2 (Nemotron-H, Granite 4, Falcon-H1): Dao and Gu, Transformers are SSMs, 2024,
  equation 1 with the discretisation of section 7.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: list[int],
    cache_indices: Tensor,
    has_initial_state: Tensor,
    activation: str | None = "silu",
    **_: object,
) -> Tensor:
    """Convolve prompts, one after the other, and keep their last inputs.

    x: ``[dim, num_tokens]``, of all prompts. Returned with this shape.
    weight: ``[dim, width]``.
    conv_states: ``[num_slots, dim, width - 1]``, changed in place.
    cache_indices: the slot of each prompt.
    has_initial_state: of each prompt, whether its slot has what came before.
    """
    outputs = []
    begin = 0
    for slot, length, has_state in zip(
        cache_indices.tolist(), seq_lens_cpu, has_initial_state.tolist(), strict=True
    ):
        before = conv_states[slot] if has_state else torch.zeros_like(conv_states[slot])
        inputs = torch.cat([before.to(x.dtype), x[:, begin : begin + length]], 1)
        output = functional.conv1d(
            inputs.unsqueeze(0), weight.unsqueeze(1), bias, groups=len(weight)
        )
        outputs.append(_activated(output[0], activation))
        conv_states[slot] = inputs[:, -before.shape[1] :].to(conv_states.dtype)
        begin += length
    return torch.cat(outputs, 1)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor,
    **_: object,
) -> Tensor:
    """Convolve one token of each request.

    x: ``[num_requests, dim]``. Returned with this shape.
    conv_state: ``[num_slots, dim, width - 1]``, changed in place.
    """
    slots = conv_state_indices.long()
    inputs = torch.cat([conv_state[slots].to(x.dtype), x.unsqueeze(-1)], -1)
    conv_state[slots] = inputs[..., 1:].to(conv_state.dtype)
    output = (inputs * weight).sum(-1)
    return _activated(output if bias is None else output + bias, activation)


def _activated(x: Tensor, activation: str | None) -> Tensor:
    return x if activation is None else functional.silu(x)


def fused_gdn_gating(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Decay in log space and writing strength of each token, float32 ``[1, n, heads]``.

    A_log, dt_bias: ``[heads]``.
    a, b: ``[n, heads]``.
    """
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay.unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[Tensor, None, None]:
    """Attend the tokens of prompts, one after the other.

    q, k: ``[1, num_tokens, key_heads, key_dim]``.
    v: ``[1, num_tokens, heads, value_dim]``, ``heads`` is a multiple of ``key_heads``.
        Returned with this shape, and None twice, where the kernel has what nobody asks for
        here.
    g, beta: as :func:`fused_gdn_gating` returns them.
    initial_state: ``[num_slots, heads, value_dim, key_dim]``, changed in place.
    """
    heads = v.shape[2]
    queries, keys = (_per_head(x[0], heads) for x in (q, k))
    if use_qk_l2norm_in_kernel:
        queries, keys = unit(queries), unit(keys)
    output = attend_prompts(
        queries * q.shape[-1] ** -0.5,
        keys,
        v,
        g[0].float().exp().unsqueeze(-1),
        beta[0].float(),
        initial_state,
        initial_state_indices,
        cu_seqlens,
    )
    return output, None, None


def attend_prompts(
    queries: Tensor,
    keys: Tensor,
    v: Tensor,
    decays: Tensor,
    strengths: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """The recurrence over the tokens of prompts, one after the other.

    queries, keys: ``[num_tokens, heads, key_dim]``, scaled, float32.
    v: ``[1, num_tokens, heads, value_dim]``. Returned with this shape.
    decays: ``[num_tokens, heads, key_dim or 1]``, float32.
    strengths: ``[num_tokens, heads]``, float32.
    initial_state: ``[num_slots, heads, value_dim, key_dim]``, changed in place.
    """
    values, strengths = v[0].float(), strengths.unsqueeze(-1)
    output = torch.empty_like(values)
    ends = cu_seqlens.tolist()
    for slot, begin, end in zip(
        initial_state_indices.tolist(), ends, ends[1:], strict=False
    ):
        state = initial_state[slot].float()
        for at in range(begin, end):
            state, output[at] = delta_step(
                state, queries[at], keys[at], values[at], decays[at], strengths[at]
            )
        initial_state[slot] = state.to(initial_state.dtype)
    return output.to(v.dtype).unsqueeze(0)


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
    use_qk_l2norm_in_kernel: bool = False,
) -> None:
    """Attend one token of each request.

    mixed_qkv: ``[num_requests, 2 * key_heads * key_dim + heads * value_dim]``.
    initial_state: ``[num_slots, heads, value_dim, key_dim]``, changed in place.
    out: ``[num_requests, 1, heads, value_dim]``, written.
    """
    _, heads, value_dim, key_dim = initial_state.shape
    of_keys = (mixed_qkv.shape[1] - heads * value_dim) // 2
    q, k, v = mixed_qkv.split([of_keys, of_keys, heads * value_dim], 1)
    queries, keys = (_per_head(x.unflatten(1, (-1, key_dim)), heads) for x in (q, k))
    if use_qk_l2norm_in_kernel:
        queries, keys = unit(queries), unit(keys)
    decay, strength = fused_gdn_gating(A_log, a, b, dt_bias)
    attend_tokens(
        queries * scale,
        keys,
        v.unflatten(1, (heads, value_dim)).float(),
        decay[0].exp().unsqueeze(-1),
        strength[0],
        initial_state,
        ssm_state_indices,
        out,
    )


def attend_tokens(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    decays: Tensor,
    strengths: Tensor,
    initial_state: Tensor,
    slots: Tensor,
    out: Tensor,
) -> None:
    """The recurrence over one token of each request, with a row for each instead of each token
    of :func:`attend_prompts`. ``slots``: ``[num_requests]``, where their states are.
    ``out``: ``[num_requests, 1, heads, value_dim]``, written.
    """
    slots = slots.long()
    state, output = delta_step(
        initial_state[slots].float(),
        queries,
        keys,
        values,
        decays,
        strengths.unsqueeze(-1),
    )
    initial_state[slots] = state.to(initial_state.dtype)
    out[:, 0] = output.to(out.dtype)


def delta_step(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor,
    strength: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One token: the new state ``[..., heads, value_dim, key_dim]`` and the output
    ``[..., heads, value_dim]``.

    decay: ``[..., heads, key_dim or 1]``.
    """
    state = state * decay.unsqueeze(-2)
    known = (state * key.unsqueeze(-2)).sum(-1)
    change = (value - known) * strength
    state = state + change.unsqueeze(-1) * key.unsqueeze(-2)
    return state, (state * query.unsqueeze(-2)).sum(-1)


def _per_head(x: Tensor, heads: int) -> Tensor:
    """``[n, key heads or groups, dim]``, repeated for all heads, float32."""
    return x.float().repeat_interleave(heads // x.shape[1], 1)


def unit(x: Tensor) -> Tensor:
    """``x`` with rows of length 1."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def split_grouped(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int,
    head_qk: int, head_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Take projections of Qwen3-Next apart, which are grouped by key head.

    Returns:
        Queries, keys and values in one row per token, then z ``[n, heads, value_dim]``,
        then b and a ``[n, heads]``.
    """
    shared = num_heads_v // num_heads_qk
    grouped = mixed_qkvz.unflatten(1, (num_heads_qk, -1))
    q, k, v, z = grouped.split([head_qk, head_qk, shared * head_v, shared * head_v], -1)
    b, a = mixed_ba.unflatten(1, (num_heads_qk, -1)).split([shared, shared], -1)
    mixed = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], 1)
    return (
        mixed, z.flatten(1).unflatten(1, (num_heads_v, head_v)),
        b.flatten(1), a.flatten(1),
    )  # fmt: skip


def split_contiguous(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int,
    head_qk: int, head_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same for Qwen3.5, whose projections follow each other."""
    of_values = num_heads_v * head_v
    mixed, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + of_values, of_values], 1)
    b, a = mixed_ba.split([num_heads_v, num_heads_v], 1)
    return (
        mixed.contiguous(), z.unflatten(1, (num_heads_v, head_v)).contiguous(),
        b.contiguous(), a.contiguous(),
    )  # fmt: skip


def sigmoid_mul(x: Tensor, gate: Tensor, **_: object) -> Tensor:
    """``x`` times the sigmoid of ``gate``, of the shape of ``x``."""
    return x * gate.reshape(x.shape).float().sigmoid().to(x.dtype)


def add_gated(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor,
    final_hidden_states: Tensor,
) -> None:  # fmt: skip
    """Add a shared expert's output ``[n, dim]``, gated, to that of the other experts."""
    gate = (hidden_states * gate_weight).sum(-1, keepdim=True).sigmoid()
    final_hidden_states += shared_output * gate


def rms_norm_gated(
    x: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None,
    activation: str = "swish", *, eps: float = 1e-6, **_: Any,
) -> Tensor:  # fmt: skip
    """Normalise ``x``, then gate it: ``[..., dim]``, like ``g``."""
    y = x.float()
    y = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
    gate = g.float()
    y = y * (gate.sigmoid() if activation == "sigmoid" else functional.silu(gate))
    return (y if bias is None else y + bias).to(x.dtype)


def rms_norm_then_gate(
    *, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, z: Tensor,
    activation: str = "swish", **_: Any,
) -> Tensor:  # fmt: skip
    """:func:`rms_norm_gated` with other names."""
    gate = z.reshape(x.shape)
    return rms_norm_gated(x, gate, weight, bias, activation, eps=eps)


# Kimi Delta Attention -----------------------------------------------------------------


def decays_of(
    gates: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None
) -> Tensor:
    """The share of the state that each channel keeps at each token, in 0..1, float32.

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
    v: ``[1, num_tokens, heads, value_dim]``. Returned with this shape.
    beta: ``[1, num_tokens, heads]``.
    initial_state: ``[num_slots, heads, value_dim, key_dim]``, changed in place.
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


def packed_kda_decode(
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


# Mamba-2 ------------------------------------------------------------------------------


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
    """Scan prompts, one after the other. Returns the last states of the prompts between two
    None.

    x: ``[1, num_tokens, heads, head_dim]``.
    dt: ``[1, num_tokens, heads]``, before its bias and softplus.
    A, D, dt_bias: ``[heads]``.
    B, C: ``[1, num_tokens, groups, state_dim]``, ``heads`` is a multiple of ``groups``.
    initial_states: ``[num_prompts, heads, head_dim, state_dim]``. None: zero.
    out: ``[1, num_tokens, heads, head_dim]``, written.
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
            state, output = _scan_step(
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
    new, output = _scan_step(
        state[slots].float(),
        x.float(),
        steps,
        (steps * A[:, 0, 0].float()).exp(),
        _per_head(B, heads),
        _per_head(C, heads),
    )
    state[slots] = new.to(state.dtype)
    out[:] = (output + D * x.float()).to(out.dtype)


def _scan_step(
    state: Tensor, x: Tensor, step: Tensor, decay: Tensor, write: Tensor, read: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: the new state ``[..., heads, head_dim, state_dim]``, and the output
    read from it ``[..., heads, head_dim]``."""
    change = (step.unsqueeze(-1) * x).unsqueeze(-1) * write.unsqueeze(-2)
    state = state * decay[..., None, None] + change
    return state, (state * read.unsqueeze(-2)).sum(-1)
