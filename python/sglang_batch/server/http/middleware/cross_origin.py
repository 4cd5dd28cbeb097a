"""Calls of web pages. Only pages of this server and of configured origins may call us.

SGLang lets pages of every origin read its answers. Without a key, any page that is open
in a browser near the server could read all files and start batches.
"""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ....errors import ApiError
from ..error_responses import error_at
from .calls import IsOurs, config_of, header_of, path_of, without_header

_METHODS = ("GET", "HEAD", "POST", "DELETE")
_READABLE = (
    "Content-Disposition",
    "Idempotency-Replayed",
    "Request-Id",
    "Retry-After",
    "X-Incomplete",
    "X-Last-Line",
    "X-Line-Order",
    "X-Request-Id",
)


class CrossOrigin:
    """Answers or refuses the calls to our routes that name an ``Origin``."""

    def __init__(self, app: ASGIApp, is_ours: IsOurs) -> None:
        self._app = app
        self._is_ours = is_ours
        self._cors: dict[tuple[str, ...], CORSMiddleware] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = None
        if scope["type"] == "http" and self._is_ours(path_of(scope)):
            origin = header_of(scope, b"origin")
        if origin is None:
            await self._app(scope, receive, send)
            return
        config = config_of(scope)
        allowed = config.allowed_origins
        if origin in allowed or "*" in allowed:
            await self._cors_of(allowed)(scope, receive, send)
        elif _is_same_origin(scope, origin, config.public_url):
            await self._without_origin(scope, receive, send)
        else:
            await error_at(path_of(scope), _refusal(origin))(scope, receive, send)

    def _cors_of(self, allowed: tuple[str, ...]) -> CORSMiddleware:
        if allowed not in self._cors:
            self._cors[allowed] = CORSMiddleware(
                self._without_origin,
                allow_origins=allowed,
                allow_methods=_METHODS,
                allow_headers=("*",),
                expose_headers=_READABLE,
            )
        return self._cors[allowed]

    async def _without_origin(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app in a way that adds no headers of SGLang's for the origin."""
        await self._app(without_header(scope, b"origin"), receive, send)


def _is_same_origin(scope: Scope, origin: str, public_url: str | None) -> bool:
    """Whether the page that calls was itself loaded from this server."""
    # Set by the browser, and no page can change it.
    if header_of(scope, b"sec-fetch-site") in ("same-origin", "none"):
        return True
    if public_url is not None and origin == "/".join(public_url.split("/")[:3]):
        return True
    host = header_of(scope, b"host")
    return bool(host) and origin.lower() in (f"http://{host}", f"https://{host}")


def _refusal(origin: str) -> ApiError:
    return ApiError(
        403,
        f"Pages of {origin!r:.200} may not call this server. Its operator can add the "
        "origin to allowed_origins in --offline-batch-config, or set public_url if this "
        "is the server's own address behind a proxy.",
        code="origin_not_allowed",
        retry=False,
    )
