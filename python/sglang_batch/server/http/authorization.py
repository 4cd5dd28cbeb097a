"""Who sends a call, and whether its key opens the route and the model.

Clients' routes are listed by their template. Everything else, and so every route that a
later SGLang adds, is closed to clients.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ...batch_api.protocol import ENDPOINTS, TRANSCRIPTIONS_URL
from ...errors import ApiError
from ...job.engine import GENERATE_URL, WAVE_PATH, WORKER_PATH
from ...rollout.rollout_call import ROLLOUTS_PATH
from ...store.batch_store import BatchStore, Row
from ...store.database import DATABASE
from ..access import keys
from ..access.keys import (
    ANYBODY,
    SGLANG_ADMIN,
    Caller,
    FixedKeys,
    ModelRules,
    Role,
    digest,
)
from ..access.usage import add_usage, check_limits, used_today
from ..background import Repeated, in_thread
from .calls import KnownRoute, RouteFinder, config_of, error_at, with_whole_body
from .flex import FlexCalls

CALLER = "offline_batch_caller"


def caller_of(request: Request) -> Caller:
    """Who makes a call. On a server without keys, anybody."""
    caller: Caller = getattr(request.state, CALLER, ANYBODY)
    return caller


def access_of(request: Request) -> AccessControl:
    access: AccessControl = request.app.state.offline_batch_access
    return access


def owner_field(request: Request, row: dict[str, Any]) -> dict[str, str]:
    """The field that tells an admin whose object it sees. Others see none."""
    return {"owner": row["owner"]} if caller_of(request).sees_all else {}


def check_admin_key(request: Request) -> Caller:
    """Check that a call has an admin's key, or raise 403. Open servers lack one."""
    caller = caller_of(request)
    if caller.role is not Role.ADMIN or not caller.sees_all:
        raise ApiError(403, no_admin(), code="insufficient_permissions", retry=False)
    return caller


def no_admin() -> str:
    """How to get an admin on a server that has none."""
    return (
        "This call needs the key of an admin, and this server has none. Start it with "
        f"{SGLANG_ADMIN}, or with a line 'NAME KEY admin' in the file of the setting "
        "api_keys."
    )


# Open without a key: for probes, as in SGLang, and files of the page.
OPEN = {"/draining", "/health", "/health_generate", "/live", "/ready"}
# Of the admin, unless the server is told otherwise: it has the usage of all clients.
METRICS = "/metrics"

# OpenAI's and Anthropic's endpoints that answer at once.
ONLINE = frozenset(ENDPOINTS) - {TRANSCRIPTIONS_URL} | {"/v1/messages/count_tokens"}
# The model of these calls is not in a JSON body.
ONLINE_OTHER = frozenset({TRANSCRIPTIONS_URL, "/v1/realtime"})
# All calls that use tokens at once.
GENERATING = ONLINE | ONLINE_OTHER | {ROLLOUTS_PATH, WAVE_PATH}

CLIENT = frozenset(
    {
        *ONLINE,
        *ONLINE_OTHER,
        "/",
        "/docs",
        "/docs/oauth2-redirect",
        "/openapi.json",
        "/ping",
        "/redoc",
        "/v1/detokenize",
        "/v1/models",
        "/v1/models/{model:path}",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/tokenize",
        # SGLang's frontend language asks for these before its first wave.
        "/get_model_info",
        "/model_info",
        # Ours.
        "/batches/data",
        "/offline_batch/usage",
        "/offline_batch/costs",
        "/v1/batches",
        "/v1/batches/{batch_id}",
        "/v1/batches/{batch_id}/cancel",
        "/v1/batches/{batch_id}/results",
        "/v1/files",
        "/v1/files/{file_id}",
        "/v1/files/{file_id}/content",
        "/v1/messages/batches",
        "/v1/messages/batches/{message_batch_id}",
        "/v1/messages/batches/{message_batch_id}/cancel",
        "/v1/messages/batches/{message_batch_id}/results",
        "/v1/uploads",
        "/v1/uploads/{upload_id}/cancel",
        "/v1/uploads/{upload_id}/complete",
        "/v1/uploads/{upload_id}/parts",
        ROLLOUTS_PATH,
        f"{ROLLOUTS_PATH}/{{rollout_id}}/stop",
        WAVE_PATH,
    }
)
ADMIN = frozenset(
    {
        METRICS,
        "/offline_batch/engines",
        "/offline_batch/keys",
        "/offline_batch/keys/{key_id}",
        "/offline_batch/limits/{name}",
        "/offline_batch/tree",
        *(
            f"{WORKER_PATH}/{call}"
            for call in ("attach", "exchange", "render", "query")
        ),
    }
)


