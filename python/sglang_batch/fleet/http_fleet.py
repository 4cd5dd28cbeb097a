"""A fleet of offline servers at URLs, for clusters without Ray such as Kubernetes.

Somebody else keeps the servers running. Each is a place for one worker.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import aiohttp

from ..errors import ConfigError
from ..job.engine import WORKER_PATH
from ..request import authorization
from .head_state import HeadState
from .places import WorkerLost, WorkerPort, WorkerUnusable

if TYPE_CHECKING:
    from .fleet_engine import FleetEngine

CONNECT_S = 5.0
# Most bytes of the answer to each call.
_MOST_BYTES = {
    "attach": 32 << 20,
    "exchange": 512 << 20,
    "render": 512 << 20,
    "query": 32 << 20,
}


class HttpPlace:
    """An offline server.

    Args:
        url: of the server, such as ``http://10.0.0.2:30000``.
        api_key: its admin's key, None for a server without keys.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.name = url.rstrip("/")
        self._headers = authorization(api_key)
        self._client: aiohttp.ClientSession | None = None

    async def find(self) -> HttpPort:
        if self._client is None:
            self._client = open_session(self._headers)
        return HttpPort(self.name, self._client)

    async def free(self) -> None:
        """Close the connections. Somebody else has started the server, and ends it."""
        if self._client is not None:
            await self._client.close()
            self._client = None


def open_session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """Connections to servers of ours: any number, for calls of any length."""
    return aiohttp.ClientSession(
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        connector=aiohttp.TCPConnector(limit=0),
        auto_decompress=False,  # none is asked for, and bytes could expand
    )


class HttpPort(WorkerPort):
    """Calls an offline server. What one server has pickled is not sent to another."""

    def __init__(self, url: str, client: aiohttp.ClientSession) -> None:
        self._url = url
        self._client = client
        self._answered = False

    async def ask(self, name: str, data: bytes) -> bytes:
        most = _MOST_BYTES[name]
        try:
            # A server that sends its head elsewhere would have it call any address.
            async with self._client.post(
                f"{self._url}{WORKER_PATH}/{name}", data=data, allow_redirects=False
            ) as answer:
                found = await content_of(answer, most)
        except aiohttp.ClientConnectorError as error:
            if self._answered and isinstance(error.os_error, ConnectionRefusedError):
                raise WorkerLost("its server is gone", crashed=True) from None
            raise OSError(str(error)) from None
        except (TimeoutError, aiohttp.ClientError) as error:
            raise OSError(f"{type(error).__name__}: {error}") from None
        if found is None:
            raise WorkerUnusable(
                f"its answer to {name} has more than {most} bytes; it is no worker"
            )
        if answer.status == 200:
            self._answered = True
            return found
        reason = _reason(found) or answer.reason
        if answer.status >= 500 or answer.status == 429:
            raise OSError(f"status {answer.status}: {reason}")
        raise WorkerUnusable(
            f"it refuses to be a worker (status {answer.status}: {reason}). It must be "
            "`sglang-batch serve` of the same version; if it has keys, pass its admin's "
            "with --workers-key"
        )


async def content_of(answer: aiohttp.ClientResponse, most: int) -> bytes | None:
    """The body of an answer, None if it has more bytes than this."""
    pieces, size = [], 0
    async for piece in answer.content.iter_any():
        size += len(piece)
        if size > most:
            return None
        pieces.append(piece)
    return b"".join(pieces)


def _reason(data: bytes) -> str:
    """The beginning of the message of an error's body, if it has one."""
    try:
        body: Any = json.loads(data)
        error = body.get("error") if isinstance(body, dict) else None
        message = error.get("message") if isinstance(error, dict) else error
        return str(message or "")[:500]
    except (ValueError, RecursionError):
        return ""


# Most bytes of a list of models.
_MOST_MODELS = 1 << 20


class NoAnswer(ConfigError):
    """A server that cannot be reached, or is starting."""


def served_model(
    urls: Sequence[str], api_key: str | None, *, may_be_away: bool = False
) -> str:
    """The name of the model that all of these servers serve. Raises ConfigError if one does
    not answer, refuses the key, or serves another model.

    may_be_away: whether one answer is enough, since the others may come later.
    """
    first, name = "", ""
    for url in urls:
        try:
            found = _model_at(url.rstrip("/"), api_key)
        except NoAnswer:
            if may_be_away and (first or url != urls[-1]):
                continue
            raise
        if name and found != name:
            raise ConfigError(
                f"{first} serves {name} and {url} serves {found}; all workers of a "
                "job need the same model."
            )
        first, name = first or url, found
    return name


def _model_at(url: str, api_key: str | None) -> str:
    headers = authorization(api_key)
    try:
        request = urllib.request.Request(f"{url}/v1/models", headers=headers)
        with urllib.request.urlopen(request, timeout=CONNECT_S) as answer:
            data = answer.read(_MOST_MODELS + 1)
            if len(data) > _MOST_MODELS:
                raise ValueError(f"more than {_MOST_MODELS} bytes of models")
            return str(json.loads(data)["data"][0]["id"])
    except urllib.error.HTTPError as error:
        hint = "; pass its admin's key with --workers-key" if error.code == 401 else ""
        raise (NoAnswer if error.code >= 500 else ConfigError)(
            f"{url} refuses to name its model (status {error.code}){hint}."
        ) from None
    except (
        *(OSError, ValueError, LookupError, TypeError, RecursionError),
        http.client.HTTPException,
    ) as error:
        raise NoAnswer(
            f"{url} does not answer as a server of SGLang ({error}); start it with "
            "`sglang-batch serve`, and give its URL such as http://10.0.0.2:30000."
        ) from None


def http_engine(
    urls: Sequence[str], api_key: str | None, head: HeadState
) -> AbstractContextManager[tuple[FleetEngine, asyncio.AbstractEventLoop]]:
    """The engines of the servers at these URLs, and the event loop for calls to them."""
    from .fleet_engine import FleetEngine, on_loop  # takes half a second to import

    places = [HttpPlace(url, api_key) for url in urls]
    return on_loop(FleetEngine(places, head.epoch, crashes=head.crashes))
