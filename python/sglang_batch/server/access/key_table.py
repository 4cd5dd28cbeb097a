"""Keys that are added and revoked while a server runs: rows of its store.

Only the SHA-256 of a key is kept. Every process of a server reads the same rows, so a
change is effective at once in all of them. Revoked keys keep their row: a server that
ever had a key never opens to callers without one because its last key was revoked.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from ...store.batch_store import BatchStore, Query, Row, now
from .keys import KEY_ROLES, UNLIMITED, Allowance, Caller, caller_of, digest, new_secret

ROLE_NAMES = {role: name for name, role in KEY_ROLES.items()}


class NameTaken(Exception):
    """A name has, or had, a key or objects. The message says which."""


def add_key(
    store: BatchStore,
    name: str,
    role: str,
    limits: Mapping[str, Any],
    *,
    same_owner: bool,
    known_role: str | None = None,
) -> tuple[Row, str]:
    """Make a key for a client with a role of ``KEY_ROLES``.

    Limits of a client that are left out stay as they are. With ``same_owner`` the
    name may be one that was used before, whose objects the new key opens. The file
    of keys gives the name ``known_role``, if it has it. Returns the key's row and
    the key itself, which is not kept. Raises NameTaken if the name was used before,
    or has another role.
    """
    secret = new_secret()
    row: Row = {
        "id": f"key_{secrets.token_hex(12)}",
        "name": name,
        "sha256": digest(secret.encode()),
        "hint": secret[-4:],
        "created_at": now(),
    }
    with store.atomic() as db:
        before = client_role(store, name) or known_role
        if before is not None and before != role:
            raise NameTaken(f"{name!r} has the role {before!r}")
        if not same_owner and (before is not None or _owns_anything(store, name)):
            raise NameTaken(f"{name!r} was used before")
        change_allowance(store, name, limits, role)
        db.execute(
            "INSERT INTO keys (id, name, sha256, hint, created_at)"
            " VALUES (:id, :name, :sha256, :hint, :created_at)",
            row,
        )
    [made] = keys_in(store, row["id"])
    return made, secret


def client_role(store: BatchStore, name: str) -> str | None:
    found = store.rows("SELECT role FROM clients WHERE name = ?", (name,))
    return found[0]["role"] if found else None


def change_allowance(
    store: BatchStore, name: str, changes: Mapping[str, Any], role: str = "client"
) -> Allowance:
    """Change fields of a client's :class:`.keys.Allowance`, for all its keys.

    ``role`` is that of a client of the file of keys, which has no row before.
    """
    columns = dict(changes)
    if columns.get("models") is not None:
        columns["models"] = json.dumps(columns["models"])
    with store.atomic() as db:
        db.execute(
            "INSERT INTO clients (name, role) VALUES (?, ?) ON CONFLICT DO NOTHING",
            (name, role),
        )
        for column, value in columns.items():
            query = f"UPDATE clients SET {column} = ? WHERE name = ?"
            db.execute(query, (value, name))
        return find_allowance(store.rows, name)


def revoke_key(store: BatchStore, key_id: str) -> bool:
    """Revoke a key. False if there is none with this id that is not revoked."""
    with store.atomic() as db:
        query = "UPDATE keys SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL"
        return db.execute(query, (now(), key_id)).rowcount > 0


def keys_in(store: BatchStore, key_id: str | None = None) -> list[Row]:
    """All keys, or one of them, with their clients' roles and limits. No digests."""
    return store.rows(
        "SELECT keys.id, keys.name, hint, created_at, revoked_at, role, models, batches,"
        " lines, tokens FROM keys JOIN clients USING (name)"
        " WHERE keys.id = COALESCE(?, keys.id) ORDER BY keys.rowid",
        (key_id,),
    )


def has_keys(query: Query) -> bool:
    return bool(query("SELECT 1 FROM keys LIMIT 1", ()))


def has_admin(query: Query) -> bool:
    """Whether an admin has a key that is not revoked."""
    return bool(
        query(
            "SELECT 1 FROM keys JOIN clients USING (name)"
            " WHERE role = 'admin' AND revoked_at IS NULL LIMIT 1",
            (),
        )
    )


def find_caller(query: Query, sha256: bytes) -> Caller | None:
    """The caller with a key that is not revoked, without limits."""
    found = query(
        "SELECT sha256, name, role FROM keys JOIN clients USING (name)"
        " WHERE sha256 = ? AND revoked_at IS NULL",
        (sha256,),
    )
    if not found or not secrets.compare_digest(found[0]["sha256"], sha256):
        return None
    return caller_of(found[0]["name"], KEY_ROLES[found[0]["role"]])


def find_allowance(query: Query, name: str) -> Allowance:
    """The models and limits of a client: none, unless an admin has set them."""
    found = query(
        "SELECT models, batches, lines, tokens FROM clients WHERE name = ?", (name,)
    )
    return allowance_of(found[0]) if found else UNLIMITED


def allowance_of(row: Row) -> Allowance:
    models = row["models"]
    return Allowance(
        models=None if models is None else tuple(json.loads(models)),
        **{name: row[name] for name in ("batches", "lines", "tokens")},
    )


def _owns_anything(store: BatchStore, name: str) -> bool:
    query = " UNION ALL ".join(
        f"SELECT 1 FROM {table} WHERE {column} = ?"
        for table, column in (
            ("files", "owner"),
            ("batches", "owner"),
            ("uploads", "owner"),
            ("idempotent_answers", "owner"),
            ("usage", "name"),
        )
    )
    return bool(store.rows(f"{query} LIMIT 1", [name] * 5))
