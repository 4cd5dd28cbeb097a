"""``/batches``: a page for people to look at, and the data that it shows.

The page needs nothing but this server. Its files are served to anybody, as they say
nothing of any batch; the data needs the same key as all other calls.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from importlib import resources
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ..batch_api import message_batches as messages
from ..batch_api import protocol as api
from ..batch_api.objects import batch_object
from ..history import Rate
from ..store.batch_store import BatchStore, Row
from .caller import owner_of
from .errors import OpenAIRoute
from .openapi import OPENAI_ERRORS
from .parameters import service_of

PATH = "/batches"
MAX_BATCHES = 100
RUNNING = (api.IN_PROGRESS, api.FINALIZING, api.CANCELLING)
# Of a batch that was not valid, the page says so many errors.
MAX_ERRORS = 20

# Path -> file in page/ and its type.
FILES = {
    PATH: ("index.html", "text/html"),
    f"{PATH}/page.css": ("page.css", "text/css"),
    f"{PATH}/page.js": ("page.js", "text/javascript"),
    f"{PATH}/rows.js": ("rows.js", "text/javascript"),
    f"{PATH}/charts.js": ("charts.js", "text/javascript"),
    f"{PATH}/icon.svg": ("icon.svg", "image/svg+xml"),
}
# Whatever a client calls its files or writes into metadata, nothing but our own
# script runs, and nothing is asked of another server.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # A newer server brings a newer page.
    "Cache-Control": "no-cache",
}


class _OpenToAll:
    """Answers for the page's files before anybody asks for a key."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if path in FILES:
                await _file(path)(scope, receive, send)
                return
        await self._app(scope, receive, send)


@asynccontextmanager
async def _open_to_all(app: FastAPI) -> AsyncIterator[None]:
    # SGLang adds its check of keys after our routes, around everything: only what is
    # around that, too, can be without.
    stack = app.middleware_stack or app.build_middleware_stack()
    app.middleware_stack = _OpenToAll(stack)
    yield


router = APIRouter(
    route_class=OpenAIRoute,
    lifespan=_open_to_all,
    responses=OPENAI_ERRORS,
    tags=["Page"],
)


@cache
def _content(name: str) -> bytes:
    return resources.files(__package__).joinpath("page", name).read_bytes()


def _file(path: str) -> Response:
    name, media_type = FILES[path]
    return Response(_content(name), media_type=media_type, headers=HEADERS)


@router.get(f"{PATH}/data")
async def page_data(request: Request, after: float = 0.0) -> JSONResponse:
    """The caller's latest batches, and what was sampled of the server.

    Args:
        after: Unix time in seconds; only what was sampled later is answered.
    """
    service = service_of(request)
    history = service.history
    points = [dataclasses.asdict(point) for point in history.points(after)]
    batches = await asyncio.to_thread(
        _batches, service.store, owner_of(request), history.rates()
    )
    content = {"now": time.time(), "batches": batches, "points": points}
    return JSONResponse(content, headers={"Cache-Control": "no-store"})


def _batches(
    store: BatchStore, owner: str, rates: dict[str, Rate]
) -> list[dict[str, Any]]:
    shown = []
    for row in store.list_batches(after=None, limit=MAX_BATCHES, owner=owner):
        file = store.get_file(row["input_file_id"], owner)
        filename = file["filename"] if file else None
        shown.append(_batch(row, filename, rates.get(row["id"])))
    return shown


def _batch(row: Row, filename: str | None, rate: Rate | None) -> dict[str, Any]:
    """A batch as the API shows it, and what only the page shows.

    Paths are without a slash at their begin: the page takes them from where it is.
    """
    batch = batch_object(row)
    errors = (batch["errors"] or {}).get("data") or []
    path = f"v1/batches/{row['id']}"
    if row["api"] == messages.API:
        batch |= {"id": messages.shown_id(row["id"]), "metadata": None}
        path = f"v1/messages/batches/{batch['id']}"
    return batch | {
        "path": path,
        "downloads": _downloads(row, path),
        "errors": errors[:MAX_ERRORS],
        "num_errors": len(errors),
        "input_filename": filename,
        "line_errors": json.loads(row["line_errors"] or "{}"),
        "rate": dataclasses.asdict(rate) if rate else None,
    }


def _downloads(row: Row, path: str) -> dict[str, str]:
    """What there is to download of a batch: its name, and where."""
    files = {"output": row["output_file_id"], "errors": row["error_file_id"]}
    found = {name: file_id for name, file_id in files.items() if file_id is not None}
    if row["api"] == messages.API:
        return {"results": f"{path}/results"} if found else {}
    if row["status"] in RUNNING and row["completed"] + row["failed"]:
        return {"so_far": f"{path}/results"}
    return {name: f"v1/files/{file_id}/content" for name, file_id in found.items()}
