"""KV of requests that resume soon, on the device before there is room for it in the cache.

A request on the host joins in the step in which its KV fits, and the forward pass of that
step waits for its transfer. The requests that come next are known, so their KV is copied
into a buffer ahead, beside the forward passes (AlignedServe, section 3.2). When one joins,
its KV is on the device, and is only moved there.

The buffer is memory of the device itself, or of another one that it can read directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....errors import EngineError
from .host_pool import HostPool
from .host_room import HostRoom, Run


class PrefetchRoom:
    """The pages of a buffer, in which each request has one run.

    Args:
        num_pages: of the buffer.
    """

    def __init__(self, num_pages: int) -> None:
        self._room = HostRoom(num_pages)
        self._runs: dict[str, Run] = {}

    def __contains__(self, rid: str) -> bool:
        return rid in self._runs

    def fetch(self, wanted: Sequence[tuple[str, int]]) -> list[tuple[str, Run]]:
        """Give pages to the requests that come next, as many as there is room for.

        Others leave only where their pages are needed.

        Args:
            wanted: ids of requests and the pages of each, the next to resume first.

        Returns:
            Those that have got pages now.
        """
        left, number = self._room.num_pages, 0
        for _, pages in wanted:
            if pages > left:
                break
            left -= pages
            number += 1
        wanted = wanted[:number]
        keep = {rid for rid, _ in wanted}
        new = []
        for rid, pages in wanted:
            if rid in self._runs:
                continue
            run = self._take(rid, pages)
            if run is None:
                for other in [each for each in self._runs if each not in keep]:
                    self.give_back(other)
                run = self._take(rid, pages)
            if run is None:  # the free pages lie in pieces
                break
            new.append((rid, run))
        return new

    def _take(self, rid: str, pages: int) -> Run | None:
        if pages > self._room.num_free:
            return None
        runs = self._room.take(rid, pages, 0.0)
        if len(runs) > 1:
            self._room.give_back(rid)
            return None
        self._runs[rid] = runs[0]
        return runs[0]

    def give_back(self, rid: str) -> Run:
        """A request needs its pages no more."""
        self._room.give_back(rid)
        return self._runs.pop(rid)


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

    def fetch(self, wanted: Sequence[tuple[str, int, Sequence[Run]]]) -> None:
        """Begin to copy the KV of the requests that come next.

        Args:
            wanted: ids, tokens of KV and pages on the host, the next to resume first.
        """
        sizes = [(rid, -(-tokens // self._page_size)) for rid, tokens, _ in wanted]
        new = dict(self._room.fetch(sizes))
        if not new:
            return
        if self._stream is not None:
            # Pages of the buffer were just read, and the host's may still be written.
            self._stream.wait_stream(self._module.current_stream())
            self._pool.let_wait(self._stream)
        for rid, tokens, runs in wanted:
            if rid in new:
                self._copy(rid, new[rid][0] * self._page_size, tokens, runs)

    def _copy(self, rid: str, at: int, tokens: int, runs: Sequence[Run]) -> None:
        end = at + tokens
        if self._stream is None:
            for rows in self._pool.host_rows(runs, tokens):
                self._buffer[at : at + len(rows)].copy_(rows)
                at += len(rows)
        else:
            with self._module.stream(self._stream):
                for rows in self._pool.host_rows(runs, tokens):
                    part = self._buffer[at : at + len(rows)]
                    part.copy_(rows, non_blocking=True)
                    at += len(rows)
                self._events[rid] = self._stream.record_event()
        assert at == end, (at, end)

    def load(self, rid: str, slots: torch.Tensor, skip: int) -> bool:
        """Move KV to ``slots`` ``[n]``: that of a request without the first ``skip``
        tokens.

        Returns:
            Whether it was in the buffer.
        """
        if rid not in self._room:
            return False
        begin = self._leave(rid)[0] * self._page_size + skip
        rows = self._buffer[begin : begin + len(slots)]
        self._pool.fill(rows.to(self._own, non_blocking=True), slots)
        return True

    def drop(self, rid: str) -> None:
        """A request will not resume, or not from here."""
        if rid in self._room:
            self._leave(rid)

    def _leave(self, rid: str) -> Run:
        event = self._events.pop(rid, None)
        if event is not None:  # whoever uses the pages next comes after the copy
            self._module.current_stream().wait_event(event)
        return self._room.give_back(rid)
