"""Arithmetic whose result for one token does not depend on the others, for
``--enable-deterministic-inference``.

SGLang brings Triton kernels for this. Here, matrices are multiplied row by row, and each
token attends by itself, always in the same order of operations. So it makes no difference
whether a token is computed in a prompt, in a chunk of it or in a decode step. It is slow.
Random numbers come from a hash of seed and position, as on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers import sampler
from sglang.srt.layers.radix_attention import AttentionType

from ...errors import EngineError
from .cpu_attention import CpuAttention

_ALL = 2**32 - 1  # all bits of a word

_library: torch.library.Library | None = None


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b``, for ``[n, k]`` and ``[k, m]``."""
    columns = b.t()
    # A row at another address could be added up in another order.
    rows = [torch.mv(columns, row.clone()) for row in a]
    return torch.stack(rows) if rows else a.new_empty(0, b.shape[1])


def _multiply_and_add(
    bias: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    return beta * bias + alpha * multiply(a, b)


def _multiply_each(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.stack([multiply(x, y) for x, y in zip(a, b, strict=True)])


def use_rows() -> None:
    """Multiply all matrices of this process so. Later calls change nothing."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    for name, function in (
        ("mm", multiply),
        ("addmm", _multiply_and_add),
        ("bmm", _multiply_each),
    ):
        _library.impl(name, function, "CPU", allow_override=True)
    vars(sampler)["murmur_hash32"] = murmur_hash32
    # Compiled, it would be for batches of one size.
    seeded = sampler.multinomial_with_seed
    original = getattr(seeded, "_torchdynamo_orig_callable", seeded)
    vars(sampler)["multinomial_with_seed"] = original


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """MurmurHash3, 32 bits, of a seed (64 bits), a position and a column (32 bits each).

    seed, positions: ``[n]``.
    columns: ``[m]``.

    Returns:
        int64 ``[n, m]``, each from 0 to 2**32 - 1.
    """
    seed = seed.to(torch.int64)
    columns = columns.to(torch.int64).unsqueeze(0)
    hashed = torch.zeros(len(seed), 1, dtype=torch.int64)
    for word in (seed & _ALL, (seed >> 32) & _ALL, positions.to(torch.int64) & _ALL):
        hashed = _mix(hashed, word.unsqueeze(1))
    hashed = _mix(hashed, columns & _ALL) ^ 16  # bytes in all
    hashed = ((hashed ^ (hashed >> 16)) * 0x85EBCA6B) & _ALL
    hashed = ((hashed ^ (hashed >> 13)) * 0xC2B2AE35) & _ALL
    return hashed ^ (hashed >> 16)


def _mix(hashed: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = _rotated((word * 0xCC9E2D51) & _ALL, 15)
    word = (word * 0x1B873593) & _ALL
    return (_rotated(hashed ^ word, 13) * 5 + 0xE6546B64) & _ALL


def _rotated(word: torch.Tensor, by: int) -> torch.Tensor:
    return ((word << by) | (word >> (32 - by))) & _ALL


def attend_each(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    tree: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`.cpu_attention.attend`, query by query."""
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
        logits = (keys[at].unsqueeze(2) * grouped).sum(-1) * scale
        if sinks is not None:
            column = sinks.to(logits.dtype).view(1, groups, -1)
            logits = torch.cat([logits, column])
        weights = logits.softmax(0)[: len(at)].unsqueeze(-1)
        outputs.append((weights * values[at].unsqueeze(2)).sum(0).flatten(0, 1))
    return torch.stack(outputs) if outputs else queries.new_empty(0, heads, 0)


class BatchInvariantAttention(CpuAttention):
    """Attention of all layers, query by query."""

    def _is_stock(self, layer: Any, sinks: torch.Tensor | None) -> bool:
        if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
            raise EngineError(
                f"attention of type {layer.attn_type} has no deterministic form on a CPU; "
                "drop --enable-deterministic-inference."
            )
        return False

    def _attend_one(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        return attend_each(q, k, v, **options)
