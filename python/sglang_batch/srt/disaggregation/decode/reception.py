"""Where the KV of prompts goes that prefill servers compute, and who waits there.

KV comes to the pool of host memory that offloaded requests have, too. A request waits
there among those of its job and joins when the plan says so, like one that was offloaded.
So prompts are computed ahead of the decodes, and the policies that batch requests by the
length of their KV choose among all that are there.
"""

from __future__ import annotations

import numpy as np

from ....errors import EngineError
from ...compat.scheduler_types import Req
from ...scheduler.kv.kv_manager import KvManager
from ...scheduler.kv.offloading import KvOffloader, OffloadedRequest
from ...scheduler.request_registry import RequestRegistry
from ..tcp.page_buffers import Indices


class Reception:
    """Requests whose prompts other servers compute, until they join.

    Args:
        offloader: the pool. None where KV cannot be moved to the host.

    Raises:
        EngineError: there is no pool.
    """

    def __init__(
        self,
        *,
        offloader: KvOffloader | None,
        kv_manager: KvManager,
        registry: RequestRegistry,
        page_size: int,
    ) -> None:
        if offloader is None or not offloader.room.num_pages:
            raise EngineError(
                "A decode server that follows plans receives KV into host memory, and "
                "there is no pool for it (see the log above); set offload_bytes, or give "
                """--offline-batch-config '{"scheduler": "stock"}'."""
            )
        self._offloader = offloader
        self._kv_manager = kv_manager
        self._registry = registry
        self._page_size = page_size
        self._online: dict[str, OffloadedRequest] = {}

    @property
    def num_tokens(self) -> int:
        """Most tokens of KV that there is ever room for."""
        return self._offloader.room.num_pages * self._page_size

    def reserve(self, req: Req, num_tokens: int) -> Indices | None:
        """Pages ``[n]`` for a prompt, or None if it has to wait for room.

        Prompts of jobs take half of the pool at most, or all of it if nobody else has
        any. The rest is for requests that make room, and for online requests.
        """
        room = self._offloader.room
        pages = -(-num_tokens // self._page_size)
        used = room.num_pages - room.num_free
        if pages > room.num_free:
            return None
        if used and used + pages > room.num_pages // 2 and self._registry.of_job(req):
            return None
        runs = self._offloader.reserve(req.rid, num_tokens)
        numbers = [np.arange(first, first + length) for first, length in runs]
        return np.concatenate(numbers, dtype=np.int64)

    def release(self, req: Req) -> None:
        """The KV of a request does not come, or is not wanted any more."""
        self._offloader.forget(req.rid)
        self.gone(req)

    def gone(self, req: Req) -> None:
        """A request failed before its KV came."""
        known = self._registry.known(req)
        if known is not None and known[0] is not None:  # it was to be computed again
            self._registry.skip(known[0], known[1])

    def arrived(self, req: Req, num_tokens: int) -> bool:
        """The KV of a request is on the host. It waits from now on.

        Returns:
            Whether it belongs to a job. If not, :meth:`take_online` gets it.
        """
        runs = self._offloader.room.runs(req.rid)
        kv = self._offloader.received(req, num_tokens, runs)
        if self._registry.enqueue(req):
            self._kv_manager.received(kv)
            return True
        self._online[req.rid] = kv
        return False

    def online_kv(self, req: Req) -> OffloadedRequest:
        """The KV of an online request that waits."""
        return self._online[req.rid]

    def joined(self, req: Req) -> None:
        """An online request runs."""
        del self._online[req.rid]

    def drop_online(self, req: Req) -> None:
        """An online request that waits was aborted."""
        self._offloader.drop(self._online.pop(req.rid))

    def give_up_online(self, req: Req) -> Req:
        """Drop an online request's KV, which is to be computed again."""
        return self._offloader.give_up(self._online.pop(req.rid))
