"""KV of requests that resume soon, on the device before there is room for it in the cache.

A request on the host joins in the step in which its KV fits, and the forward pass of that
step waits for its transfer. The requests that come next are known, so their KV is copied
into a buffer ahead, during forward passes (AlignedServe, section 3.2). The buffer is memory
of the device itself, or of another one that it can read directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.runtime_context import get_parallel

from ....config import OfflineBatchConfig
from ....errors import EngineError
from ..kv.host_pool import HostKv, HostPool, HostRoom, Run

# Expected rate from the host to a device, which limits the copies of a step: half that of
# PCIe 5, as all GPUs of a machine may load at a time.
BYTES_PER_S = 25e9


class BufferPart(NamedTuple):
    """Pages [begin, end) of some KV, which begins at page ``first`` of the buffer. They are
    copied in one step."""

    name: str
    first: int
    begin: int
    end: int


class PrefetchRoom:
    """The pages of a buffer, in which KV has one run each, and how many were copied to. The
    names in ``gone`` lost their pages to others in the last :meth:`fetch`."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._room = HostRoom(num_pages)
        self._runs: dict[str, Run] = {}
        self._copied: dict[str, int] = {}  # pages
        self.gone: list[str] = []

    def __contains__(self, name: str) -> bool:
        """Whether all of it is here."""
        return name in self._runs and self._copied[name] == self._runs[name][1]

    def fetch(self, wanted: Sequence[tuple[str, int]], most: int) -> list[BufferPart]:
        """Give pages to the KV that is loaded next, as much of it as there is room for.
        Other KV leaves only where its pages are needed.

        Args:
            wanted: names and pages, the next to be loaded first.
            most: pages that may be copied in this step.

        Returns:
            The pages to copy in this step.
        """
        left, kept = self.num_pages, dict[str, int]()
        for name, pages in wanted:
            if pages > self.num_pages:
                continue
            left -= pages
            if left < 0:
                break
            kept[name] = pages
        self.gone.clear()
        order = {name: i for i, name in enumerate(kept)}
        held = sorted(self._runs, key=lambda name: order.get(name, len(kept)))
        parts, left = [], most
        for name, pages in kept.items():
            # The free pages may lie in pieces. Then KV that is loaded later leaves, too.
            run = self._runs.get(name) or self.take(name, pages)
            while run is None and held and order.get(held[-1], len(kept)) > order[name]:
                self.gone.append(held.pop())
                self.give_back(self.gone[-1])
                run = self.take(name, pages)
            if run is None:
                break
            begin = self._copied[name]
            end = min(pages, begin + left)
            left -= end - begin
            if end > begin:
                parts.append(BufferPart(name, run[0], begin, end))
                self._copied[name] = end
        return parts

    def take(self, name: str, pages: int) -> Run | None:
        """Pages that are free, None if there are not enough in one run."""
        if pages > self._room.num_free or name in self._runs:
            return None
        runs = self._room.take(name, pages, 0.0)
        if len(runs) > 1:
            self._room.give_back(name)
            return None
        self._runs[name], self._copied[name] = runs[0], 0
        return runs[0]

    def is_here(self, name: str) -> None:
        """All of some KV was copied at once."""
        self._copied[name] = self._runs[name][1]

    def give_back(self, name: str) -> Run | None:
        """Pages are needed no more. Returns them if all of the KV was there."""
        whole = name in self
        run = self._runs.pop(name, None)
        if run is not None:
            self._room.give_back(name)
            del self._copied[name]
        return run if whole else None


