"""Tensors of a workload: random queries and several copies of the KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from shapes import Layout

from sgl_kernel_ext.shared_prefix_attention import attention_ref


@dataclass(frozen=True)
class Inputs:
    """The inputs of a variant. Each KV copy represents one layer of a model."""

    layout: Layout
    q: torch.Tensor  # [num_tokens, num_q_heads, head_dim]
    k_caches: list[torch.Tensor]  # each [num_slots, num_kv_heads, head_dim]
    v_caches: list[torch.Tensor]
    table: torch.Tensor  # int32 [num_requests, max_pages]
    kv_len: torch.Tensor  # int32 [num_requests]
    out: torch.Tensor  # like q

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and KV heads."""
        return self.q.shape[1], self.k_caches[0].shape[1]

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.q.shape[2])

    @property
    def token_bytes(self) -> int:
        """K and V of one token."""
        return int(2 * self.heads[1] * self.q.shape[2] * self.q.dtype.itemsize)

    @property
    def unique_bytes(self) -> int:
        """K and V that one layer has to read."""
        return self.layout.num_unique_tokens * self.token_bytes

    @property
    def floor_bytes(self) -> int:
        """Bytes that one layer must move: unique KV, the queries, and the output."""
        return int(self.unique_bytes + 2 * self.q.nbytes)

    @property
    def flops(self) -> int:
        """Of one layer: two products per pair of tokens and query head."""
        return int(4 * self.heads[0] * self.q.shape[2] * self.layout.pairs)

    def truth(self) -> torch.Tensor:
        """float32 attention of the first layer."""
        layout = self.layout
        return attention_ref(
            self.q, self.k_caches[0], self.v_caches[0], self.table,
            layout.q_len.tolist(), layout.kv_len.tolist(), layout.table_row.tolist(),
            layout.page_size, self.scale,
        )[0]  # fmt: skip


def make_inputs(
    layout: Layout,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    layers: int,
) -> Inputs:
    """Fresh random tensors for a layout."""
    q_heads, kv_heads = heads

    def random(rows: int, num_heads: int) -> torch.Tensor:
        return torch.randn(rows, num_heads, head_dim, dtype=dtype, device=device)

    q = random(layout.num_tokens, q_heads)
    return Inputs(
        layout=layout,
        q=q,
        k_caches=[random(layout.num_slots, kv_heads) for _ in range(layers)],
        v_caches=[random(layout.num_slots, kv_heads) for _ in range(layers)],
        table=torch.from_numpy(layout.table).to(device),
        kv_len=torch.from_numpy(layout.kv_len).to(device),
        out=torch.full_like(q, torch.nan),
    )


def worst_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest relative error of a token and head, by the norm over its values."""
    difference = (out.float() - truth).norm(dim=-1)
    worst = (difference / truth.norm(dim=-1)).max()
    # NaN must not pass a comparison.
    return float("inf") if torch.isnan(worst) else float(worst)
