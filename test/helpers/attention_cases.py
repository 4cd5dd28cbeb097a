"""Batches with shared prefixes for the tests of the attention kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st

from sgl_kernel_ext.shared_prefix_attention import (
    PLAIN,
    AttentionPlan,
    AttentionPlanner,
    DeviceConfig,
    Features,
    TileConfig,
    attention_ref,
)

# Small tiles and short splits, so that small batches exercise all of the planner.
SMALL = DeviceConfig(
    name="test",
    num_sms=4,
    flops_per_byte=(100, 100, 100),
    min_split_tokens=16,
    task_bytes=0,
    tiles=TileConfig((16, 32, 32), (1, 1, 1), programs=(8, 8, 8)),
)


def ints(values: Sequence[int] | np.ndarray) -> np.ndarray:
    """An int32 array as the planner takes it."""
    return np.ascontiguousarray(values, np.int32)


@dataclass(frozen=True)
class Batch:
    """One step's requests, their forest, and the KV cache behind them."""

    q_len: np.ndarray
    kv_len: np.ndarray
    table_row: np.ndarray
    node_parent: np.ndarray
    node_end: np.ndarray
    request_node: np.ndarray
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    table: torch.Tensor
    page_size: int
    scale: float
    features: Features = PLAIN
    latent: bool = False  # V is a part of K

    @property
    def num_tokens(self) -> int:
        return int(self.q_len.sum())

    @property
    def device_kv_len(self) -> torch.Tensor:
        return torch.from_numpy(self.kv_len.copy()).to(self.q.device)

    def planned(self) -> tuple[np.ndarray, ...]:
        """The arguments of ``AttentionPlanner.plan``."""
        return (
            self.q_len,
            self.kv_len,
            self.table_row,
            self.node_parent,
            self.node_end,
            self.request_node,
        )

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensor arguments of ``run`` up to ``kv_len``."""
        return self.q, self.k_cache, self.v_cache, self.table, self.device_kv_len

    def grown(self, tokens: Sequence[int]) -> Batch:
        """The same requests some decoded tokens later."""
        return replace(self, kv_len=ints(self.kv_len + np.array(tokens)))

    def truth(self) -> tuple[torch.Tensor, torch.Tensor]:
        return attention_ref(
            self.q[: self.num_tokens],
            self.k_cache,
            self.v_cache,
            self.table,
            self.q_len.tolist(),
            self.kv_len.tolist(),
            self.table_row.tolist(),
            self.page_size,
            self.scale,
            self.features,
        )


def make_batch(
    *,
    own_len: Sequence[int] = (1,),
    q_len: Sequence[int] | None = None,
    request_node: Sequence[int] | None = None,
    node_parent: Sequence[int] = (),
    node_end: Sequence[int] = (),
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    v_head_dim: int | None = None,
    latent: bool = False,
    page_size: int = 1,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    room: int = 0,
    seed: int = 0,
) -> Batch:
    """Build a batch; ``own_len`` counts KV tokens after the request's deepest node.

    Pages that lie in a node are shared, the others are each request's own. Pages are
    scattered; one that nobody owns holds NaN, and all unused table entries point at
    it. ``room`` is how many tokens every request may grow by.
    """
    count = len(own_len)
    q_lens = ints(q_len if q_len is not None else [1] * count)
    nodes = ints(request_node if request_node is not None else [-1] * count)
    ends = ints(node_end)
    before = ints([ends[node] if node >= 0 else 0 for node in nodes])
    kv_len = ints(before + ints(own_len))
    random = torch.Generator().manual_seed(seed)
    order = np.random.default_rng(seed)
    table_row = ints(order.permutation(count + 2)[:count])

    pages: dict[tuple[str, int, int], int] = {}
    longest = int(kv_len.max()) + room
    width = -(-longest // page_size) + 1
    entries = np.full((count + 2, width), -1, np.int64)
    content: list[list[tuple[tuple[str, int], int]]] = []
    for i in range(count):
        owners = _owners(int(nodes[i]), node_parent, node_end, i, int(kv_len[i]) + room)
        for page in range(-(-len(owners) // page_size)):
            inside = owners[page * page_size : (page + 1) * page_size]
            kind, owner = inside[-1]
            if len(inside) < page_size:
                kind, owner = "request", i
            key = (kind, owner, page)
            if key not in pages:
                pages[key] = len(content)
                content.append(
                    [(who, page * page_size + j) for j, who in enumerate(inside)]
                )
            entries[table_row[i], page] = pages[key]

    q_heads, kv_heads = heads
    scatter = order.permutation(len(content) + 1)
    slots = (len(content) + 1) * page_size
    k_cache = torch.full((slots, kv_heads, head_dim), torch.nan)
    v_head_dim = v_head_dim or head_dim
    v_cache = torch.full((slots, kv_heads, v_head_dim), torch.nan)
    values: dict[tuple[tuple[str, int], int], torch.Tensor] = {}
    for page, tokens in enumerate(content):
        for j, token in enumerate(tokens):
            if token not in values:
                shape = (kv_heads, head_dim + v_head_dim)
                values[token] = torch.randn(shape, generator=random)
            slot = scatter[page] * page_size + j
            k_cache[slot], v_cache[slot] = values[token].split(
                [head_dim, v_head_dim], 1
            )
    table = torch.from_numpy(scatter[entries].astype(np.int32))
    q = torch.randn((int(q_lens.sum()), q_heads, head_dim), generator=random)
    k_cache, v_cache = (each.to(kv_dtype or dtype) for each in (k_cache, v_cache))
    return Batch(
        q_len=q_lens,
        kv_len=kv_len,
        table_row=table_row,
        node_parent=ints(node_parent),
        node_end=ends,
        request_node=nodes,
        q=q.to(dtype),
        k_cache=k_cache,
        v_cache=k_cache[..., :v_head_dim] if latent else v_cache,
        table=table,
        page_size=page_size,
        scale=head_dim**-0.5,
        latent=latent,
    )


def _owners(
    node: int,
    node_parent: Sequence[int],
    node_end: Sequence[int],
    request: int,
    length: int,
) -> list[tuple[str, int]]:
    """Whose each position of a request is: a node's, or the request's own."""
    path = []
    while node >= 0:
        path.append(node)
        node = node_parent[node]
    owners: list[tuple[str, int]] = []
    for each in reversed(path):
        owners += [("node", each)] * (node_end[each] - len(owners))
    return owners + [("request", request)] * (length - len(owners))


def make_planner(batch: Batch, **changes: object) -> AttentionPlanner:
    """A planner for the batch's attention shape; every free KV saving counts."""
    arguments: dict[str, object] = {
        "num_q_heads": batch.q.shape[1],
        "num_kv_heads": batch.k_cache.shape[1],
        "head_dim": batch.q.shape[2],
        "v_head_dim": batch.v_cache.shape[2],
        "latent": batch.latent,
        "dtype": batch.q.dtype,
        "kv_dtype": batch.k_cache.dtype,
        "page_size": batch.page_size,
        "device": batch.q.device,
        "max_requests": 64,
        "max_tokens": 512,
        "max_nodes": 64,
        "config": SMALL,
    }
    return AttentionPlanner(**(arguments | changes))  # type: ignore[arg-type]


