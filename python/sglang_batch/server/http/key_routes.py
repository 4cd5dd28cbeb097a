"""``/offline_batch/keys`` and ``/offline_batch/usage``: keys, limits and their use."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from ...batch_api import protocol as api
from ...errors import ApiError
from ...store.batch_store import Row
from ..access import keys
from ..access.keys import SGLANG_ADMIN, Allowance
from ..access.usage import day_of, usage_object, usage_since
from . import openapi as docs
from . import parameters
from .authorization import access_of, caller_of, check_admin_key
from .calls import OurRoute

MAX_DAYS = 366
# Fields of the API by those of an allowance.
LIMITS = {
    "models": "models",
    "batches": "batches_per_day",
    "lines": "lines_per_day",
    "tokens": "tokens_per_day",
    "enqueued_tokens": "enqueued_tokens",
}

router = APIRouter(route_class=OurRoute, responses=docs.OPENAI_ERRORS, tags=["Keys"])


@router.post(
    "/offline_batch/keys",
    response_model=docs.MadeApiKey,
    openapi_extra=docs.takes_json(docs.NewApiKey, repeatable=False),
)
async def add_key(request: Request) -> JSONResponse:
    """Make a key for a client. The answer is the only one that contains it."""
    check_admin_key(request)
    body, _ = await parameters.json_object(request)
    new = parameters.checked(docs.NewApiKey, body)
    try:
        row, secret = await asyncio.to_thread(
            keys.add_key,
            parameters.service_of(request).store,
            new.name,
            new.role,
            _limits(new),
            same_owner=new.same_owner,
            known_role=access_of(request).fixed_role(new.name),
        )
    except keys.NameTaken as error:
        raise ApiError(
            409,
            f"The name is taken: {error}. Its files and batches would belong to the new "
            "key. Choose another name or, to give the same client another key, repeat "
            'the call with "same_owner": true (--same-owner) and the same role.',
            param="name",
            code="name_taken",
            retry=False,
        ) from None
    shown = _key_object(row) | {"value": secret}
    return JSONResponse(shown, headers={"Cache-Control": "no-store"})


@router.get("/offline_batch/keys", response_model=docs.ApiKeyList)
def list_keys(request: Request) -> JSONResponse:
    """List all keys that were made here, with the limits of their clients."""
    check_admin_key(request)
    rows = keys.keys_in(parameters.service_of(request).store)
    return JSONResponse({"object": "list", "data": [_key_object(row) for row in rows]})


@router.delete("/offline_batch/keys/{key_id}", response_model=docs.RevokedApiKey)
def revoke_key(
    request: Request, key_id: str, cancel_batches: bool = False
) -> JSONResponse:
    """Revoke a key, effective at once.

    The batches of its name continue, unless ``cancel_batches`` is true. A repeated call
    has the same answer.
    """
    check_admin_key(request)
    service = parameters.service_of(request)
    found = keys.keys_in(service.store, key_id)
    if not found:
        raise ApiError(404, f"No key found with id {key_id!r:.100}.", param="key_id")
    keys.revoke_key(service.store, key_id)
    cancelled: list[str] = []
    if cancel_batches:
        [key] = keys.keys_in(service.store, key_id)
        for row in service.store.batches_in((api.VALIDATING, api.IN_PROGRESS)):
            if row["owner"] == key["name"]:
                service.cancel_batch(row["id"])
        since = service.store.rows(
            "SELECT id FROM batches WHERE owner = ? AND cancelling_at >= ? ORDER BY seq",
            (key["name"], key["revoked_at"]),
        )
        cancelled = [row["id"] for row in since]
    return JSONResponse(
        {
            "id": key_id,
            "object": "offline_batch.key.revoked",
            "revoked": True,
            "cancelled_batches": cancelled,
        }
    )


@router.post(
    "/offline_batch/limits/{name}",
    response_model=docs.ClientLimits,
    openapi_extra=docs.takes_json(docs.ClientLimits, repeatable=False),
)
async def set_limits(request: Request, name: str) -> JSONResponse:
    """Set the models and daily limits of a client, for all keys of this name.

    Limits that are left out keep their values, and null removes a limit.
    """
    check_admin_key(request)
    body, _ = await parameters.json_object(request)
    limits = _limits(parameters.checked(docs.ClientLimits, body))
    store = parameters.service_of(request).store
    role = keys.client_role(store, name) or access_of(request).fixed_role(name)
    if role is None or name == SGLANG_ADMIN:
        raise ApiError(404, f"No key has the name {name!r:.100}.", param="name")
    allowance = await asyncio.to_thread(
        keys.change_allowance, store, name, limits, role
    )
    return JSONResponse(_limits_object(allowance))


@router.get("/offline_batch/usage", response_model=docs.UsageList)
def list_usage(
    request: Request,
    days: Annotated[int, *parameters.whole_number("days", 1, MAX_DAYS)] = 1,
) -> JSONResponse:
    """List the usage of each key per day (UTC), today and on the days before.

    A client sees its own usage, an admin that of all clients.
    """
    since = day_of(time.time() - (days - 1) * 86_400)
    rows = usage_since(
        parameters.service_of(request).store, since, caller_of(request).sees
    )
    data = [usage_object(row) for row in rows]
    return JSONResponse({"object": "list", "data": data})


def _key_object(row: Row) -> dict[str, Any]:
    """A key as the API shows it: never the key itself."""
    return {
        "object": "offline_batch.key",
        **{key: row[key] for key in ("id", "name", "role", "created_at", "revoked_at")},
        "redacted_value": f"...{row['hint']}",
        **_limits_object(keys.allowance_of(row)),
    }


def _limits_object(allowance: Allowance) -> dict[str, Any]:
    return {field: getattr(allowance, name) for name, field in LIMITS.items()}


def _limits(given: docs.ClientLimits) -> dict[str, Any]:
    """The limits that a call gives, null included, by field of an allowance."""
    return {
        name: getattr(given, field)
        for name, field in LIMITS.items()
        if field in given.model_fields_set
    }
