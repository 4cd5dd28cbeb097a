"""The routes of an application, and the one that takes a call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from re import Pattern
from typing import Any

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from starlette._utils import get_route_path
from starlette.routing import WebSocketRoute
from starlette.types import Scope


@dataclass(frozen=True, slots=True)
class KnownRoute:
    """One route of an application.

    methods: empty for a mounted application, which takes all of them.
    endpoint: its function.
    """

    template: str
    path_regex: Pattern[str]
    methods: frozenset[str]
    is_websocket: bool
    endpoint: object


def known_routes(app: FastAPI) -> list[KnownRoute]:
    """The routes of an application in the order in which it matches them."""
    found = []
    for route in iter_route_contexts(app.router.routes):
        template: Any = route.path
        path_regex: Any = getattr(route, "path_regex", None)
        if template is None or path_regex is None:
            continue
        found.append(
            KnownRoute(
                template,
                path_regex,
                frozenset(route.methods or ()),
                isinstance(route.original_route, WebSocketRoute),
                route.endpoint,
            )
        )
    return found


class RouteFinder:
    """Finds the route of a call as the application's router does."""

    def __init__(self) -> None:
        self._app: FastAPI | None = None
        self._num_known = -1
        self._routes: list[KnownRoute] = []

    def route(self, scope: Scope) -> KnownRoute | None:
        """The route that answers a call, or None if there is none.

        A call with a method that no route takes finds the first route with its path,
        which answers 405.
        """
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
