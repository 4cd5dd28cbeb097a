"""The prefill servers of a decode server: which are up, and which gets a request."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import aiohttp
import msgspec

from ...fleet.http.http_place import content_of
from .prefill_calls import (
    ALIVE,
    CALL_PATH,
    CLOSE,
    JOBS_PATH,
    OPEN,
    PRIORITY,
    SILENCE_S,
    JobCall,
    PrefillCall,
    authorization,
)

logger = logging.getLogger(__name__)

# Requests after each other share prefixes, so they go to the same server until it has
# this many more than another one.
STICKY = 32
# Seconds between two looks at a server that is down, and at one that is up.
LOOK_S = 0.5
ALIVE_S = SILENCE_S / 6
_ASK = aiohttp.ClientTimeout(total=10)
# A prompt may wait and be computed for any time.
_CALL = aiohttp.ClientTimeout(total=None, sock_connect=10)
# Most bytes of an answer, and characters of a reason.
_MOST_BYTES, _MOST_REASON = 8 << 20, 500
# What aiohttp raises where a server is gone or does not answer.
GONE = (aiohttp.ClientError, TimeoutError, OSError)


class PrefillServer:
    """One prefill server.

    Attributes:
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
    """Watches the prefill servers, and gives them requests and the plans of open jobs.

    All calls must come from one event loop, that of :meth:`start`.

    Args:
        key: sent with every call, if the servers need one. None takes it from
            ``SGLANG_BATCH_API_KEY``.
    """

    def __init__(self, urls: Sequence[str], key: str | None = None) -> None:
        self.servers = [PrefillServer(url) for url in urls]
        self._headers = authorization(key)
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
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                headers=self._headers,
                auto_decompress=False,  # none is asked for, and bytes could expand
            )
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
        current = self._current
        if (
            current is None
            or not current.is_up
            or current.in_flight > least.in_flight + STICKY
        ):
            self._current = current = least
        return current

    async def call(self, server: PrefillServer, call: PrefillCall) -> tuple[int, str]:
        """Have a server compute a prompt, and return when its KV has been sent.

        Returns:
            The HTTP status, and the text of an error.

        Raises:
            aiohttp.ClientError, TimeoutError, OSError: the server is gone.
        """
        assert self._session is not None
        server.in_flight += 1
        try:
            async with self._session.post(
                server.url + CALL_PATH,
                data=msgspec.msgpack.encode(call),
                timeout=_CALL,
                allow_redirects=False,
            ) as answer:
                return answer.status, await _text(answer)
        except GONE as error:
            server.is_gone(repr(error))
            raise
        finally:
            server.in_flight -= 1

    # Jobs -----------------------------------------------------------------------------

    async def open_job(self, job_id: str, plan: bytes) -> None:
        """Give all servers a job's plan, and later those that come back."""
        call = JobCall(self.name, OPEN, self.name_of(job_id), plan)
        self._jobs[job_id] = call
        await self._tell_all(call)

    async def set_priority(self, job_id: str, priority: int) -> None:
        self._priorities[job_id] = priority
        call = JobCall(self.name, PRIORITY, self.name_of(job_id), priority=priority)
        await self._tell_all(call)

    async def close_job(self, job_id: str) -> None:
        self._priorities.pop(job_id, None)
        if self._jobs.pop(job_id, None) is not None:
            await self._tell_all(JobCall(self.name, CLOSE, self.name_of(job_id)))

    def name_of(self, rid: str) -> str:
        """The id of a job or request on the prefill servers."""
        return f"{self.name}.{rid}"

    async def _tell_all(self, call: JobCall) -> None:
        up = [server for server in self.servers if server.is_up]
        await asyncio.gather(*(self._tell(server, call) for server in up))

    async def _tell(self, server: PrefillServer, call: JobCall) -> bool:
        """Whether a server took it. Without a plan it takes requests as they come."""
        assert self._session is not None
        try:
            async with self._session.post(
                server.url + JOBS_PATH,
                data=msgspec.msgpack.encode(call),
                timeout=_ASK,
                allow_redirects=False,
            ) as answer:
                if answer.status == 200:
                    return True
                logger.warning("%s refused a plan: %s", server.url, await _text(answer))
        except GONE as error:
            server.is_gone(repr(error))
        return False

    # Watching -------------------------------------------------------------------------

    async def _watch(self, server: PrefillServer) -> None:
        while True:
            try:
                if server.is_up:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(ALIVE_S):
                            await server.lost.wait()
                    if server.is_up:
                        await self._tell(server, JobCall(self.name, ALIVE))
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
                if answer.status != 200:
                    return False
                info = json.loads(await _content(answer))
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
            priority = self._priorities.get(job_id, 0)
            if priority:
                told = JobCall(self.name, PRIORITY, call.job_id, priority=priority)
                await self._tell(server, told)
        server.port = int(info["disaggregation_bootstrap_port"])
        self._some_up.set()
        return True


async def _content(answer: aiohttp.ClientResponse) -> bytes:
    """The body of an answer.

    Raises:
        ValueError: it is too large for a prefill server's.
    """
    data = await content_of(answer, _MOST_BYTES)
    if data is None:
        raise ValueError(f"an answer of more than {_MOST_BYTES} bytes")
    return data


async def _text(answer: aiohttp.ClientResponse) -> str:
    """The beginning of the body of an answer, as text."""
    data = await content_of(answer, _MOST_BYTES) or b""
    return data[:_MOST_REASON].decode(errors="replace")
