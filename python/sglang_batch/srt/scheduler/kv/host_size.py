"""The size of the host pool: the user's choice, or a share of the free memory."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.host_memory import available_host_memory_bytes
from sglang.srt.runtime_context import get_parallel

from ....errors import EngineError
from ...compat.scheduler_types import OffloadingScheduler
from .host_pool import kv_buffers

# Share of the free host memory for the pools of all ranks, unless the user chose.
_FREE_SHARE = 0.25
# Most KV on the host, over that of the device, unless the user chose.
_MOST_KV = 4


def chosen_bytes(scheduler: OffloadingScheduler) -> int | None:
    """The size of the host pool that the user chose. None: it is left to us."""
    args = scheduler.server_args
    given: int | None = args.offline_config.offload_bytes
    if given is not None or not args.enable_hierarchical_cache:
        return given
    if args.hicache_size:
        return int(args.hicache_size * 1e9)
    if args.hicache_ratio is None:
        return None
    buffers = kv_buffers(scheduler.token_to_kv_pool_allocator.get_kvcache())
    return int(args.hicache_ratio * sum(each.nbytes for each in buffers))


def num_pages_of(
    scheduler: OffloadingScheduler,
    page_bytes: int,
    num_slots: int,
    pool_bytes: int | None,
) -> int:
    """Pages of the host pool, the same on all TP ranks.

    Args:
        page_bytes: of a page in all layers.
        num_slots: tokens that the device's KV holds.
        pool_bytes: as of :func:`chosen_bytes`.

    Raises:
        EngineError: the pool is larger than the free memory.
    """
    page_size = scheduler.token_to_kv_pool_allocator.page_size
    free = available_host_memory_bytes(allow_cgroup_fallback=True)
    parallel = get_parallel()
    if pool_bytes is None:
        args = scheduler.server_args
        ranks = max(1, args.tp_size * args.dp_size // args.nnodes)
        pool_bytes = int(_FREE_SHARE * free / ranks)
        pages = min(pool_bytes // page_bytes, _MOST_KV * num_slots // page_size)
    elif pool_bytes > free:
        raise EngineError(
            f"offload_bytes={pool_bytes}, for each rank, is more than the {free} bytes of "
            "host memory that are free; set less (with --enable-hierarchical-cache also "
            "by --hicache-size), or 0 to compute requests again instead."
        )
    else:
        pages = pool_bytes // page_bytes
    if parallel.tp_size > 1:
        # Free memory differs, and requests of all ranks must find room or none.
        least = torch.tensor([pages])
        torch.distributed.all_reduce(
            least, op=torch.distributed.ReduceOp.MIN, group=scheduler.tp_cpu_group
        )
        pages = int(least)
    return pages
