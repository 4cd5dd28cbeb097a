"""Sends each request of a decode server to a prefill server as well.

SGLang leaves that to a router in front of both. Here the decode server does it, for every
message to its scheduler: also for each of several answers to a prompt, and for requests
that belong to no job.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import HTTPException
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

from ...batch_api.protocol import error_body
from ...fleet.plan_bytes import to_bytes
from ...job.retrying_engine import PREFILL_LOST, TRANSIENT
from ...request import RequestOutput
from ...scheduling.job_plan import JobPlan
from .prefill_calls import PrefillCall
from .prefill_servers import GONE, PrefillServer, PrefillServers

logger = logging.getLogger(__name__)

# Seconds in which a prefill server that failed a request says why.
WHY_S = 5.0


@dataclass(slots=True)
class _Line:
    """The calls for one request of a job, and the first of them that failed."""

    calls: list[asyncio.Task[None]] = field(default_factory=list)
    failure: tuple[int, str] | None = None
    is_lost: bool = False


class Pairing:
    """The prefill servers behind the requests of one tokenizer manager."""

    def __init__(self, manager: Any, urls: Sequence[str]) -> None:
        self._manager = manager
        self.servers = PrefillServers(urls)
        self._lines: dict[str, _Line] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to watch the servers, in the running event loop."""
        self.servers.start()

    # Jobs -----------------------------------------------------------------------------

    async def open_job(self, job_id: str, plans: Sequence[JobPlan]) -> None:
        """Tell the prefill servers a job's plan.

        With several decode replicas each has its own plan, and prompts are computed in
        the order in which they come.
        """
        if len(plans) == 1:
            data = await asyncio.to_thread(to_bytes, plans[0])
            await self.servers.open_job(job_id, data)

    async def set_priority(self, job_id: str, priority: int) -> None:
        await self.servers.set_priority(job_id, priority)

    async def close_job(self, job_id: str) -> None:
        await self.servers.close_job(job_id)

    async def execute(
        self, rid: str, run: Callable[[], Awaitable[RequestOutput]]
    ) -> RequestOutput:
        """Run a request of a job once a prefill server is up.

        Returns:
            Its output, or the reason why the prefill server failed it.
        """
        await self.servers.wait_for_one()
        line = self._lines[rid] = _Line()
        output: RequestOutput | None = None
        try:
            output = await run()
            if output.status_code in TRANSIENT:
                output = await self._explained(rid, line, output)
            return output
        finally:
            del self._lines[rid]
            if output is None or not output.ok:
                for call in line.calls:
                    call.cancel()

    async def _explained(
        self, rid: str, line: _Line, output: RequestOutput
    ) -> RequestOutput:
        # The decode side may notice a failure before the prefill server's answer comes.
        if line.calls:
            await asyncio.wait(line.calls, timeout=WHY_S)
        if line.failure is None:
            return output
        status, reason = line.failure
        if line.is_lost:
            message = f"The prefill server of this request is gone: {reason}"
            return _error(503, rid, message, PREFILL_LOST)
        return _error(status, rid, f"On the prefill server: {reason}", None)

    # Messages -------------------------------------------------------------------------

    def pair(self, message: Any) -> None:
        """Send a message's request to a prefill server, and name that in the message.

        Raises:
            HTTPException: no prefill server is up.
            ValueError: the request cannot be sent to one.
        """
        server = self.servers.choose()
        if server is None or server.port is None:
            names = ", ".join(each.url for each in self.servers.servers)
            raise HTTPException(503, f"No prefill server is up ({names}).")
        room = secrets.randbits(62) + 1
        address = (server.host, server.port, room)
        call = PrefillCall.of(self.servers.name_of(message.rid), message, address)
        message.bootstrap_host, message.bootstrap_port, message.bootstrap_room = address
        task = asyncio.ensure_future(self._send(server, call, message.rid))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        line = self._line_of(message.rid)
        if line is not None:
            line.calls.append(task)

    def _line_of(self, rid: str) -> _Line | None:
        """The line of a message's id: its own, or what it begins with."""
        while rid:
            if rid in self._lines:
                return self._lines[rid]
            rid = rid.rpartition(".")[0]
        return None

    async def _send(self, server: PrefillServer, call: PrefillCall, rid: str) -> None:
        is_lost = False
        try:
            status, reason = await self.servers.call(server, call)
            if status == 200:
                return
        except GONE as error:
            status, reason, is_lost = 503, f"{server.url}: {error!r}", True
        except msgspec.MsgspecError as error:
            status, reason = 400, f"the request cannot be sent there: {error}"
        line = self._line_of(rid)
        if line is None:
            logger.warning("Request %s failed on %s: %s", rid, server.url, reason)
        elif line.failure is None:
            line.failure, line.is_lost = (status, reason), is_lost
        # Without KV it would wait until SGLang's time limit.
        self._manager.abort_request(rid)


def _error(status: int, rid: str, message: str, code: str | None) -> RequestOutput:
    body = error_body(message, status_code=status, code=code)
    return RequestOutput(status, rid, msgspec.json.encode(body))


def pairing_of(manager: Any) -> Pairing | None:
    """The pairing of a tokenizer manager. None if it has no prefill servers."""
    urls = manager.server_args.offline_config.prefill_servers
    if not urls:
        return None
    pairing: Pairing | None = vars(manager).get("offline_pairing")
    if pairing is None:
        pairing = vars(manager)["offline_pairing"] = Pairing(manager, urls)
    return pairing


async def stop_pairing(manager: Any) -> None:
    """End all calls of a tokenizer manager to prefill servers, if it has any."""
    pairing: Pairing | None = vars(manager).get("offline_pairing")
    if pairing is not None:
        await pairing.servers.stop()


def pair_message(manager: Any, message: Any) -> None:
    """BEFORE hook on ``TokenizerManager._send_one_request``.

    Here, because SGLang copies a message for each of several answers.
    """
    # SGLang's own requests, such as health checks, and those of a router have a room.
    if not isinstance(message, TokenizedGenerateReqInput):
        return
    if message.bootstrap_room is None and (pairing := pairing_of(manager)) is not None:
        pairing.start()
        pairing.pair(message)


def pair_messages(manager: Any, messages: Sequence[Any]) -> None:
    """BEFORE hook on ``TokenizerManager._send_batch_request``."""
    for message in messages:
        pair_message(manager, message)
