"""The caller of a request, as the key check found it."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from ...errors import ApiError
from ..access.access_control import AccessControl
from ..access.keys import ANYBODY, SGLANG_ADMIN, Caller, Role

CALLER = "offline_batch_caller"


def caller_of(request: Request) -> Caller:
    """Who makes a call. On a server without keys, anybody."""
    caller: Caller = getattr(request.state, CALLER, ANYBODY)
    return caller


def owner_of(request: Request) -> str:
    """The owner of new objects: the name of the caller's key, empty without one."""
    return caller_of(request).name


def owner_seen(request: Request) -> str | None:
    """The owner whose objects a call sees, or None if it sees those of all owners."""
    return caller_of(request).sees


def access_of(request: Request) -> AccessControl:
    """The keys of the server."""
    access: AccessControl = request.app.state.offline_batch_access
    return access


def owner_field(request: Request, row: dict[str, Any]) -> dict[str, str]:
    """The field that tells an admin whose object it sees. Others see none."""
    return {"owner": row["owner"]} if caller_of(request).sees_all else {}


def check_admin_key(request: Request) -> Caller:
    """Check that a call carries an admin's key, which open servers lack too.

    Raises:
        ApiError: 403.
    """
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
