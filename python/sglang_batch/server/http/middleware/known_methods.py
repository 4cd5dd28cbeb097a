"""One name for all HTTP methods that no route has, on the whole server."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"}
OTHER = "OTHER"


class KnownMethods:
    """Renames them: SGLang's metrics would have a series for each made-up method."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in METHODS:
            scope = {**scope, "method": OTHER}
        await self._app(scope, receive, send)