def role_of(route: KnownRoute) -> Role:
    if route.template in OPEN:
        return Role.NOBODY
    if route.template in CLIENT:
        return Role.CLIENT
    # SGLang marks the routes of its admin, and opens the others to its --api-key.
    marked = getattr(route.endpoint, "_auth_level", None) is not None
    return Role.ADMIN if route.template in ADMIN or marked else Role.USER


# Larger bodies of online calls are refused for keys with a list of models.
MAX_BODY_BYTES = 64 << 20


async def with_checked_model(
    receive: Receive, template: str, rules: ModelRules
) -> Receive:
    """Read the body of an online call to a template and check its model.

    Returns a replacement of ``receive`` with the same body. Raises ApiError: 403
    for another model, 413 for a body that is too large to check.
    """
    if template in ONLINE_OTHER:
        raise _refused(
            "This API key may use some models only, so it does not open "
            f"{template}, whose calls cannot be checked."
        )
    if template not in ONLINE:
        return receive
    body, receive = await with_whole_body(receive, MAX_BODY_BYTES)
    if len(body) > MAX_BODY_BYTES:
        raise ApiError(
            413,
            f"The body has more than {MAX_BODY_BYTES} bytes, the most for an API key "
            "with a list of models.",
            code="request_too_large",
            retry=False,
        )
    if why := rules.body_refusal(template, body):
        raise _refused(*why)
    return receive


def _refused(message: str, param: str | None = None) -> ApiError:
    return ApiError(403, message, param=param, code="model_not_allowed", retry=False)


logger = logging.getLogger(__name__)


class KeyMiddleware:
    """Finds out who calls, and refuses calls that this caller may not make.

    Until the app has started and ``app.state.offline_batch_access`` has the keys,
    every call is refused.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = FlexCalls(app)
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
            models = caller.allowance.models
            if models is not None and route is not None:
                served = scope["app"].state.offline_batch_service.model_names or ()
                rules = ModelRules(models, served)
                receive = await with_checked_model(receive, route.template, rules)
        except ApiError as error:
            await _refuse(error, scope, receive, send)
            return
        if caller.role < Role.ADMIN:
            # With these, SGLang's routers choose a request's id or worker.
            scope["headers"] = [
                pair
                for pair in scope["headers"]
                if not pair[0].lower().startswith(b"x-override-")
            ]
        scope.setdefault("state", {})[CALLER] = caller
        current_caller.set(caller)
        await self.app(scope, receive, send)

    def _admitted(self, scope: Scope, route: KnownRoute | None) -> Caller:
        """The caller, if the call is allowed. Raises ApiError if it is not."""
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
        if (
            route is not None
            and route.template in GENERATING | {GENERATE_URL}
            and scope["app"].state.offline_batch_service.is_closing()
        ):
            raise ApiError(  # with new calls it would never end
                503,
                "This server is about to stop and takes no new calls. Repeat the call at "
                "another server, or here once it is back.",
                code="not_ready",
                headers={"Retry-After": "5"},
            )
        return caller


def _is_preflight(scope: Scope, route: KnownRoute | None) -> bool:
    """Whether a call is a browser's preflight, which has no key and runs no route."""
    if scope.get("method") != "OPTIONS":
        return False
    names = {name for name, _ in scope["headers"]}
    if not names >= {b"origin", b"access-control-request-method"}:
        return False
    return route is None or (bool(route.methods) and "OPTIONS" not in route.methods)


def _is_open(scope: Scope, route: KnownRoute) -> bool:
    if route.template == METRICS:
        return config_of(scope).open_metrics
    return role_of(route) is Role.NOBODY and scope["method"] in route.methods


def _keys_of(scope: Scope) -> list[bytes]:
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
    await error_at(scope, error)(scope, receive, send)


