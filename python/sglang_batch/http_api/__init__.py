"""The server's HTTP API beside SGLang's own.

Thin: parameters in, :class:`~sglang_batch.service.BatchService`, objects out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.routing import APIRoute

from . import batches, files, message_batches, page, uploads, waves

ROUTERS = (
    files.router,
    uploads.router,
    batches.router,
    message_batches.router,
    waves.router,
    page.router,
)


METHODS = {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}


def make_router() -> APIRouter:
    """All our routes."""
    router = APIRouter()
    for each in ROUTERS:
        router.include_router(each)
    _refuse_other_methods(router)
    return router


def _refuse_other_methods(router: APIRouter) -> None:
    """So that these errors have the body of our other ones, too."""
    methods: dict[str, set[str]] = defaultdict(set)
    kinds: dict[str, type[APIRoute]] = {}
    for route in (route for each in ROUTERS for route in each.routes):
        if isinstance(route, APIRoute):
            methods[route.path] |= route.methods or set()
            kinds[route.path] = type(route)
    for path, allowed in methods.items():
        router.add_api_route(
            path,
            _not_allowed(allowed),
            methods=sorted(METHODS - allowed),
            include_in_schema=False,
            route_class_override=kinds[path],
        )


def _not_allowed(allowed: set[str]) -> Callable[[Request], Response]:
    def refuse(request: Request) -> Response:
        raise HTTPException(
            405,
            f"Method {request.method} is not allowed for {request.url.path}. "
            f"Use {' or '.join(sorted(allowed))}.",
            headers={"Allow": ", ".join(sorted(allowed))},
        )

    return refuse
