"""Refuses calls that their key does not open."""

from __future__ import annotations

import logging
import sqlite3

from starlette.types import ASGIApp, Receive, Scope, Send

from ....errors import ApiError
from ...access.access_control import AccessControl, current_caller
from ...access.keys import Caller, Role
from ..error_responses import error_at
from ..known_routes import KnownRoute, RouteFinder
from ..middleware.calls import config_of, path_of
from .callers import CALLER, no_admin
from .model_check import with_checked_model
from .route_roles import GENERATING, METRICS, role_of

logger = logging.getLogger(__name__)


class KeyMiddleware:
    """Finds out who calls, and refuses calls that this caller may not make.

    The keys are in ``app.state.offline_batch_access``, which is set once the app has
    started. Until then every call is refused. :func:`.callers.caller_of` returns the
    caller that was found.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._routes = RouteFinder()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        route = self._routes.route(scope)
        if _is_preflight(scope, route) or (
            route is not None and _is_open(scope, route)
        ):
            await self.app(scope, receive, send)
            return
        try:
            caller = self._admitted(scope, route)
            if caller.allowance.models is not None and route is not None:
                receive = await with_checked_model(
                    receive,
                    route.template,
                    caller.allowance.models,
                    scope["app"].state.offline_batch_service.model_names or (),
                )
        except ApiError as error:
            await _refuse(error, scope, receive, send)
            return
        if caller.role < Role.ADMIN:
            _drop_overrides(scope)
        scope.setdefault("state", {})[CALLER] = caller
        current_caller.set(caller)
        await self.app(scope, receive, send)

    def _admitted(self, scope: Scope, route: KnownRoute | None) -> Caller:
        """The caller, if the call is allowed.

        Raises:
            ApiError: it is not.
        """
        access: AccessControl | None = getattr(
            scope["app"].state, "offline_batch_access", None
        )
        if access is None:
            raise ApiError(503, "The server is starting.", retry=True)
        given = _keys_of(scope)
        try:
            caller = access.caller(given)
        except sqlite3.Error as error:
            logger.error("The keys cannot be read: %s", error)
            raise ApiError(503, "The server cannot read its keys.") from None
        if caller is None:
            raise _unknown_key(len(set(given)))
        # An unknown path is answered by the application, to callers with any key.
        need = Role.CLIENT if route is None else role_of(route)
        if caller.role < need:
            raise _not_allowed(scope, access)
        if route is not None and route.template in GENERATING:
            access.check_tokens(caller)
        return caller


def _is_preflight(scope: Scope, route: KnownRoute | None) -> bool:
    """Whether a call is a browser's preflight, which carries no key and runs no route.

    A mounted application has no list of methods and may answer any of them.
    """
    if scope.get("method") != "OPTIONS":
        return False
    names = {name for name, _ in scope["headers"]}
    if not names >= {b"origin", b"access-control-request-method"}:
        return False
    return route is None or (bool(route.methods) and "OPTIONS" not in route.methods)


def _drop_overrides(scope: Scope) -> None:
    """Drop the headers with which SGLang's routers choose a request's id or worker."""
    scope["headers"] = [
        pair
        for pair in scope["headers"]
        if not pair[0].lower().startswith(b"x-override-")
    ]


def _is_open(scope: Scope, route: KnownRoute) -> bool:
    """Whether a route takes calls without a key."""
    if route.template == METRICS:
        return config_of(scope).open_metrics
    return role_of(route) is Role.NOBODY


def _keys_of(scope: Scope) -> list[bytes]:
    """Every key that a call carries."""
    keys = []
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            keys.append(value.strip())
        elif name == b"authorization":
            kind, _, key = value.partition(b" ")
            if kind.lower() == b"bearer":
                keys.append(key.strip())
    return keys


def _unknown_key(num_given: int) -> ApiError:
    if num_given > 1:
        message = "The call carries different API keys; send one."
    elif num_given:
        message = "Incorrect API key provided: this server does not know it."
    else:
        message = (
            "No API key of this server was given; send one as 'Authorization: Bearer "
            "KEY'."
        )
    return ApiError(401, message, code="invalid_api_key", retry=False)


def _not_allowed(scope: Scope, access: AccessControl) -> ApiError:
    message = no_admin()
    if access.has_admin:
        message = (
            f"{scope.get('method', 'WEBSOCKET')} {scope['path']!r:.200} is closed to "
            "this API key, which opens the OpenAI, Anthropic and batch routes. Use the "
            "key of an admin."
        )
    return ApiError(403, message, code="insufficient_permissions", retry=False)


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()  # the client's connect message
        await send({"type": "websocket.close", "code": 1008})
        return
    await error_at(path_of(scope), error)(scope, receive, send)