def poisoned_outputs(
    batch: Batch, plan: AttentionPlan, extra_rows: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse full of NaN; the plan's workspace is poisoned likewise."""
    plan.planner.workspace.o_parts.fill_(torch.nan)
    plan.planner.workspace.lse_parts.fill_(torch.nan)
    rows = batch.num_tokens + extra_rows
    shape = (rows, batch.q.shape[1], batch.v_cache.shape[2])
    out = torch.full(shape, torch.nan, dtype=batch.q.dtype, device=batch.q.device)
    return out, torch.full(shape[:2], torch.nan, device=batch.q.device)


def assert_attention_close(
    batch: Batch,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    tolerance: float | None = None,
) -> None:
    """Compare with each request's own full attention in float32."""
    wanted, wanted_lse = batch.truth()
    if tolerance is None:
        tolerance = 2e-5 if batch.q.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(
        out[: batch.num_tokens].float(), wanted, atol=tolerance, rtol=tolerance
    )
    if lse is not None:
        torch.testing.assert_close(
            lse[: batch.num_tokens], wanted_lse, atol=tolerance, rtol=tolerance
        )


def features_of(num_q_heads: int, device: str = "cpu") -> list[Features]:
    """What models have beside plain attention."""
    sinks = torch.linspace(-4, 4, num_q_heads, device=device)
    return [
        Features(logit_cap=3.0),
        Features(sinks=sinks),
        Features(logit_cap=3.0, sinks=sinks.half()),
    ]


# name -> arguments of make_batch: one to three levels, ragged groups, odd lengths.
FORESTS: dict[str, dict[str, object]] = {
    "no-forest": {"own_len": [1, 17, 63, 100, 129]},
    "one-root": {
        "node_parent": [-1],
        "node_end": [100],
        "request_node": [0, 0, 0, -1],
        "own_len": [1, 17, 5, 63],
    },
    "two-groups": {
        "node_parent": [-1, -1],
        "node_end": [129, 17],
        "request_node": [1, 0, 1, 0, 0, 1, -1],
        "own_len": [1, 1, 17, 63, 2, 3, 1],
    },
    "three-levels": {
        "node_parent": [-1, 0, 0, 1],
        "node_end": [63, 100, 129, 163],
        "request_node": [3, 3, 1, 2, 2, 0, 3],
        "own_len": [1, 17, 2, 9, 1, 30, 5],
    },
    "chunks": {
        "node_parent": [-1, 0],
        "node_end": [64, 100],
        "request_node": [1, 0, 1, -1, 0, 1],
        "own_len": [1, 37, 29, 63, 17, 3],
        "q_len": [1, 37, 12, 17, 1, 3],
    },
}


@st.composite
def batches(draw: st.DrawFn, longest: int = 60) -> Batch:
    """Any small forest with decodes and chunks below and next to it."""
    num_nodes = draw(st.integers(0, 6))
    parents = [draw(st.integers(-1, node - 1)) for node in range(num_nodes)]
    ends: list[int] = []
    for parent in parents:
        above = ends[parent] if parent >= 0 else 0
        ends.append(above + draw(st.integers(0, longest)))
    count = draw(st.integers(1, 8))
    q_len = [draw(st.sampled_from([1, 1, 1, 2, 17, 40])) for _ in range(count)]
    return make_batch(
        node_parent=parents,
        node_end=ends,
        request_node=[draw(st.integers(-1, num_nodes - 1)) for _ in range(count)],
        q_len=q_len,
        own_len=[size + draw(st.integers(0, longest)) for size in q_len],
        heads=draw(st.sampled_from([(2, 2), (4, 2), (3, 1), (7, 1)])),
        head_dim=16,
        page_size=draw(st.sampled_from([1, 4, 16])),
        seed=draw(st.integers(0, 3)),
    )
