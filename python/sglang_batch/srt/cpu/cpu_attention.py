"""Attention in PyTorch for layers that SGLang's ``torch_native`` backend gets wrong.

That backend reads a sliding-window layer's KV at the places of the other layers' KV, though
the layer has a pool of its own, and it knows neither attention sinks nor drafts. Such layers
and steps are computed here, and all others by SGLang.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc


class CpuAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """SGLang's backend, with window pools, sinks and drafts."""

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        verifies = forward_batch.forward_mode.is_target_verify()
        if not verifies and self._is_stock(layer, sinks):
            stock: torch.Tensor = super().forward_extend(
                q, k, v, layer, forward_batch, save_kv_cache
            )
            return stock
        if verifies:
            number = forward_batch.spec_info.draft_token_num
            counts = [number] * len(forward_batch.seq_lens)
        else:
            counts = forward_batch.extend_seq_lens.tolist()
        return self._forward(
            q, k, v, layer, forward_batch, save_kv_cache, sinks, counts
        )

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        if self._is_stock(layer, sinks):
            stock: torch.Tensor = super().forward_decode(
                q, k, v, layer, forward_batch, save_kv_cache
            )
            return stock
        counts = [1] * len(forward_batch.seq_lens)
        return self._forward(
            q, k, v, layer, forward_batch, save_kv_cache, sinks, counts
        )

    def _is_stock(self, layer: Any, sinks: torch.Tensor | None) -> bool:
        """Whether SGLang's attention is right for a layer."""
        return sinks is None and not self._has_own_pool(layer)

    def _attend_one(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        return attend(q, k, v, **options)

    def _has_own_pool(self, layer: Any) -> bool:
        if not self.use_sliding_window_kv_pool:
            return False
        _, windowed = self.token_to_kv_pool.layers_mapping[layer.layer_id]
        return bool(windowed)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        sinks: torch.Tensor | None,
        counts: list[int],
    ) -> torch.Tensor:
        """Write KV, then attend request by request. Drafts are no part of ``seq_lens``.

        q: ``[num_tokens, num_heads * head_dim]``, of each request ``counts`` tokens.
        sinks: logits of which the softmax takes account ``[num_heads]``, or None.

        Returns:
            ``[num_tokens, num_heads * v_head_dim]``.
        """
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            places = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            pool.set_kv_buffer(layer, places, k, v)
        keys, values = pool.get_kv_buffer(layer.layer_id)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        rows = forward_batch.req_pool_indices.tolist()
        lengths = forward_batch.seq_lens.tolist()
        trees: list[torch.Tensor | None] = [None] * len(rows)
        if forward_batch.forward_mode.is_target_verify():
            trees = draft_trees(forward_batch.spec_info.custom_mask, lengths, counts)
            lengths = list(map(sum, zip(lengths, counts, strict=True)))
        outputs = []
        begin = 0
        for row, length, count, tree in zip(rows, lengths, counts, trees, strict=True):
            at = self.req_to_token_pool.req_to_token[row, :length].to(torch.int64)
            if self._has_own_pool(layer):
                at = pool.translate_loc_from_full_to_swa(at).to(torch.int64)
            outputs.append(
                self._attend_one(
                    queries[begin : begin + count],
                    keys[at].to(q.dtype),
                    values[at].to(q.dtype),
                    scale=layer.scaling,
                    window=layer.sliding_window_size,
                    sinks=sinks,
                    tree=tree,
                )
            )
            begin += count
        return torch.cat(outputs).flatten(1)


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
    tree: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the last tokens of one request.

    queries: ``[num_queries, num_heads, head_dim]``.
    keys, values: ``[num_tokens, num_kv_heads, dim]``, ``num_heads`` is a multiple.
    window: tokens before each query that it sees. None or negative: all of them.
    sinks: ``[num_heads]`` or None.
    tree: bool ``[num_queries, num_queries]`` if the queries are drafts: those that each of
        them sees, itself included. None: they follow one another.

    Returns:
        ``[num_queries, num_heads, dim]``.
    """
    num_queries, num_tokens = len(queries), len(keys)
    shared = queries.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(shared, 1)
    values = values.repeat_interleave(shared, 1)
    logits = torch.einsum("qhd,khd->hqk", queries, keys) * scale
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
