"""Baselines from libraries: torch's SDPA and FlexAttention, FlashInfer's cascade, FlashAttention 3
as SGLang's backend calls it, and cascades of FlashAttention 3 and 4."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from inputs import Inputs
from variants import Builder, Unavailable, Variant

SDPA = "SDPA, gathered KV"
FLEX = "FlexAttention"
FLASHINFER = "FlashInfer cascade"
FA3 = "FlashAttention 3"
FLASH_CASCADES = {3: "FlashAttention 3 cascade", 4: "FlashAttention 4 cascade"}
# By version, as SGLang imports it, and the families of devices that it is for.
FLASH_MODULES = {
    3: ("sgl_kernel.flash_attn", (9,)),
    4: ("sglang.kernels.ops.attention.flash_attention_v4", (9, 10)),
}

# Limits, because more takes too long: gathered KV of all layers in bytes, and mask cells
# of FlexAttention.
MAX_GATHERED = 6 << 30
MAX_CELLS = 1 << 26
FLEX_BLOCK = 128
FLASHINFER_WORKSPACE = 256 << 20


def sdpa(inputs: Inputs) -> Variant:
    """Every request's KV copied together beforehand, which is not counted."""
    layout = inputs.layout
    count, longest = len(layout.kv_len), int(layout.kv_len.max())
    layers = len(inputs.k_caches)
    size = layers * count * longest * inputs.token_bytes
    if size > MAX_GATHERED:
        raise Unavailable(f"gathered KV would take {size / 2**30:.0f} GiB")
    position = torch.arange(longest, device=inputs.device)
    page = inputs.table.long()[:, position // layout.page_size]
    slots = page * layout.page_size + position % layout.page_size

    def gathered(cache: torch.Tensor) -> torch.Tensor:
        # [count, num_kv_heads, longest, head_dim]
        return cache[slots].transpose(1, 2).contiguous()

    keys = [gathered(cache) for cache in inputs.k_caches]
    values = [gathered(cache) for cache in inputs.v_caches]
    seen = None
    if layout.kv_len.min() < longest:
        seen = (position[None, :] < inputs.kv_len[:, None])[:, None, None, :]
    q = inputs.q[:, :, None, :]

    def launch(layer: int) -> torch.Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(
            q, keys[layer], values[layer], attn_mask=seen,
            scale=inputs.scale, enable_gqa=True,
        )  # fmt: skip
        return out[:, :, 0, :]

    return Variant(SDPA, launch)


def flex(inputs: Inputs) -> Variant:
    """All decodes as one sequence over the whole cache, laid out in tree order.

    A request sees a slot if the requests that share the slot's page include it. Those
    are always a range.
    """
    module = importlib.import_module("torch.nn.attention.flex_attention")
    layout = inputs.layout
    cells = layout.num_slots * layout.num_tokens
    if cells > MAX_CELLS:
        raise Unavailable(f"the mask would have {cells / 1e6:.0f} million cells")
    page_size, device = layout.page_size, inputs.device
    offset = np.arange(page_size)
    slots = (layout.page_order[:, None] * page_size + offset).ravel()
    users = torch.from_numpy(np.repeat(layout.page_users, page_size, axis=0)).to(device)
    first, end = users.unbind(1)
    end = torch.where(_used(inputs, slots), end, first)
    order = torch.from_numpy(slots).to(device)

    def mask(
        b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        return (first[kv] <= q) & (q < end[kv])

    block_mask = module.create_block_mask(
        mask, None, None, layout.num_tokens, layout.num_slots, device=device,
        BLOCK_SIZE=FLEX_BLOCK,
    )  # fmt: skip
    # [1, num_kv_heads, num_slots, head_dim]
    keys = [c[order].transpose(0, 1)[None].contiguous() for c in inputs.k_caches]
    values = [c[order].transpose(0, 1)[None].contiguous() for c in inputs.v_caches]
    q = inputs.q.transpose(0, 1)[None].contiguous()
    attend: Any = torch.compile(module.flex_attention, dynamic=False)

    def launch(layer: int) -> torch.Tensor:
        out: torch.Tensor = attend(
            q, keys[layer], values[layer], block_mask=block_mask,
            scale=inputs.scale, enable_gqa=True,
        )  # fmt: skip
        return out[0].transpose(0, 1)

    return Variant(FLEX, launch)


def _used(inputs: Inputs, slots: np.ndarray) -> torch.Tensor:
    """Whether each slot has a token of some request, bool, in the order of ``slots``."""
    layout = inputs.layout
    used = np.zeros(layout.num_slots, np.bool_)
    for row, length in zip(layout.table, layout.kv_len.tolist(), strict=True):
        position = np.arange(length)
        page = row[position // layout.page_size].astype(np.int64)
        used[page * layout.page_size + position % layout.page_size] = True
    return torch.from_numpy(used[slots]).to(inputs.device)


def cascade_levels(
    inputs: Inputs,
) -> tuple[list[list[int]], list[list[int]], list[np.ndarray], list[list[int]]]:
    """Per level: query indptr, page indptr, pages, tokens in the last page.

    A level of nodes without a whole page of tokens is left out.
    """
    layout, counts = inputs.layout, inputs.layout.shape.counts
    size, decodes = layout.page_size, counts[-1]
    queries, bounds, pages, last = [], [], [], []
    begin, node = 0, 0
    for count in counts[:-1]:
        end = int(layout.node_end[node])
        node += count
        if end == begin:
            continue
        firsts = -(-np.arange(count + 1) * decodes // count)
        rows = layout.table[firsts[:-1], begin // size : end // size]
        queries.append(firsts.tolist())
        bounds.append((np.arange(count + 1) * rows.shape[1]).tolist())
        pages.append(rows.ravel())
        last.append([size] * count)
        begin = end
    own = [
        row[begin // size : -(-length // size)]
        for row, length in zip(layout.table, layout.kv_len.tolist(), strict=True)
    ]
    queries.append(list(range(decodes + 1)))
    bounds.append([0, *np.cumsum([len(each) for each in own]).tolist()])
    pages.append(np.concatenate(own))
    last.append([(length - 1) % size + 1 for length in layout.kv_len.tolist()])
    return queries, bounds, pages, last


def flashinfer_cascade(inputs: Inputs) -> Variant:
    """FlashInfer's multi-level wrapper, one kernel per level and merges between."""
    try:
        flashinfer: Any = importlib.import_module("flashinfer")
    except ImportError as error:
        raise Unavailable(f"not installed ({error})") from error
    layout, device = inputs.layout, inputs.device
    queries, bounds, pages, last = cascade_levels(inputs)
    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
        len(queries), workspace, "NHD"
    )

    def ints(levels: list[Any]) -> list[torch.Tensor]:
        return [torch.tensor(each, dtype=torch.int32, device=device) for each in levels]

    wrapper.plan(
        ints(queries), ints(bounds), ints(pages), ints(last), *inputs.heads,
        inputs.q.shape[2], layout.page_size, causal=False, sm_scale=inputs.scale,
        q_data_type=inputs.q.dtype,
    )  # fmt: skip
    paged = (-1, layout.page_size, inputs.heads[1], inputs.q.shape[2])

    def launch(layer: int) -> torch.Tensor:
        caches = inputs.k_caches[layer].view(paged), inputs.v_caches[layer].view(paged)
        out: torch.Tensor = wrapper.run(inputs.q, caches)
        return out

    return Variant(FLASHINFER, launch)


def flash_attention_3(inputs: Inputs) -> Variant:
    """SGLang's own decodes on Hopper: no sharing, the tile schedule made once per step."""
    try:
        fa3: Any = importlib.import_module("sgl_kernel.flash_attn")
    except Exception as error:  # without a driver, an OSError
        raise Unavailable(f"not installed ({error})") from error
    if torch.cuda.get_device_capability(inputs.device)[0] != 9:
        raise Unavailable("is for Hopper")
    layout = inputs.layout
    (q_heads, kv_heads), head_dim = inputs.heads, inputs.q.shape[2]
    count = len(layout.kv_len)
    first = torch.arange(count + 1, dtype=torch.int32, device=inputs.device)
    schedule = fa3.get_scheduler_metadata(
        count, 1, int(layout.kv_len.max()), q_heads, kv_heads, head_dim, inputs.kv_len,
        qkv_dtype=inputs.q.dtype, cu_seqlens_q=first, page_size=layout.page_size,
        causal=True,
    )  # fmt: skip
    paged = (-1, layout.page_size, kv_heads, head_dim)

    def launch(layer: int) -> torch.Tensor:
        out: torch.Tensor = fa3.flash_attn_with_kvcache(
            inputs.q, inputs.k_caches[layer].view(paged),
            inputs.v_caches[layer].view(paged), page_table=inputs.table,
            cache_seqlens=inputs.kv_len, cu_seqlens_q=first, max_seqlen_q=1,
            softmax_scale=inputs.scale, causal=True, scheduler_metadata=schedule,
        )  # fmt: skip
        return out

    return Variant(FA3, launch)


def flash_levels(inputs: Inputs) -> list[dict[str, Any]]:
    """FlashAttention's arguments for each level: a node is a sequence, and all its decodes are
    queries of it."""
    size, device = inputs.layout.page_size, inputs.device
    levels = []
    for queries, bounds, pages, last in zip(*cascade_levels(inputs), strict=True):
        counts = np.diff(bounds)
        table = np.zeros((len(counts), counts.max()), np.int32)
        table[np.arange(counts.max()) < counts[:, None]] = pages
        lengths, first = (counts - 1) * size + last, np.array(queries)
        ints = [
            torch.from_numpy(each.astype(np.int32)).to(device)
            for each in (first, table, lengths)
        ]
        names = ("cu_seqlens_q", "page_table", "cache_seqlens")
        most = {"max_seqlen_q": int(np.diff(first).max())}
        levels.append(dict(zip(names, ints, strict=True)) | most)
    return levels


def cascade_of(
    inputs: Inputs, attend: Callable[..., Any], merge: Callable[..., Any]
) -> Callable[[int], torch.Tensor]:
    """A launch that calls ``attend``, as ``flash_attn_with_kvcache``, for each level, and merges
    each result with those before."""
    paged = (-1, inputs.layout.page_size, inputs.heads[1], inputs.q.shape[2])
    levels = flash_levels(inputs)

    def launch(layer: int) -> torch.Tensor:
        caches = inputs.k_caches[layer].view(paged), inputs.v_caches[layer].view(paged)
        found: tuple[torch.Tensor, torch.Tensor] | None = None
        for level in levels:
            out, lse, *_ = attend(
                inputs.q, *caches, softmax_scale=inputs.scale, causal=False,
                return_softmax_lse=True, **level,
            )  # fmt: skip
            own = out, lse.T.contiguous()  # [num_heads, num_tokens] before
            found = own if found is None else merge(*found, *own)
        assert found is not None
        return found[0]

    return launch


def flash_cascade(inputs: Inputs, version: int) -> Variant:
    """The nodes of each level by FlashAttention, and a merge per level."""
    module, families = FLASH_MODULES[version]
    try:
        flash: Any = importlib.import_module(module)
        merging: Any = importlib.import_module(
            "sglang.srt.layers.attention.merge_state"
        )
    except Exception as error:  # without a driver, an OSError
        raise Unavailable(f"not installed ({error})") from error
    family = torch.cuda.get_device_capability(inputs.device)[0]
    if family not in families:
        raise Unavailable(f"is not for devices of capability {family}")
    launch = cascade_of(inputs, flash.flash_attn_with_kvcache, merging.merge_state)
    return Variant(FLASH_CASCADES[version], launch)


def library_builders(inputs: Inputs, with_flex: bool) -> list[tuple[str, Builder]]:
    """Baselines for a workload of decodes, with their names."""
    if inputs.layout.shape.chunks:
        return []
    found: list[tuple[str, Builder]] = [
        (SDPA, sdpa),
        (FLASHINFER, flashinfer_cascade),
        (FA3, flash_attention_3),
        *(
            (name, partial(flash_cascade, version=version))
            for version, name in FLASH_CASCADES.items()
        ),
    ]
    return [*found, (FLEX, flex)] if with_flex else found