# How often the usage of online calls is written.
WRITE_EVERY_S = 1.0

# The caller of the HTTP call that this task works for.
current_caller: ContextVar[Caller | None] = ContextVar("current_caller", default=None)


@dataclass(eq=False)
class AccessControl:
    """The keys of a server process, and the use that it has not written yet.

    Without a key, callers are ``without_key``, or nobody once the store has a key.
    """

    store: BatchStore
    fixed: FixedKeys
    without_key: Caller | None

    def __post_init__(self) -> None:
        # A connection of its own: the store's is locked while a transaction waits for
        # the disk, and every call would wait with it.
        path = (self.store.directory / DATABASE).resolve()
        self._db = sqlite3.connect(
            f"{path.as_uri()}?mode=ro",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=5,
        )
        self._db.row_factory = sqlite3.Row
        self._unwritten: dict[str, Counter[str]] = {}
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._writing = Repeated(
            lambda: in_thread(self.write), WRITE_EVERY_S, "Writing the usage of keys"
        )

    def close(self) -> None:
        self._db.close()

    def caller(self, given: Iterable[bytes]) -> Caller | None:
        """Who calls with these keys: nobody if they differ, or if a key is needed."""
        digests = {digest(key) for key in given}
        found = None
        if len(digests) == 1:
            [sha256] = digests
            found = self._fixed_caller(sha256)
            found = found or keys.find_caller(self._rows, sha256)
        if found is None:
            # Clients of OpenAI send some key to a server without keys, too.
            return None if keys.has_keys(self._rows) else self.without_key
        if not found.name:
            return found
        allowance = keys.find_allowance(self._rows, found.name)
        return dataclasses.replace(found, allowance=allowance)

    def _fixed_caller(self, sha256: bytes) -> Caller | None:
        """Takes equally long for every key, known or not."""
        found = None
        for known, caller in self.fixed.items():
            if secrets.compare_digest(known, sha256):
                found = caller
        return found

    def fixed_role(self, name: str) -> str | None:
        roles = (caller.role for caller in self.fixed.values() if caller.name == name)
        return keys.ROLE_NAMES.get(next(roles, Role.NOBODY))

    @property
    def has_admin(self) -> bool:
        admins = [c for c in self.fixed.values() if c.role is Role.ADMIN and c.sees_all]
        return bool(admins) or keys.has_admin(self._rows)

    def _rows(self, query: str, values: Iterable[Any] = ()) -> list[Row]:
        return [dict(row) for row in self._db.execute(query, list(values))]

    def used_today(self, name: str) -> dict[str, int]:
        """The usage of a client today, including counts that are not written yet."""
        # First, since counts are in memory until they are written.
        with self._lock:
            unwritten = Counter(self._unwritten.get(name))
        used = used_today(self._rows, name)
        used["tokens"] += unwritten["input_tokens"] + unwritten["output_tokens"]
        return used

    def check_tokens(self, caller: Caller) -> None:
        """Check that a caller has tokens left today, by the limits of now.

        A session may be older than its caller's limits.

        Raises:
            ApiError: 429, they are used up.
        """
        allowance = keys.find_allowance(self._rows, caller.name)
        if allowance.tokens is not None:
            check_limits(allowance, self.used_today(caller.name))

    def count(self, name: str, counts: Counter[str]) -> None:
        if name:
            with self._lock:
                self._unwritten.setdefault(name, Counter()).update(counts)

    async def __aenter__(self) -> AccessControl:
        self._writing.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._writing.stop()
        self.write()
        self.close()

    def write(self) -> None:
        """Write the counts. A full disk only delays it."""
        # One writer at a time: two would write the same counts.
        with self._write_lock:
            for name in list(self._unwritten):
                self._write(name)

    def _write(self, name: str) -> None:
        with self._lock:
            counts = Counter(self._unwritten[name])
        try:
            add_usage(self.store, name, **counts)
        except sqlite3.Error as error:
            logger.warning("The usage of %r is not written yet: %s", name, error)
            return
        # Not before, so that no check of a limit misses them.
        with self._lock:
            self._unwritten[name] -= counts
            if not self._unwritten[name]:
                del self._unwritten[name]