class KvPrefetch:
    """A buffer of ``num_pages`` pages on ``device``, between the host pool and the device's
    KV.

    Raises:
        EngineError: the KV's device cannot read the memory of ``device`` directly.
    """

    def __init__(self, pool: HostPool, num_pages: int, device: torch.device) -> None:
        own = pool.device
        if device != own and not (
            own.type == device.type == "cuda"
            and torch.cuda.can_device_access_peer(own, device)
        ):
            raise EngineError(
                f"prefetch_device={device}: {own} cannot read its memory directly. Name "
                "a GPU that it can, or leave prefetch_device out."
            )
        self._pool = pool
        self._page_size = pool.page_size
        self._room = PrefetchRoom(num_pages)
        self._pages_per_s = BYTES_PER_S / (pool.token_bytes * self._page_size)
        self._buffer = pool.empty_rows(num_pages * self._page_size, device)
        self._own = own
        self._module: Any = None
        self._stream: Any = None
        self._events: dict[str, Any] = {}
        if own.type != "cpu":
            self._module = torch.get_device_module(own)
            self._stream = self._module.Stream(device=device)

    def is_near(self, kv: HostKv) -> bool:
        """Whether KV need not be waited for: it is here, or larger than the buffer."""
        return kv.name in self._room or self._pages(kv.tokens) > self._room.num_pages

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

    def fetch(self, wanted: Sequence[HostKv], seconds: float) -> None:
        """Copy the KV that is loaded next, the first of it first, in a step of so many
        seconds."""
        most = self._room.num_pages
        if self._stream is not None:
            most = max(1, int(seconds * self._pages_per_s))
        by_name = {kv.name: kv for kv in wanted}
        sizes = [(kv.name, self._pages(kv.tokens)) for kv in wanted]
        parts = self._room.fetch(sizes, most)
        for name in self._room.gone:
            self._wait_for_copy(name)
        if parts and self._stream is not None:
            # Pages of the buffer were just read, and the host's may still be written.
            self._stream.wait_stream(self._module.current_stream())
            self._pool.let_wait(self._stream)
        for part in parts:
            if self._stream is None:
                self._copy(part, by_name[part.name])
            else:
                with self._module.stream(self._stream):
                    self._copy(part, by_name[part.name])
                    self._events[part.name] = self._stream.record_event()

    def _copy(self, part: BufferPart, kv: HostKv) -> None:
        begin = part.begin * self._page_size
        end = min(part.end * self._page_size, kv.tokens)
        at = part.first * self._page_size + begin
        for rows in self._pool.host_rows(kv.runs, begin, end):
            to = self._buffer[at : at + len(rows)]
            to.copy_(rows, non_blocking=self._stream is not None)
            at += len(rows)

    def keep(self, name: str, slots: torch.Tensor) -> None:
        """Copy KV of ``slots`` ``[n]`` that goes to the host, if pages are free: it may be
        loaded before it could come back from there."""
        run = self._room.take(name, self._pages(len(slots)))
        if run is not None:
            begin = run[0] * self._page_size
            self._pool.gather(slots, self._buffer[begin : begin + len(slots)])
            self._room.is_here(name)

    def load(self, name: str, slots: torch.Tensor, skip: int) -> bool:
        """Move KV to ``slots`` ``[n]``, without its first ``skip`` tokens.

        Returns:
            Whether it was in the buffer.
        """
        self._wait_for_copy(name)
        run = self._room.give_back(name)
        if run is None:
            return False
        begin = run[0] * self._page_size + skip
        rows = self._buffer[begin : begin + len(slots)]
        self._pool.fill(rows.to(self._own, non_blocking=True), slots)
        return True

    def drop(self, name: str) -> None:
        """KV will not be loaded from here."""
        self._wait_for_copy(name)
        self._room.give_back(name)

    def _wait_for_copy(self, name: str) -> None:
        """Whoever uses pages next that are given back comes after the copy to them."""
        event = self._events.pop(name, None)
        if event is not None:
            self._module.current_stream().wait_event(event)


def make_prefetch(pool: HostPool, config: OfflineBatchConfig) -> KvPrefetch:
    """The buffer of ``prefetch_bytes``, on this device or from ``prefetch_device`` on.

    Raises:
        EngineError: as of :class:`KvPrefetch`.
    """
    page_bytes = pool.page_size * pool.token_bytes
    device = pool.device
    if config.prefetch_device is not None:
        first = torch.device(config.prefetch_device)
        device = torch.device(first.type, (first.index or 0) + get_parallel().tp_rank)
    return KvPrefetch(pool, config.prefetch_bytes // page_bytes, device)
