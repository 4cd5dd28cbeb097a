"""Batches of real sizes on an accelerator, and how near their attention must come."""

from __future__ import annotations

import torch
from attention_cases import Batch, ints


def real_batch(
    *,
    groups: int = 16,
    siblings: int = 16,
    prefix: int = 2000,
    own: int = 250,
    chunk: int = 0,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    v_head_dim: int | None = None,
    latent: bool = False,
    page_size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    room: int = 64,
) -> Batch:
    """Groups of decodes below one prefix each, and a prefill chunk.

    latent: V is a part of K, and all KV heads are one.
    """
    torch.manual_seed(0)
    decodes = groups * siblings
    q_len = [1] * decodes + ([chunk] if chunk else [])
    own_len = torch.randint(1, 2 * own, (decodes,)).tolist() + (
        [chunk] if chunk else []
    )
    nodes = [i % groups for i in range(decodes)] + ([0] if chunk else [])
    kv_len = ints([prefix + size for size in own_len])
    # Whole pages of a prefix are shared. The page after it belongs to one request.
    shared_pages = prefix // page_size
    width = -(-(int(kv_len.max()) + room) // page_size)
    own_pages = width - shared_pages
    pages = torch.randperm(groups * shared_pages + len(q_len) * own_pages)
    shared = pages[: groups * shared_pages].view(groups, shared_pages)
    private = pages[groups * shared_pages :].view(len(q_len), own_pages)
    table = torch.cat([shared[torch.tensor(nodes)], private], dim=1).int()
    slots = len(pages) * page_size
    q_heads, kv_heads = heads

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device="cuda")

    kept, v_head_dim = kv_dtype or dtype, v_head_dim or head_dim
    k_cache = values(slots, 1 if latent else kv_heads, head_dim).to(kept)
    k_cache = k_cache.expand(-1, kv_heads, -1)
    v_cache = k_cache[..., :v_head_dim]
    if not latent:
        v_cache = values(slots, kv_heads, v_head_dim).to(kept)
    return Batch(
        q_len=ints(q_len),
        kv_len=kv_len,
        table_row=ints(range(len(q_len))),
        node_parent=ints([-1] * groups),
        node_end=ints([shared_pages * page_size] * groups),
        request_node=ints(nodes),
        q=values(sum(q_len), q_heads, head_dim),
        k_cache=k_cache,
        v_cache=v_cache,
        table=table.cuda(),
        page_size=page_size,
        scale=head_dim**-0.5,
        latent=latent,
    )


def assert_near(batch: Batch, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Check out within 1e-2 of the norm of the float32 reference, lse within 1e-2."""
    wanted, wanted_lse = batch.truth()
    assert_output_near(out, wanted)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-2, rtol=1e-2)


def assert_output_near(out: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within 1e-2 of the norm of the float32 truth (float32: 1e-4)."""
    error = (out.float() - wanted).norm() / wanted.norm()
    assert error < (1e-4 if out.dtype == torch.float32 else 1e-2)
    worst = (out.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert worst.max() < 5e-2
