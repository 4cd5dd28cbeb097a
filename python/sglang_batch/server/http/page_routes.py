"""``/batches``: a web page that shows the batches, and the data for it.

The page loads nothing from other servers. Its files are public, because they contain
nothing about any batch. The data needs the same key as all other calls.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections import defaultdict
from functools import cache
from importlib import resources
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from ...batch_api import message_batches as messages
from ...batch_api import protocol as api
from ...batch_api.objects import batch_object
from ...fleet.fleet_engine import FleetEngine
from ...job.engine import MAX_TREE_NODES
from ...store.batch_store import BatchStore, Row
from ..access.keys import Caller, Role, find_allowance
from ..access.usage import COUNTS, day_of, usage_object, usage_since
from ..progress import Rate
from .authorization import OPEN, caller_of
from .calls import OurRoute, path_of
from .openapi import OPENAI_ERRORS, EngineTable, RunningTree
from .parameters import invalid, service_of, whole_number

PATH = "/batches"
MAX_BATCHES = 100
MAX_SEARCH_LEN = 200
RUNNING = (api.IN_PROGRESS, api.FINALIZING, api.CANCELLING)
# Errors shown of a batch whose input was not valid.
MAX_ERRORS = 20

# Path -> (file in page/, media type).
FILES = {PATH: ("index.html", "text/html")} | {
    f"{PATH}/{name}": (name, media_type)
    for media_type, names in {
        "text/css": ("page.css",),
        "text/javascript": (
            *("page.js", "api.js", "submit.js", "usage.js", "engines.js"),
            *("tree.js", "rows.js", "charts.js"),
        ),
        "image/svg+xml": ("icon.svg",),
    }.items()
    for name in names
}
# Only our own script runs and no other server is called, whatever filenames and
# metadata contain.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # A newer server has a newer page.
    "Cache-Control": "no-cache",
}


router = APIRouter(route_class=OurRoute, responses=OPENAI_ERRORS, tags=["Page"])


@cache
def _content(name: str) -> bytes:
    return resources.files(__package__).joinpath("page", name).read_bytes()


def _file(request: Request) -> Response:
    name, media_type = FILES[path_of(request.scope)]
    return Response(_content(name), media_type=media_type, headers=HEADERS)


OPEN.update(FILES)
for _path in FILES:
    router.add_api_route(_path, _file, methods=["GET", "HEAD"], include_in_schema=False)


@router.get("/live", include_in_schema=False)
async def live() -> Response:
    """This process works, also while it drains. A restart helps where it does not."""
    return Response()


@router.get("/draining", include_in_schema=False)
async def draining(request: Request) -> JSONResponse:
    """Whether it takes no new calls and ends, and the lines of batches that still run."""
    service = service_of(request)
    lines = 0 if service.runner is None else service.runner.num_in_engine
    return JSONResponse({"draining": service.is_closing(), "running_lines": lines})


@router.get(f"{PATH}/data")
async def page_data(
    request: Request,
    after: float = 0.0,
    search: Annotated[str, Query(json_schema_extra={"maxLength": MAX_SEARCH_LEN})] = "",
) -> JSONResponse:
    """Get the caller's latest batches and the samples of the server's history.

    ``after`` is a Unix time in seconds: only later samples are returned. ``search`` is
    text that the batches' ids, files, models, endpoints, metadata or errors contain.
    """
    if len(search) > MAX_SEARCH_LEN:
        hint = f"At most {MAX_SEARCH_LEN} characters are searched for."
        raise invalid("search", search, hint)
    service = service_of(request)
    points = [dataclasses.asdict(point) for point in service.history.points(after)]
    batches = await asyncio.to_thread(
        _batches,
        service.store,
        caller_of(request),
        service.history.rates(),
        search.strip(),
        service.config.dollars_per_hour,
    )
    is_admin = caller_of(request).role is Role.ADMIN
    content = {
        "now": time.time(),
        "batches": batches,
        "usage": await asyncio.to_thread(_usage, service.store, caller_of(request)),
        "points": points,
        "endpoints": list(api.ENDPOINTS),
        "max_batches": MAX_BATCHES,
        "is_admin": is_admin,
        "engines": _engines(request) if is_admin else [],
    }
    return JSONResponse(content, headers={"Cache-Control": "no-store"})


@router.get("/offline_batch/tree", response_model=RunningTree)
async def running_tree(
    request: Request,
    limit: Annotated[int, *whole_number("limit", 1, MAX_TREE_NODES)] = 50,
) -> JSONResponse:
    """List the largest shared prefixes of the running jobs, by replica: which are in the
    KV cache, which requests use them, and when they are needed next.

    Half of them are the longest in the cache, the others those that save most tokens.
    Without the offline scheduler there are none.
    """
    trees = await service_of(request).running_tree(limit)
    replicas = [{"replica": i, **tree} for i, tree in enumerate(trees)]
    content = {"object": "offline_batch.tree", "replicas": replicas}
    return JSONResponse(content, headers={"Cache-Control": "no-store"})


@router.get("/offline_batch/engines", response_model=EngineTable)
async def list_engines(request: Request) -> JSONResponse:
    """List the servers whose engines run the batches of this server. One that has an
    engine itself lists none.
    """
    content = {"object": "offline_batch.engines", "engines": _engines(request)}
    return JSONResponse(content, headers={"Cache-Control": "no-store"})


def _usage(store: BatchStore, caller: Caller) -> list[dict[str, Any]]:
    """What each key that the caller sees used today and in the last days, by name."""
    now = time.time()
    today, week = day_of(now), day_of(now - 6 * 86_400)
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in usage_since(store, week, caller.sees):
        rows[row["name"]].append(usage_object(row))
    return [
        {
            "name": name,
            "today": next(
                (day for day in days if day["day"] == today),
                usage_object(dict.fromkeys(("day", "name", *COUNTS), 0)),
            ),
            "week_tokens": sum(day["total_tokens"] for day in days),
            "tokens_per_day": find_allowance(store.rows, name).tokens,
        }
        for name, days in sorted(rows.items())
    ]


def _engines(request: Request) -> list[dict[str, Any]]:
    fleet: FleetEngine | None = getattr(request.app.state, "fleet", None)
    return [] if fleet is None else [dataclasses.asdict(row) for row in fleet.states()]


def _batches(
    store: BatchStore,
    caller: Caller,
    rates: dict[str, Rate],
    search: str,
    price: float | None,
) -> list[dict[str, Any]]:
    rows = (
        store.search_batches(search, limit=MAX_BATCHES, owner=caller.sees)
        if search
        else store.list_batches(after=None, limit=MAX_BATCHES, owner=caller.sees)
    )
    shown = []
    for row in rows:
        file = store.get_file(row["input_file_id"], row["owner"])
        filename = file["filename"] if file else None
        batch = _batch(row, filename, rates.get(row["id"]), price)
        if caller.sees_all:
            batch["owner"] = row["owner"]
        shown.append(batch)
    return shown


def _batch(
    row: Row, filename: str | None, rate: Rate | None, price: float | None
) -> dict[str, Any]:
    """A batch as the API shows it, and more, with paths relative to the page's."""
    batch = batch_object(row, price)
    found = batch["errors"] or {}
    errors = found.get("data") or []
    path = f"v1/batches/{row['id']}"
    if row["api"] == messages.API:
        batch |= {"id": messages.shown_id(row["id"]), "metadata": None}
        path = f"v1/messages/batches/{batch['id']}"
    return batch | {
        "path": path,
        "downloads": _downloads(row, path),
        "errors": errors[:MAX_ERRORS],
        "num_errors": found.get("total") or len(errors),
        "input_filename": filename,
        "error_reasons": json.loads(row["error_reasons"] or "[]"),
        "rate": dataclasses.asdict(rate) if rate else None,
    }


def _downloads(row: Row, path: str) -> dict[str, str]:
    files = {"output": row["output_file_id"], "errors": row["error_file_id"]}
    found = {name: file_id for name, file_id in files.items() if file_id is not None}
    if row["api"] == messages.API:
        return {"results": f"{path}/results"} if found else {}
    if row["status"] in RUNNING and row["completed"] + row["failed"]:
        return {"so_far": f"{path}/results"}
    return {name: f"v1/files/{file_id}/content" for name, file_id in found.items()}
