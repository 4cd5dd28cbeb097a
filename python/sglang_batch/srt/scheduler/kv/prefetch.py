"""KV of requests that resume soon, on the device before there is room for it in the cache.

A request on the host joins in the step in which its KV fits, and the forward pass of that
step waits for its transfer. The requests that come next are known, so their KV is copied
into a buffer ahead, beside the forward passes (AlignedServe, section 3.2). When one joins,
its KV is on the device, and is only moved there.

The buffer is memory of the device itself, or of another one that it can read directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ....errors import EngineError
from .host_pool import HostPool
from .host_room import HostRoom, Run


class HostKv(NamedTuple):
    """KV on the host: of a request, or of a prefix.

    name: of its pages in ``HostRoom``.
    tokens: their number, and ``runs`` the pages.
    """

    name: str
    tokens: int
    runs: Sequence[Run]


class PrefetchRoom:
    """The pages of a buffer, in which KV has one run each.

    Args:
        num_pages: of the buffer.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._room = HostRoom(num_pages)
        self._runs: dict[str, Run] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._runs

    def fetch(self, wanted: Sequence[tuple[str, int]]) -> list[tuple[str, Run]]:
        """Give pages to the KV that is loaded next, as much of it as there is room for.

        Other KV leaves only where its pages are needed.

        Args:
            wanted: names and pages, the next to be loaded first.

        Returns:
            The pages of what has got some now.
        """
        left, kept, new = self.num_pages, dict[str, int](), dict[str, Run]()
        for name, pages in wanted:
            if pages > self.num_pages:
                continue
            left -= pages
            if left < 0:
                break
            kept[name] = pages
        order = {name: i for i, name in enumerate(kept)}
        held = sorted(self._runs, key=lambda name: order.get(name, len(kept)))
        for name, pages in kept.items():
            if name in self._runs:
                continue
            run = self.take(name, pages)
            # The free pages may lie in pieces. Then what is loaded later leaves, too.
            while run is None and held and order.get(held[-1], len(kept)) > order[name]:
                self.give_back(held.pop())
                run = self.take(name, pages)
            if run is None:
                break
            new[name] = run
        return list(new.items())

    def take(self, name: str, pages: int) -> Run | None:
        """Pages that are free, None if there are not enough in one run."""
        if pages > self._room.num_free:
            return None
        runs = self._room.take(name, pages, 0.0)
        if len(runs) > 1:
            self._room.give_back(name)
            return None
        self._runs[name] = runs[0]
        return runs[0]

    def give_back(self, name: str) -> Run:
        """Pages are needed no more."""
        self._room.give_back(name)
        return self._runs.pop(name)


class KvPrefetch:
    """A buffer between the host pool and the device's KV.

    Args:
        pool: the KV on the host.
        num_pages: pages of the buffer.
        device: where the buffer is.

    Raises:
        EngineError: the KV's device cannot read the memory of ``device`` directly.
    """

    def __init__(self, pool: HostPool, num_pages: int, device: torch.device) -> None:
        own = pool.device
        if own.type == "cuda" and device != own:
            peers = torch.cuda.can_device_access_peer(own, device)
            if device.type != "cuda" or not peers:
                raise EngineError(
                    f"prefetch_device={device}: {own} cannot read its memory directly. "
                    "Name a GPU that it can, or leave prefetch_device out."
                )
        self._pool = pool
        self._page_size = pool.page_size
        self._room = PrefetchRoom(num_pages)
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
        pages = -(-kv.tokens // self._page_size)
        return kv.name in self._room or pages > self._room.num_pages

    def fetch(self, wanted: Sequence[HostKv]) -> None:
        """Begin to copy the KV that is loaded next, the first of it first."""
        sizes = [(kv.name, -(-kv.tokens // self._page_size)) for kv in wanted]
        new = dict(self._room.fetch(sizes))
        if not new:
            return
        for name in [n for n in self._events if n in new or n not in self._room]:
            self._wait_for_copy(name)
        if self._stream is not None:
            # Pages of the buffer were just read, and the host's may still be written.
            self._stream.wait_stream(self._module.current_stream())
            self._pool.let_wait(self._stream)
        for kv in wanted:
            if kv.name in new:
                self._copy(kv, new[kv.name][0] * self._page_size)

    def _copy(self, kv: HostKv, at: int) -> None:
        end = at + kv.tokens
        if self._stream is None:
            for rows in self._pool.host_rows(kv.runs, kv.tokens):
                self._buffer[at : at + len(rows)].copy_(rows)
                at += len(rows)
        else:
            with self._module.stream(self._stream):
                for rows in self._pool.host_rows(kv.runs, kv.tokens):
                    part = self._buffer[at : at + len(rows)]
                    part.copy_(rows, non_blocking=True)
                    at += len(rows)
                self._events[kv.name] = self._stream.record_event()
        assert at == end, (at, end)

    def keep(self, name: str, slots: torch.Tensor) -> None:
        """Copy KV of ``slots`` ``[n]`` that goes to the host, if pages are free: it may be
        loaded before it could come back from there."""
        run = self._room.take(name, -(-len(slots) // self._page_size))
        if run is not None:
            begin = run[0] * self._page_size
            self._pool.gather(slots, self._buffer[begin : begin + len(slots)])

    def load(self, name: str, slots: torch.Tensor, skip: int) -> bool:
        """Move KV to ``slots`` ``[n]``, without its first ``skip`` tokens.

        Returns:
            Whether it was in the buffer.
        """
        if name not in self._room:
            return False
        begin = self._leave(name)[0] * self._page_size + skip
        rows = self._buffer[begin : begin + len(slots)]
        self._pool.fill(rows.to(self._own, non_blocking=True), slots)
        return True

    def drop(self, name: str) -> None:
        """KV will not be loaded from here."""
        if name in self._room:
            self._leave(name)

    def _leave(self, name: str) -> Run:
        self._wait_for_copy(name)
        return self._room.give_back(name)

    def _wait_for_copy(self, name: str) -> None:
        """Whoever uses pages next that are given back comes after the copy to them."""
        event = self._events.pop(name, None)
        if event is not None:
            self._module.current_stream().wait_event(event)
