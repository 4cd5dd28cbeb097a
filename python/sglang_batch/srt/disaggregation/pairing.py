"""Sends each request of a decode server to a prefill server as well.

SGLang leaves that to a router in front of both. Here the decode server does it, for every
message to its scheduler. :class:`PrefillServers` knows which prefill servers are up, and which
gets a request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from fastapi import HTTPException
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

from ...batch_api.protocol import error_body
from ...fleet.http_fleet import content_of, open_session
from ...fleet.plan_bytes import to_bytes
from ...job import traces
from ...job.retrying_engine import PREFILL_LOST, TRANSIENT
from ...request import RequestOutput
from ...scheduling.job_plan import JobPlan
from . import prefill_calls as calls
from .prefill_calls import JobCall, PrefillCall

logger = logging.getLogger(__name__)

# Requests after each other share prefixes, so they go to the same server until it has
# this many more than another one.
STICKY = 32
# Seconds between two looks at a server that is down, and at one that is up.
LOOK_S = 0.5
ALIVE_S = calls.SILENCE_S / 6
_ASK = aiohttp.ClientTimeout(total=10)
# A prompt may wait and be computed for any time.
_CALL = aiohttp.ClientTimeout(total=None, sock_connect=10)
# Most bytes of an answer, and characters of a reason.
_MOST_BYTES, _MOST_REASON = 8 << 20, 500
# What aiohttp raises where a server is gone or does not answer.
GONE = (aiohttp.ClientError, TimeoutError, OSError)


class PrefillServer:
    """One prefill server.

    port: of its bootstrap server. None while it is down.
    in_flight: requests that it has.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.host = urlsplit(self.url).hostname or ""
        self.port: int | None = None
        self.in_flight = 0
        self.lost = asyncio.Event()

    @property
    def is_up(self) -> bool:
        return self.port is not None

    def is_gone(self, reason: str) -> None:
        """Send it nothing more until it answers again."""
        if self.is_up:
            logger.warning("The prefill server %s is gone: %s", self.url, reason)
        self.port = None
        self.lost.set()


