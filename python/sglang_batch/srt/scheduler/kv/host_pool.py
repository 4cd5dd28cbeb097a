"""A pool of host memory for the KV of offloaded requests, allocated once.

:class:`HostRoom` says which pages each request has, from numbers of tokens and the plan's
cost model, so that all ranks decide alike. When the pool is full, those that are cheapest
to compute again lose their KV: requests in the pool, or the one that asks for room.

A row of the pool is one token's KV in all layers. On an accelerator the pool is pinned, and
KV moves through a buffer on the device, where layers are gathered and filled. The transfer
is one copy for each run of pages, usually one in all, on a stream of its own:

- Saving: the next forward pass waits until the layers are gathered, since it may write to
  the freed slots. The transfer to the host runs at the same time.
- Loading: the transfer to the device runs during the forward pass in flight, and the next
  one waits until the layers are filled.

The streams wait for each other once per step (:meth:`HostPool.end_step`). The host waits
for neither. On a CPU all of these are plain copies.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.host_memory import available_host_memory_bytes
from sglang.srt.mem_cache.memory_pool import KVCache, MLATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from ....errors import EngineError
from ....scheduling.job_plan import StepCost
from ...compat.scheduler_types import Scheduler

Run = tuple[int, int]
"""Consecutive pages: the first one and their number."""


class HostKv(NamedTuple):
    """KV on the host: of a request, or of a prefix.

    name: of its pages in :class:`HostRoom`.
    tokens: their number, and ``runs`` the pages.
    """

    name: str
    tokens: int
    runs: Sequence[Run]


def recompute_time_s(cost: StepCost, num_tokens: int, prefix_len: int) -> float:
    """Seconds to compute ``num_tokens`` of prompt and answer again behind a prefix."""
    attended = num_tokens * (num_tokens + 2 * prefix_len)
    return num_tokens * cost.token_time_s + attended * cost.attention_time_s


class _Held(NamedTuple):
    """The pages of a request, and the seconds to compute it again instead."""

    runs: list[Run]
    num_pages: int
    cost_s: float


class HostRoom:
    """The pages of a host pool: ``num_pages`` in all, and ``num_free`` that nobody has."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._free: list[Run] = [(0, num_pages)] if num_pages else []
        self._held: dict[str, _Held] = {}  # in the order in which they came

    def __contains__(self, rid: str) -> bool:
        return rid in self._held

    def runs(self, rid: str) -> list[Run]:
        """The pages of a request that has some."""
        return self._held[rid].runs

    def to_recompute(self, num_pages: int, cost_s: float) -> list[str] | None:
        """The requests that have to give up their pages so that ``num_pages`` are free: the
        cheapest to compute again, and among equals the last to come.

        Args:
            cost_s: seconds to compute the request that asks again.

        Returns:
            Their ids, without any if there is room. None if computing the request that asks
                again costs no more than computing those.
        """
        found: list[str] = []
        free, total_s = self.num_free, 0.0
        if free >= num_pages:
            return found
        last_first = reversed(self._held.items())
        for rid, held in sorted(last_first, key=lambda each: each[1].cost_s):
            found.append(rid)
            free += held.num_pages
            total_s += held.cost_s
            if free >= num_pages or total_s >= cost_s:
                break
        return None if free < num_pages or total_s >= cost_s else found

    def take(self, rid: str, num_pages: int, cost_s: float) -> list[Run]:
        """Give a request its pages: in one run if there is one that is long enough.

        Raises:
            ValueError: there are too few, or the request has pages already.
        """
        if num_pages > self.num_free or rid in self._held:
            raise ValueError(
                f"{num_pages} pages for {rid}: {self.num_free} of {self.num_pages} are "
                "free; call to_recompute() first."
            )
        runs = self._take_runs(num_pages)
        self.num_free -= num_pages
        self._held[rid] = _Held(runs, num_pages, cost_s)
        return runs

    def _take_runs(self, num_pages: int) -> list[Run]:
        long_enough = [run for run in self._free if run[1] >= num_pages]
        # The tightest fit leaves long runs whole. Otherwise few long pieces are best.
        order = (
            [min(long_enough, key=lambda run: (run[1], run[0]))]
            if long_enough
            else sorted(self._free, key=lambda run: (-run[1], run[0]))
        )
        runs: list[Run] = []
        for first, length in order:
            taken = min(length, num_pages)
            if not taken:
                break
            self._free.remove((first, length))
            if taken < length:
                self._free.append((first + taken, length - taken))
            runs.append((first, taken))
            num_pages -= taken
        return runs

    def give_back(self, rid: str) -> None:
        """A request needs its pages no more."""
        held = self._held.pop(rid)
        self.num_free += held.num_pages
        merged: list[Run] = []
        for first, length in sorted([*self._free, *held.runs]):
            if merged and sum(merged[-1]) == first:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((first, length))
        self._free = merged


