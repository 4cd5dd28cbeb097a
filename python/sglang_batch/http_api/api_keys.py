"""Clients with keys of their own: who calls, and that nobody else does."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Any

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ..batch_api import protocol as api
from ..errors import ConfigError

# What SGLang's own keys leave open, for probes and for Prometheus.
OPEN_PATHS = ("/health", "/ready", "/metrics")
ANTHROPIC_PATH = "/v1/messages"
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_KEY = re.compile(r"[!-~]{1,512}")  # printable ASCII, as it goes into a header

ApiKeys = dict[bytes, str]


def read_api_keys(path: str) -> ApiKeys:
    """The keys of a file and the names that they stand for.

    A line is ``NAME KEY``; blank lines and lines that begin with ``#`` are skipped. A
    name may have several keys, so that a key can be changed without a pause.

    Raises:
        ConfigError: the file cannot be read, or a line of it; no message has a key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"api_keys: cannot read {path!r}: {error}.") from None
    keys: ApiKeys = {}
    lines: dict[bytes, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{path}:{number}"
        if len(words) != 2:
            raise ConfigError(
                f"{where}: expected 'NAME KEY', two words, not {len(words)}."
            )
        name, key = words[0], words[1].encode()
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{where}: the name {name!r} must be 1 to 64 letters, digits and '._@-'."
            )
        if not _KEY.fullmatch(words[1]):
            raise ConfigError(
                f"{where}: the key of {name!r} must be 1 to 512 printable ASCII "
                "characters."
            )
        if key in keys:
            raise ConfigError(
                f"{where}: the key of {name!r} is that of line {lines[key]} too."
            )
        keys[key], lines[key] = name, number
    if not keys:
        raise ConfigError(
            f"api_keys: {path} has no line 'NAME KEY', so nobody may call."
        )
    return keys


class ApiKeyMiddleware:
    """Lets calls through that carry a key, and says whose they are.

    The keys are ``app.state.offline_batch_keys``, which is there once the app has
    started; None lets everything through. A call's owner is put where
    :func:`~sglang_batch.http_api.caller.owner_of` finds it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        keys = _keys_of(scope)
        if keys is None:
            await self.app(scope, receive, send)
            return
        name = _find_name(keys, _key_of(scope))
        if name is None and scope["type"] == "websocket":
            await receive()  # the client's wish to connect
            await send({"type": "websocket.close", "code": 1008})
            return
        if name is None:
            await _refusal(scope["path"])(scope, receive, send)
            return
        scope.setdefault("state", {})["offline_batch_owner"] = name
        await self.app(scope, receive, send)


def _keys_of(scope: Scope) -> ApiKeys | None:
    """The keys that a call needs one of; None if it needs none."""
    if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS":
        return None
    if scope["path"].startswith(OPEN_PATHS):
        return None
    keys: ApiKeys | None = getattr(scope["app"].state, "offline_batch_keys", None)
    return keys


def _key_of(scope: Scope) -> bytes | None:
    headers = dict(scope["headers"])
    if _is_anthropic(scope["path"]) and b"x-api-key" in headers:
        key: bytes = headers[b"x-api-key"]
        return key
    kind, _, value = headers.get(b"authorization", b"").partition(b" ")
    return value.strip() if kind.lower() == b"bearer" else None


def _find_name(keys: ApiKeys, given: bytes | None) -> str | None:
    """Whose key it is. Takes as long whichever key it is, or none."""
    found = None
    for key, name in keys.items():
        if given is not None and secrets.compare_digest(key, given):
            found = name
    return found


def _is_anthropic(path: str) -> bool:
    return path == ANTHROPIC_PATH or path.startswith(ANTHROPIC_PATH + "/")


def _refusal(path: str) -> JSONResponse:
    message = (
        "No API key of this server was given; send one as 'Authorization: Bearer KEY'."
    )
    content: dict[str, Any]
    if _is_anthropic(path):
        error = {"type": "authentication_error", "message": message}
        content = {"type": "error", "error": error}
    else:
        content = api.error_body(message, status_code=401, code="invalid_api_key")
    return JSONResponse(content, 401)
