"""The server's own URL, for links in an answer."""

from __future__ import annotations

import re
from ipaddress import ip_address, ip_network

from fastapi import Request

from ...media_places import parse_place
from .middleware.calls import header_of
from .parameters import service_of

# A name, an IPv4 or an IPv6 address, and a port.
_HOST = re.compile(
    r"(?=.{1,255}$)([A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?\.?|\[[0-9A-Fa-f:.]{2,45}\])"
    r"(:[0-9]{1,5})?"
)


def base_url(request: Request) -> str:
    """How the links of an answer begin, without a slash at the end.

    ``public_url``, or else the host that this call itself named: its answer goes to nobody
    else. Forwarded headers count only from ``trusted_proxies``. Empty if the call names no
    valid host, which makes the links paths.
    """
    config = service_of(request).config
    if config.public_url:
        return config.public_url.rstrip("/")
    scope = request.scope
    host, scheme = header_of(scope, b"host"), str(scope.get("scheme", "http"))
    if _is_trusted(request, config.trusted_proxies):
        host = _first(header_of(scope, b"x-forwarded-host")) or host
        scheme = _first(header_of(scope, b"x-forwarded-proto")).lower() or scheme
    if scheme not in ("http", "https") or not _is_host(host):
        return ""
    return f"{scheme}://{host}{scope.get('root_path', '').rstrip('/')}"


def _is_trusted(request: Request, proxies: tuple[str, ...]) -> bool:
    if request.client is None:
        return False
    try:
        address = ip_address(request.client.host)
    except ValueError:  # a socket of this machine
        return False
    return any(address in ip_network(each) for each in proxies)


def _first(value: str | None) -> str:
    """The first of the values of a header: that of the proxy nearest to the client."""
    return (value or "").partition(",")[0].strip()


def _is_host(host: str | None) -> bool:
    """Whether clients can call it: they refuse odd addresses and ports."""
    if host is None or _HOST.fullmatch(host) is None:
        return False
    try:
        parse_place(f"http://{host}")
    except ValueError:
        return False
    return True