class PrefillServers:
    """Watches the prefill servers, and gives them requests and the plans of open jobs, all on
    the event loop of :meth:`start`."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.servers = [PrefillServer(url) for url in urls]
        self._headers = calls.authorization()
        # Several decode servers may have jobs of the same name.
        self.name = uuid.uuid4().hex[:12]
        self._jobs: dict[str, JobCall] = {}
        self._priorities: dict[str, int] = {}
        self._current: PrefillServer | None = None
        self._some_up = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._watchers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to watch, in the running event loop. Further calls do nothing."""
        if self._session is None:
            self._session = open_session(self._headers)
            self._watchers = [
                asyncio.ensure_future(self._watch(server)) for server in self.servers
            ]

    async def stop(self) -> None:
        """End all calls."""
        for watcher in self._watchers:
            watcher.cancel()
        if self._session is not None:
            await self._session.close()

    async def wait_for_one(self) -> None:
        """Wait until a server is up."""
        while not any(server.is_up for server in self.servers):
            self._some_up.clear()
            await self._some_up.wait()

    def choose(self) -> PrefillServer | None:
        """The server for the next request. None if all are down."""
        up = [server for server in self.servers if server.is_up]
        if not up:
            return None
        least = min(up, key=lambda server: server.in_flight)
        current, most = self._current, least.in_flight + STICKY
        if current is None or not current.is_up or current.in_flight > most:
            self._current = current = least
        return current

    async def call(self, server: PrefillServer, call: PrefillCall) -> tuple[int, str]:
        """Have a server compute a prompt, and return when its KV has been sent.

        Returns:
            The HTTP status, and the text of an error.

        Raises:
            aiohttp.ClientError, TimeoutError, OSError: the server is gone.
        """
        server.in_flight += 1
        try:
            async with self._post(server, calls.CALL_PATH, call, _CALL) as answer:
                return answer.status, await _text(answer)
        except GONE as error:
            server.is_gone(repr(error))
            raise
        finally:
            server.in_flight -= 1

    # Jobs -----------------------------------------------------------------------------

    async def open_job(self, job_id: str, plan: bytes) -> None:
        """Give all servers a job's plan, and later those that come back."""
        call = JobCall(self.name, calls.OPEN, self.name_of(job_id), plan)
        self._jobs[job_id] = call
        await self._tell_all(call)

    async def set_priority(self, job_id: str, priority: int) -> None:
        self._priorities[job_id] = priority
        await self._tell_all(self._priority_of(job_id))

    def _priority_of(self, job_id: str) -> JobCall:
        priority = self._priorities[job_id]
        name = self.name_of(job_id)
        return JobCall(self.name, calls.PRIORITY, name, priority=priority)

    async def close_job(self, job_id: str) -> None:
        self._priorities.pop(job_id, None)
        if self._jobs.pop(job_id, None) is not None:
            call = JobCall(self.name, calls.CLOSE, self.name_of(job_id))
            await self._tell_all(call)

    def name_of(self, rid: str) -> str:
        """The id of a job or request on the prefill servers."""
        return f"{self.name}.{rid}"

    async def _tell_all(self, call: JobCall) -> None:
        up = [server for server in self.servers if server.is_up]
        await asyncio.gather(*(self._tell(server, call) for server in up))

    async def _tell(self, server: PrefillServer, call: JobCall) -> bool:
        """Whether a server took it. Without a plan it takes requests as they come."""
        try:
            async with self._post(server, calls.JOBS_PATH, call, _ASK) as answer:
                if answer.status == 200:
                    return True
                logger.warning("%s refused a plan: %s", server.url, await _text(answer))
        except GONE as error:
            server.is_gone(repr(error))
        return False

    def _post(
        self,
        server: PrefillServer,
        path: str,
        call: PrefillCall | JobCall,
        timeout: aiohttp.ClientTimeout,
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        assert self._session is not None
        return self._session.post(
            server.url + path,
            data=msgspec.msgpack.encode(call),
            headers=traces.headers(),
            timeout=timeout,
            allow_redirects=False,
        )

    # Watching -------------------------------------------------------------------------

    async def _watch(self, server: PrefillServer) -> None:
        while True:
            try:
                if server.is_up:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(ALIVE_S):
                            await server.lost.wait()
                    if server.is_up:
                        await self._tell(server, JobCall(self.name, calls.ALIVE))
                elif await self._look(server):
                    logger.info("The prefill server %s is up", server.url)
                else:
                    await asyncio.sleep(LOOK_S)
            except Exception:  # it must be looked at again
                logger.exception("The prefill server %s was not asked", server.url)
                await asyncio.sleep(LOOK_S)

    async def _look(self, server: PrefillServer) -> bool:
        """Whether a server that was down answers now, and knows the jobs."""
        assert self._session is not None
        try:
            async with self._session.get(
                server.url + "/server_info", timeout=_ASK, allow_redirects=False
            ) as answer:
                data = await content_of(answer, _MOST_BYTES)
                if answer.status != 200 or data is None:
                    return False
                info = json.loads(data)
        except (*GONE, ValueError, RecursionError):
            return False
        if not isinstance(info, dict):
            return False
        if info.get("disaggregation_mode") != "prefill":
            logger.error(
                "%s, one of the prefill_servers, runs with --disaggregation-mode %s; "
                "start it with --disaggregation-mode prefill.",
                server.url,
                info.get("disaggregation_mode"),
            )
            await asyncio.sleep(10 * LOOK_S)
            return False
        server.lost.clear()
        for job_id, call in list(self._jobs.items()):
            if not await self._tell(server, call):
                break
            if self._priorities.get(job_id):
                await self._tell(server, self._priority_of(job_id))
        server.port = int(info["disaggregation_bootstrap_port"])
        self._some_up.set()
        return True


async def _text(answer: aiohttp.ClientResponse) -> str:
    data = await content_of(answer, _MOST_BYTES) or b""
    return data[:_MOST_REASON].decode(errors="replace")


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

    async def open_job(self, job_id: str, plans: Sequence[JobPlan]) -> None:
        """Tell the prefill servers a job's plan, unless each of several decode replicas has
        its own: then prompts are computed in the order in which they come."""
        if len(plans) == 1:
            data = await asyncio.to_thread(to_bytes, plans[0])
            await self.servers.open_job(job_id, data)

    async def execute(
        self, rid: str, run: Callable[[], Awaitable[RequestOutput]]
    ) -> RequestOutput:
        """The output of a request once a prefill server is up, or why that one failed it."""
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
        message, code = f"On the prefill server: {reason}", None
        if line.is_lost:
            message = f"The prefill server of this request is gone: {reason}"
            status, code = 503, PREFILL_LOST
        body = error_body(message, status_code=status, code=code)
        return RequestOutput(status, rid, msgspec.json.encode(body))

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
        if (line := self._line_of(message.rid)) is not None:
            line.calls.append(task)

    def _line_of(self, rid: str) -> _Line | None:
        """The line of a message's id: its own, or its beginning."""
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


def pairing_of(manager: Any) -> Pairing | None:
    """The pairing of a tokenizer manager. None if it has no prefill servers."""
    urls = manager.server_args.offline_config.prefill_servers
    if not urls:
        return None
    if not hasattr(manager, "offline_pairing"):
        manager.offline_pairing = Pairing(manager, urls)
    pairing: Pairing = manager.offline_pairing
    return pairing


async def stop_pairing(manager: Any) -> None:
    """End all calls of a tokenizer manager to prefill servers, if it has any."""
    pairing: Pairing | None = vars(manager).get("offline_pairing")
    if pairing is not None:
        await pairing.servers.stop()


def pair_message(manager: Any, message: Any) -> None:
    """BEFORE hook on ``TokenizerManager._send_one_request``, which gets a message for each of
    several answers."""
    if not isinstance(message, TokenizedGenerateReqInput):
        return
    # SGLang's own requests, such as health checks, and those of a router have a room.
    if message.bootstrap_room is None and (pairing := pairing_of(manager)) is not None:
        pairing.servers.start()
        pairing.pair(message)


def pair_messages(manager: Any, messages: Sequence[Any]) -> None:
    """BEFORE hook on ``TokenizerManager._send_batch_request``."""
    for message in messages:
        pair_message(manager, message)
