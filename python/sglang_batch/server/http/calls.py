"""A call as the server's layers see it: its route, path, headers and label in metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from re import Pattern

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from starlette._utils import get_route_path
from starlette.requests import Request
from starlette.routing import WebSocketRoute
from starlette.types import Scope

from ...config import OfflineBatchConfig


@dataclass(frozen=True, slots=True)
class KnownRoute:
    """One route of an application. A mounted application has no methods: it takes all."""

    template: str
    path_regex: Pattern[str]
    methods: frozenset[str]
    is_websocket: bool
    endpoint: object


def known_routes(app: FastAPI) -> list[KnownRoute]:
    return [
        KnownRoute(
            str(route.path),
            path_regex,
            frozenset(route.methods or ()),
            isinstance(route.original_route, WebSocketRoute),
            route.endpoint,
        )
        for route in iter_route_contexts(app.router.routes)
        if route.path is not None and (path_regex := getattr(route, "path_regex", None))
    ]


class RouteFinder:
    """Finds the route of a call as the application's router does."""

    def __init__(self) -> None:
        self._app: FastAPI | None = None
        self._num_known = -1
        self._routes: list[KnownRoute] = []

    def route(self, scope: Scope) -> KnownRoute | None:
        """The route that answers a call, if any. One with the path alone answers 405."""
        other_method = None
        for route in self._at_path(scope):
            if (
                route.is_websocket
                or not route.methods
                or scope["method"] in route.methods
            ):
                return route
            other_method = other_method or route
        return other_method

    def methods(self, scope: Scope) -> set[str]:
        """The methods of the routes at a call's path."""
        return {method for route in self._at_path(scope) for method in route.methods}

    def _at_path(self, scope: Scope) -> Iterator[KnownRoute]:
        app: FastAPI = scope["app"]
        if app is not self._app or len(app.router.routes) != self._num_known:
            self._app, self._routes = app, known_routes(app)
            self._num_known = len(app.router.routes)
        path = get_route_path(scope)
        is_websocket = scope["type"] == "websocket"
        for route in self._routes:
            if route.is_websocket == is_websocket and route.path_regex.match(path):
                yield route


def path_of(scope: Scope) -> str:
    """The path of a call below the server's root path."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def without_header(scope: Scope, name: bytes) -> Scope:
    """The scope of the same call without the headers of this lowercase name."""
    kept = [each for each in scope["headers"] if each[0].lower() != name]
    return {**scope, "headers": kept}


def config_of(scope: Scope) -> OfflineBatchConfig:
    config: OfflineBatchConfig = scope["app"].state.offline_batch_service.config
    return config


UNKNOWN = "unknown"

_routes = RouteFinder()


def label_by_template(
    original: Callable[[Request], tuple[str, bool]], request: Request
) -> tuple[str, bool]:
    """AROUND hook on SGLang's choice of the label ``endpoint``.

    SGLang labels calls of included routers, and calls that no route takes, with
    their path: a series for each id, or for each path that somebody tries, never
    ends. Returns the label, and whether a route takes the call.
    """
    route = _routes.route(request.scope)
    if route is None:
        return UNKNOWN, False
    return route.template, original(request)[1]
