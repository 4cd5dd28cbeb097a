"""HTTP calls that connect to nothing but an address that was checked.

A name is looked up once for each connection, so a host cannot have a public address first
and a private one later. Redirects are the caller's. Proxies are not used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpcore
import httpx

from .media_places import PORTS, Place

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.ip_network("64:ff9b::/96")


@dataclass(eq=False)
class PinnedBackend(httpcore.AsyncNetworkBackend):
    """Connects to addresses that ``may_connect`` takes.

    ``refusal`` is the ValueError of a host without one. ``lookups`` looks names up.
    """

    may_connect: Callable[[Address], bool]
    refusal: str
    lookups: Executor | None = None

    def __post_init__(self) -> None:
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self, host: str, port: int, *args: Any, **kwargs: Any
    ) -> httpcore.AsyncNetworkStream:
        found = await asyncio.get_running_loop().run_in_executor(
            self.lookups,
            lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM),
        )
        addresses = [ipaddress.ip_address(str(each[4][0])) for each in found]
        good = [address for address in addresses if self.may_connect(address)]
        if not good:
            raise ValueError(self.refusal)
        failure: Exception | None = None
        for address in dict.fromkeys(good):
            try:
                return await self._backend.connect_tcp(
                    str(address), port, *args, **kwargs
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure or OSError()


@asynccontextmanager
async def pinned_call(
    method: str,
    place: Place,
    backend: PinnedBackend,
    headers: Mapping[str, str],
    content: bytes | None = None,
) -> AsyncIterator[httpcore.Response]:
    """The answer to a call of an ``http`` or ``https`` place, whose body is not read yet."""
    host = f"[{place.host}]" if ":" in place.host else place.host
    shown = host if place.port == PORTS[place.scheme] else f"{host}:{place.port}"
    url = httpcore.URL(
        scheme=place.scheme, host=place.host, port=place.port, target=place.target
    )
    own = {"Host": shown, "User-Agent": "sglang-batch", "Connection": "close"}
    sent: list[tuple[bytes | str, bytes | str]] = [*own.items(), *headers.items()]
    async with (
        httpcore.AsyncConnectionPool(
            ssl_context=_certificates() if place.scheme == "https" else None,
            network_backend=backend,
        ) as pool,
        pool.stream(method, url, headers=sent, content=content) as answer,
    ):
        yield answer


def is_public(address: Address) -> bool:
    """Whether an address is global: not private, loopback, link-local or reserved."""
    inner = inner_address(address)
    return inner.is_global and not (
        inner.is_multicast
        or inner.is_reserved
        or (isinstance(inner, ipaddress.IPv6Address) and inner.is_site_local)
    )


def inner_address(address: Address) -> Address:
    """The IPv4 address that an IPv6 address leads to, or the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return (
        address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else address)
    )


@cache
def _certificates() -> Any:
    return httpx.create_ssl_context()
