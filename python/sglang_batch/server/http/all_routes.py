"""All routes of the HTTP API as one router.

Routes are thin: they check parameters, call
:class:`~sglang_batch.server.service.BatchService` and return its objects.
"""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from . import (
    batch_routes,
    file_routes,
    job_routes,
    key_routes,
    message_batch_routes,
    page_routes,
)
from .error_responses import answer_unknown
from .middleware import AnswerHeaders, BodyPace, CrossOrigin, KnownMethods

ROUTERS = (
    file_routes.router,
    file_routes.upload_router,
    batch_routes.router,
    message_batch_routes.router,
    job_routes.router,
    page_routes.router,
    key_routes.router,
    job_routes.worker_router,
)


def make_router() -> APIRouter:
    router = APIRouter()
    for each in ROUTERS:
        router.include_router(each)
    _answer_head(router)
    return router


def install(app: FastAPI) -> None:
    """Add our routes and layers. The service is ``app.state.offline_batch_service``."""
    app.include_router(make_router())
    app.add_exception_handler(HTTPException, answer_unknown)
    for layer in (BodyPace, CrossOrigin, AnswerHeaders):  # the last one is outermost
        app.add_middleware(layer, is_ours=is_ours)
    app.add_middleware(KnownMethods)


def is_ours(path: str) -> bool:
    """Whether a path is that of one of our routes, or below one."""
    return any(path == each or path.startswith(f"{each}/") for each in _PREFIXES)


def _routes() -> Iterator[APIRoute]:
    for each in ROUTERS:
        for route in each.routes:
            if isinstance(route, APIRoute):
                yield route


def _answer_head(router: APIRouter) -> None:
    """Let HEAD work where GET does."""
    for route in _routes():
        if "GET" in (route.methods or ()):
            router.add_api_route(
                route.path,
                route.endpoint,
                methods=["HEAD"],
                include_in_schema=False,
                route_class_override=type(route),
            )


# /v1/files of /v1/files/{file_id}/content
_PREFIXES = {route.path.partition("/{")[0] for route in _routes()} | {page_routes.PATH}
