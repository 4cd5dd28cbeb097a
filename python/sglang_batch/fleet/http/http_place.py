"""A place for a worker at a URL: an offline server that somebody else keeps running."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import msgspec

from ...engine import WORKER_PATH
from ...errors import ConfigError
from .. import messages
from ..messages import (
    About,
    EngineQuery,
    Exchange,
    RenderCall,
    Rendering,
    Reply,
    Session,
    SessionRefused,
)
from ..places import WorkerLost

CONNECT_S = 5.0


class HttpPlace:
    """An offline server.

    Args:
        url: of the server, such as ``http://10.0.0.2:30000``.
        api_key: its admin's key, None for a server without keys.

    Raises:
        ConfigError: the URL is not valid.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.name = url.rstrip("/")
        if not self.name.startswith(("http://", "https://")):
            raise ConfigError(
                f"{url} is not the URL of a server; use one such as http://10.0.0.2:30000."
            )
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client: aiohttp.ClientSession | None = None

    async def find(self) -> HttpPort:
        if self._client is None:
            self._client = aiohttp.ClientSession(
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                connector=aiohttp.TCPConnector(limit=0),
            )
        return HttpPort(self.name, self._client)

    async def free(self) -> None:
        """Close the connections. Somebody else has started the server, and ends it."""
        if self._client is not None:
            await self._client.close()
            self._client = None


class HttpPort:
    """Calls an offline server."""

    # What one server has pickled is not sent to another.
    trusted = False

    def __init__(self, url: str, client: aiohttp.ClientSession) -> None:
        self._url = url
        self._client = client
        self._answered = False

    async def attach(self, session: Session) -> About | SessionRefused:
        found: About | SessionRefused = messages.decode_about(
            await self._ask("attach", session)
        )
        self._answered = True
        return found

    async def exchange(self, call: Exchange) -> Reply | SessionRefused:
        data = await self._ask("exchange", call)
        reply: Reply | SessionRefused = messages.decode_reply(data)
        return reply

    async def render(self, call: RenderCall) -> list[Rendering]:
        data = await self._ask("render", call)
        found: list[Rendering] = messages.decode_renderings(data)
        return found

    async def query(self, query: EngineQuery) -> object:
        return msgspec.msgpack.decode(await self._ask("query", query))

    async def _ask(self, route: str, message: object) -> bytes:
        url = f"{self._url}{WORKER_PATH}/{route}"
        try:
            async with self._client.post(url, data=messages.encode(message)) as answer:
                data = await answer.read()
        except aiohttp.ClientConnectorError as error:
            if self._answered and isinstance(error.os_error, ConnectionRefusedError):
                raise WorkerLost("its server is gone", crashed=True) from None
            raise OSError(str(error)) from None
        except (TimeoutError, aiohttp.ClientError) as error:
            raise OSError(f"{type(error).__name__}: {error}") from None
        if answer.status == 200:
            return data
        reason = _reason(data) or answer.reason
        if answer.status >= 500 or answer.status == 429:
            raise OSError(f"status {answer.status}: {reason}")
        raise ConfigError(
            f"{self._url} refuses to be a worker (status {answer.status}: {reason}). It "
            "must be `sglang-batch serve` of the same version; if it has keys, pass its "
            "admin's with --workers-key."
        )


def _reason(data: bytes) -> str:
    """The message of an error's body, if it has one."""
    try:
        body: Any = json.loads(data)
        error = body.get("error") if isinstance(body, dict) else None
        message = error.get("message") if isinstance(error, dict) else error
        return str(message or "")
    except ValueError:
        return ""
