"""SGLang's ``torch_native`` attention, faster, and right for more layers.

A step's requests attend together (:mod:`.step_attention`), where SGLang goes from one to the
next. SGLang's backend also reads a sliding-window layer's KV at the places of the other
layers' KV, though the layer has a pool of its own, and it knows no attention sinks, caps of
logits or drafts. Such layers and steps are computed here request by request. Encoders, cross-attention
and values of another size than keys are left to SGLang.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.layers import sampler
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.sampling.watermarking.core import _watermark_hash32_torch

from sgl_kernel_ext.block_attention import LANES, block_size
from sgl_kernel_ext.host_kernels import DTYPES

from ...errors import EngineError
from . import packed_linears
from .step_attention import StepAttention, worth_of


def draft_trees(
    custom_mask: torch.Tensor, lengths: list[int], counts: list[int]
) -> list[torch.Tensor | None]:
    """The drafts that each draft of a request sees, of each request ``[count, count]``.

    custom_mask: bool, one after the other of each request ``[count, length + count]``.
    lengths: tokens before the drafts.
    """
    pairs = zip(lengths, counts, strict=True)
    sizes = [count * (length + count) for length, count in pairs]
    masks = custom_mask[: sum(sizes)].split(sizes)
    return [
        mask.view(count, -1)[:, -count:]
        for mask, count in zip(masks, counts, strict=True)
    ]


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    cap: float = 0.0,
    tree: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the last tokens of one request.

    queries: ``[num_queries, num_heads, head_dim]``.
    keys, values: ``[num_tokens, num_kv_heads, dim]``, ``num_heads`` is a multiple.
    window: tokens before each query that it sees. None or negative: all of them.
    sinks: ``[num_heads]`` or None.
    cap: bound of the logits, by tanh, or 0.
    tree: bool ``[num_queries, num_queries]`` if the queries are drafts: those that each of
        them sees, itself included. None: they follow one another.

    Returns:
        ``[num_queries, num_heads, dim]``.
    """
    num_queries, num_tokens = len(queries), len(keys)
    shared = queries.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(shared, 1)
    values = values.repeat_interleave(shared, 1)
    logits = _capped(torch.einsum("qhd,khd->hqk", queries, keys) * scale, cap)
    before = num_tokens - num_queries
    if tree is None:
        tree = torch.ones(num_queries, num_queries, dtype=torch.bool).tril()
    query_at = before - 1 + tree.sum(-1, keepdim=True)
    key_at = torch.cat([torch.arange(before), query_at.flatten()]).unsqueeze(0)
    hidden = torch.cat([tree.new_zeros(num_queries, before), ~tree], 1)
    if window is not None and window >= 0:
        hidden |= key_at < query_at - window
    logits = logits.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.to(logits.dtype).view(-1, 1, 1).expand(-1, num_queries, 1)
        logits = torch.cat([logits, column], -1)
    weights = logits.softmax(-1)[..., :num_tokens]
    # KV outside of the window may have been overwritten; its weight is 0.
    return torch.einsum("hqk,khd->qhd", weights, values)


def _capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    return (logits / cap).tanh() * cap if cap else logits


class FastAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """SGLang's backend, with the attention of all requests of a step at once."""

    # Of the step whose layers run: its ``seq_lens``, which tell it from others and may go, and
    # its attention by the size of blocks.
    _together: tuple[weakref.ref[torch.Tensor], dict[int, StepAttention]] | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._together = None
        super().init_forward_metadata(forward_batch)

    def _run_sdpa_forward_extend(self, *args: Any, **options: Any) -> torch.Tensor:
        *rest, _, counts, encoder_lens = args
        stock = super()._run_sdpa_forward_extend
        if encoder_lens is not None or not _is_fast(args, options):
            return stock(*args, **options)
        return self._attend_step(*rest, counts, options=options)

    def _run_sdpa_forward_decode(self, *args: Any, **options: Any) -> torch.Tensor:
        *rest, encoder_lens = args
        stock = super()._run_sdpa_forward_decode
        # SGLang does not call it causal: there is one query, which sees everything before it.
        seen = {**options, "causal": not options.get("is_cross_attn")}
        if encoder_lens is not None or not _is_fast(args, seen):
            return stock(*args, **options)
        return self._attend_step(*rest, None, options=options)

    def step_attention(
        self,
        table: torch.Tensor,
        indices: torch.Tensor,
        seq_lens: torch.Tensor,
        counts: torch.Tensor | None,
        size: int,
        dtype: torch.dtype,
    ) -> StepAttention:
        """The attention of the present step, in blocks of at most so many tokens.

        table: ``req_to_token``.
        indices, seq_lens, counts: of each request its row there, its length, and the tokens
            that are computed, of which None means one.
        dtype: of KV.
        """
        if self._together is None or self._together[0]() is not seq_lens:
            self._together = weakref.ref(seq_lens), {}
        steps = self._together[1]
        if size not in steps:
            counts = torch.ones_like(seq_lens) if counts is None else counts
            each = (x.numpy().astype(np.int64) for x in (indices, seq_lens, counts))
            at, ends, computed = each
            worth = worth_of(dtype)
            steps[size] = StepAttention(table, at, ends, computed, size, worth)
        return steps[size]

    def _attend_step(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *rows: Any,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Attention of one layer, with ``rows`` as :meth:`step_attention` has them."""
        table, indices, seq_lens, counts = rows
        size = block_size(query.shape[1], k_cache.shape[1])
        dtype = k_cache.dtype
        step = self.step_attention(table, indices, seq_lens, counts, size, dtype)
        scale, window = options["scaling"], options.get("sliding_window_size")
        found = step.attend(query, k_cache, v_cache, scale, window)
        output.copy_(found)
        return output


def _is_fast(args: tuple[torch.Tensor, ...], options: dict[str, Any]) -> bool:
    query, _, keys, values = args[:4]
    return (
        bool(options.get("causal"))
        and options.get("scaling") is not None
        and query.dtype in DTYPES
        and keys.dtype in DTYPES
        and query.shape[-1] == keys.shape[-1] == values.shape[-1]
        and query.shape[-1] % 4 == 0
        and query.shape[1] <= LANES * keys.shape[1]
    )


class CpuAttention(FastAttention):
    """The same with window pools, sinks, capped logits and drafts."""

    _attend = staticmethod(attend)

    def forward_extend(self, *args: Any, **options: Any) -> torch.Tensor:
        return self._forward(super().forward_extend, *args, **options)

    def forward_decode(self, *args: Any, **options: Any) -> torch.Tensor:
        return self._forward(super().forward_decode, *args, **options)

    def _is_stock(self, layer: Any, sinks: torch.Tensor | None) -> bool:
        """Whether SGLang's attention is right for a layer."""
        return sinks is None and not layer.logit_cap and not self._has_own_pool(layer)

    def _has_own_pool(self, layer: Any) -> bool:
        if not self.use_sliding_window_kv_pool:
            return False
        _, windowed = self.token_to_kv_pool.layers_mapping[layer.layer_id]
        return bool(windowed)

    def _forward(
        self,
        stock: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        """SGLang's forward where it is right. Elsewhere write KV, then attend request by
        request. Drafts are no part of ``seq_lens``.

        q: ``[num_tokens, num_heads * head_dim]``.
        sinks: logits of which the softmax takes account ``[num_heads]``, or None.

        Returns:
            ``[num_tokens, num_heads * v_head_dim]``.
        """
        mode = forward_batch.forward_mode
        if mode.is_target_verify():
            number = forward_batch.spec_info.draft_token_num
            counts = [number] * len(forward_batch.seq_lens)
        elif self._is_stock(layer, sinks):
            return stock(q, k, v, layer, forward_batch, save_kv_cache)
        elif mode.is_decode():
            counts = [1] * len(forward_batch.seq_lens)
        else:
            counts = forward_batch.extend_seq_lens.tolist()
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            places = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            pool.set_kv_buffer(layer, places, k, v)
        keys, values = pool.get_kv_buffer(layer.layer_id)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        rows = forward_batch.req_pool_indices.tolist()
        lengths = forward_batch.seq_lens.tolist()
        trees: list[torch.Tensor | None] = [None] * len(rows)
        if mode.is_target_verify():
            trees = draft_trees(forward_batch.spec_info.custom_mask, lengths, counts)
            lengths = list(map(sum, zip(lengths, counts, strict=True)))
        options = {"scale": layer.scaling, "window": layer.sliding_window_size}
        options |= {"sinks": sinks, "cap": layer.logit_cap}
        outputs = []
        begin = 0
        for row, length, count, tree in zip(rows, lengths, counts, trees, strict=True):
            at = self.req_to_token_pool.req_to_token[row, :length].to(torch.int64)
            if self._has_own_pool(layer):
                at = pool.translate_loc_from_full_to_swa(at).to(torch.int64)
            own = queries[begin : begin + count]
            key, value = keys[at].to(q.dtype), values[at].to(q.dtype)
            outputs.append(self._attend(own, key, value, tree=tree, **options))
            begin += count
        return torch.cat(outputs).flatten(1)


_library: torch.library.Library | None = None


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b``, for ``[n, k]`` and ``[k, m]``."""
    columns = b.t()
    # A row at another address could be added up in another order.
    rows = [torch.mv(columns, row.clone()) for row in a]
    return torch.stack(rows) if rows else a.new_empty(0, b.shape[1])


# By the names of torch's operators.
_ROW_BY_ROW: dict[str, Callable[..., torch.Tensor]] = {
    "mm": multiply,
    "addmm": lambda bias, a, b, *, beta=1, alpha=1: (
        beta * bias + alpha * multiply(a, b)
    ),
    "bmm": lambda a, b: torch.stack(
        [multiply(*pair) for pair in zip(a, b, strict=True)]
    ),
}


def use_rows() -> None:
    """Multiply all matrices of this process row by row. Later calls change nothing.

    For ``--enable-deterministic-inference``, for which SGLang brings Triton kernels. Each
    token also attends by itself, always in the same order of operations, and random numbers
    come from a hash of seed and position, as on a GPU. So it makes no difference whether a
    token is computed in a prompt, in a chunk of it or in a decode step. It is slow.
    """
    global _library
    if _library is not None:
        return
    packed_linears.leave_to_torch()
    _library = torch.library.Library("aten", "IMPL")
    for name, function in _ROW_BY_ROW.items():
        _library.impl(name, function, "CPU", allow_override=True)
    vars(sampler)["murmur_hash32"] = murmur_hash32
    # Compiled, it would be for batches of one size.
    seeded = sampler.multinomial_with_seed
    original = getattr(seeded, "_torchdynamo_orig_callable", seeded)
    vars(sampler)["multinomial_with_seed"] = original


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """MurmurHash3, 32 bits, of seeds (64 bits) and positions (32 bits) ``[n]``, and columns
    (32 bits) ``[m]``: int64 ``[n, m]``, each from 0 to 2**32 - 1. SGLang's for watermarks
    is the same as its kernel for seeds."""
    hashed: torch.Tensor = _watermark_hash32_torch(
        *(each.to(torch.int64) for each in (seed, positions, columns))
    )
    return hashed


def attend_each(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    cap: float = 0.0,
    tree: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`attend`, query by query."""
    (num_queries, heads, _), groups = queries.shape, keys.shape[1]
    if tree is None:
        tree = torch.ones(num_queries, num_queries, dtype=torch.bool).tril()
    before = torch.arange(len(keys) - num_queries)
    outputs = []
    for query, drafts in zip(queries, tree, strict=True):
        # The same tokens in the same order as if no other draft were there.
        at = torch.cat([before, len(before) + drafts.nonzero().flatten()])
        if window is not None and window >= 0:
            at = at[-window - 1 :]
        grouped = query.view(1, groups, heads // groups, -1)
        logits = _capped((keys[at].unsqueeze(2) * grouped).sum(-1) * scale, cap)
        if sinks is not None:
            column = sinks.to(logits.dtype).view(1, groups, -1)
            logits = torch.cat([logits, column])
        weights = logits.softmax(0)[: len(at)].unsqueeze(-1)
        outputs.append((weights * values[at].unsqueeze(2)).sum(0).flatten(0, 1))
    return torch.stack(outputs) if outputs else queries.new_empty(0, heads, 0)


class BatchInvariantAttention(CpuAttention):
    """Attention of all layers, query by query."""

    _attend = staticmethod(attend_each)

    def _is_stock(self, layer: Any, sinks: torch.Tensor | None) -> bool:
        if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
            raise EngineError(
                f"attention of type {layer.attn_type} has no deterministic form on a CPU; "
                "drop --enable-deterministic-inference."
            )
        return False
