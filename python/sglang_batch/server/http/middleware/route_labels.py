"""Labels of SGLang's HTTP metrics: a route's template, never a path with a client's id.

SGLang labels calls of included routers, and calls that no route takes, with their path.
A series for each id, or for each path that somebody tries, never ends.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request

from ..known_routes import RouteFinder

UNKNOWN = "unknown"

_routes = RouteFinder()


def label_by_template(
    original: Callable[[Request], tuple[str, bool]], request: Request
) -> tuple[str, bool]:
    """AROUND hook on SGLang's choice of the label ``endpoint``.

    Returns:
        The label, and whether a route takes the call.
    """
    route = _routes.route(request.scope)
    if route is None:
        return UNKNOWN, False
    return route.template, original(request)[1]