logger = logging.getLogger(__name__)


# Memory on the device that KV passes through. A step that moves more waits for copies.
BUFFER_BYTES = 128 << 20
# The widest type that all rows consist of is copied fastest.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def kv_buffers(pool: KVCache) -> list[torch.Tensor]:
    """The KV of each layer, ``[slots, ...]``. The pool is of a type that is supported."""
    if isinstance(pool, MLATokenToKVPool):
        return list(pool.kv_buffer)
    return [*pool.k_buffer, *pool.v_buffer]


def kv_rows(buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views ``[slots, words]`` of KV buffers ``[slots, ...]``, in the widest integer type
    that divides all their rows.

    Raises:
        RuntimeError: a buffer is not contiguous.
    """
    flat = [each.view(each.shape[0], -1).view(torch.uint8) for each in buffers]
    for word in _WORDS:
        if all(not each.shape[1] % word.itemsize for each in flat):
            try:
                return [each.view(word) for each in flat]
            except RuntimeError:  # a buffer begins at an odd address
                continue
    raise AssertionError("every tensor is a view of bytes")


class HostPool:
    """KV of ``num_pages`` pages of ``page_size`` tokens on the host.

    Args:
        buffers: the device's KV, a tensor ``[slots, ...]`` for each layer (and for keys and
            values).

    Attributes:
        token_bytes: KV of a token in all layers.
        num_saves, num_loads: copies to the host and back so far, one for each run of pages.
    """

    def __init__(
        self, buffers: Sequence[torch.Tensor], num_pages: int, page_size: int
    ) -> None:
        self._layers = kv_rows(buffers)
        self.page_size = page_size
        self._widths = [each.shape[1] for each in self._layers]
        word, device, width = self._layers[0].dtype, self.device, sum(self._widths)
        self.token_bytes = width * word.itemsize
        self._host = torch.empty((num_pages * page_size, width), dtype=word)
        self.num_saves = self.num_loads = 0
        self._device: _DeviceBuffer | None = None
        if device.type != "cpu" and num_pages:
            self._host = _pinned(self._host, device)
            self._device = _DeviceBuffer(self._host, device)

    @property
    def num_bytes(self) -> int:
        return int(self._host.nbytes)

    @property
    def device(self) -> torch.device:
        """That of the KV which comes here."""
        return self._layers[0].device

    def host_layers(self) -> list[torch.Tensor]:
        """Views uint8 ``[pages, tokens, bytes]`` of each layer's part of the memory."""
        rows = self._host.view(torch.uint8).view(-1, self.page_size, self.token_bytes)
        widths = [width * self._host.itemsize for width in self._widths]
        return list(rows.split(widths, dim=-1))

    def empty_rows(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """Memory for the KV of so many tokens, laid out as here."""
        return torch.empty(
            (num_tokens, self._host.shape[1]), dtype=self._host.dtype, device=device
        )

    def host_rows(
        self, runs: Sequence[Run], begin: int, end: int
    ) -> Iterator[torch.Tensor]:
        """The KV of tokens [begin, end) of these pages, in pieces."""
        for first, length in runs:
            tokens = length * self.page_size
            low, high = max(begin, 0), min(end, tokens)
            if low < high:
                at = first * self.page_size
                yield self._host[at + low : at + high]
            begin, end = begin - tokens, end - tokens

    def let_wait(self, stream: Any) -> None:
        """Have a stream wait for all copies so far."""
        if self._device is not None:
            self._device.let_wait(stream)

    def save(self, slots: torch.Tensor, runs: Sequence[Run]) -> None:
        """Copy the KV of ``slots`` ``[n]`` to the host, to these pages. The slots may be
        freed at once."""
        for host, part in self._pieces(slots, runs):
            self.num_saves += 1
            if self._device is None:
                self.gather(part, host)
            else:
                self._device.save(host, part, self.gather)

    def load(self, slots: torch.Tensor, runs: Sequence[Run], skip: int) -> None:
        """Copy KV back to ``slots`` ``[n]``: of these pages without the first ``skip``
        tokens.

        The pages may be given away at once. The KV is there in the next forward pass.
        """
        for host, part in self._pieces(slots, runs, skip):
            self.num_loads += 1
            if self._device is None:
                self.fill(host, part)
            else:
                self._device.load(host, part, self.fill)

    def end_step(self) -> None:
        """Let the next forward pass see the copies of this step. Call it before."""
        if self._device is not None:
            self._device.end_step()

    def _pieces(
        self, slots: torch.Tensor, runs: Sequence[Run], skip: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Rows of the host, and the slots that belong to them, that are copied at once."""
        most = len(self._host) if self._device is None else self._device.num_tokens
        at = 0
        for first, length in runs:
            begin, end = first * self.page_size, (first + length) * self.page_size
            begin, skip = min(begin + skip, end), max(0, skip - (end - begin))
            while begin < end and at < len(slots):
                count = min(end - begin, len(slots) - at, most)
                yield self._host[begin : begin + count], slots[at : at + count]
                begin, at = begin + count, at + count
        assert at == len(slots), (at, len(slots))

    def gather(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy the KV of ``slots`` ``[n]`` to ``rows`` ``[n, words]``."""
        parts = rows.split(self._widths, dim=1)
        for layer, part in zip(self._layers, parts, strict=True):
            part.copy_(layer[slots])

    def fill(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy KV ``[n, words]`` that is on the device to ``slots`` ``[n]``."""
        parts = rows.split(self._widths, dim=1)
        for layer, part in zip(self._layers, parts, strict=True):
            layer[slots] = part


class _DeviceBuffer:
    """The buffer on the device, and the stream on which KV passes through it. Parts of it
    wait for the second half of their way until the step ends or the buffer is full."""

    def __init__(self, host: torch.Tensor, device: torch.device) -> None:
        row_bytes = host.shape[1] * host.itemsize
        self.num_tokens = max(1, min(len(host), BUFFER_BYTES // row_bytes))
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream()
        self._buffer = torch.empty(
            (self.num_tokens, host.shape[1]), dtype=host.dtype, device=device
        )
        self._used = 0
        self._to_host: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._to_slots: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._fill: Any = None
        self._gathered = False

    def save(self, host: torch.Tensor, slots: torch.Tensor, gather: Any) -> None:
        self._fill_slots()
        part = self._part(len(slots))
        # The slots' KV and their numbers were made on the current stream.
        self._stream.wait_stream(self._module.current_stream())
        with self._on_stream():
            gather(slots, part)
        slots.record_stream(self._stream)
        self._to_host.append((host, part))
        self._gathered = True

    def load(self, host: torch.Tensor, slots: torch.Tensor, fill: Any) -> None:
        self._send()
        part = self._part(len(slots))
        with self._on_stream():
            part.copy_(host, non_blocking=True)
        self._to_slots.append((part, slots))
        self._fill = fill

    def let_wait(self, stream: Any) -> None:
        stream.wait_stream(self._stream)

    def end_step(self) -> None:
        self._fill_slots()
        if self._gathered:
            self._current_waits()
            self._gathered = False
        self._send()
        self._used = 0

    def _part(self, num_tokens: int) -> torch.Tensor:
        if self._used + num_tokens > self.num_tokens:
            self._fill_slots()
            self._send()
            self._used = 0
        self._used += num_tokens
        return self._buffer[self._used - num_tokens : self._used]

    def _send(self) -> None:
        with self._on_stream():
            for host, part in self._to_host:
                host.copy_(part, non_blocking=True)
        self._to_host.clear()

    def _fill_slots(self) -> None:
        """Fill the slots, once the forward pass in flight no longer uses them."""
        if not self._to_slots:
            return
        self._stream.wait_stream(self._module.current_stream())
        with self._on_stream():
            for part, slots in self._to_slots:
                self._fill(part, slots)
                slots.record_stream(self._stream)
        self._to_slots.clear()
        self._current_waits()

    def _current_waits(self) -> None:
        self._module.current_stream().wait_event(self._stream.record_event())

    def _on_stream(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self._module.stream(self._stream)
        return context


def _pinned(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same memory, or as much, page-locked. Unpinned with a warning if the system
    does not allow it: copies are then slower and wait for each other."""
    try:
        if device.type != "cuda":
            return host.pin_memory()
        # pin_memory() would take up to twice as much.
        status = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)
        if int(status) == 0:
            return host
        reason = f"error {int(status)}"
    except RuntimeError as error:
        reason = str(error)
    logger.warning(
        "The %.1f GB of host memory for offloaded KV cannot be pinned (%s); a smaller "
        "offload_bytes may help.",
        host.nbytes / 1e9,
        reason,
    )
    return host


# Share of the free host memory for the pools of all ranks, unless the user chose.
_FREE_SHARE = 0.25
# Most KV on the host, over that of the device, unless the user chose.
_MOST_KV = 4


def chosen_bytes(scheduler: Scheduler) -> int | None:
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
    scheduler: Scheduler, page_bytes: int, num_slots: int, pool_bytes: int | None
) -> int:
    """Pages of the host pool, the same on all TP ranks.

    Args:
        page_bytes: of a page in all layers.
        num_slots: tokens that the device's KV holds.
        pool_bytes: as of :func:`chosen_bytes`.

    Raises:
        EngineError: the pool is larger than the free memory.
    """
    page_size = int(scheduler.token_to_kv_pool_allocator.page_size)
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
