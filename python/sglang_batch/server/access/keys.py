"""Keys of a server: callers, roles, limits, and the models and adapters that a key allows.

Keys are in a file, or rows of the store, which are added and revoked while a server runs.
Only their SHA-256 is kept. Every process of a server reads the same rows, so a change is
effective at once in all of them. Revoked keys keep their row: a server that ever had a key
never opens to callers without one because its last key was revoked.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from ...config import OfflineBatchConfig
from ...errors import ConfigError
from ...store.batch_store import BatchStore, Query, Row, now

NAME_LEN = 64
# Names are in paths, and clients resolve "." and ".." there.
_NAME = re.compile(r"\.*[A-Za-z0-9_@-][A-Za-z0-9._@-]*")
_KEY = re.compile(r"[!-~]{1,512}")  # printable ASCII, since it is sent in a header
# The names of whoever calls with a key of SGLang's own.
SGLANG_ADMIN = "--admin-api-key"
SGLANG_CLIENT = ""
SECRET_PREFIX = "sk-batch-"


class Role(IntEnum):
    """The routes that a caller opens. A role includes those below it.

    NOBODY: needed for routes that are open without a key, such as probes.
    CLIENT: the OpenAI, Anthropic and batch routes.
    USER: all but SGLang's admin routes, for its ``--api-key`` next to an
        ``--admin-api-key``.
    ADMIN: everything, and the objects of all clients.
    """

    NOBODY = 0
    CLIENT = 1
    USER = 2
    ADMIN = 3


# Roles that a named key may have.
KEY_ROLES = {"client": Role.CLIENT, "admin": Role.ADMIN}


@dataclass(frozen=True, slots=True)
class Allowance:
    """The models and adapters of a client, its batches, lines and tokens in a day (UTC), and
    the estimated tokens of its batches in progress.

    None: any. For ``enqueued_tokens``: those of the setting ``max_enqueued_tokens``.
    """

    models: tuple[str, ...] | None = None
    batches: int | None = None
    lines: int | None = None
    tokens: int | None = None
    enqueued_tokens: int | None = None

    def model_rules(self, served: Sequence[str] | None) -> ModelRules | None:
        """The check of models, if there is one."""
        return None if self.models is None else ModelRules(self.models, served or ())


UNLIMITED = Allowance()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call, and whether it sees all objects.

    ``name`` is the owner of new objects, empty without a named key.
    """

    name: str
    role: Role
    sees_all: bool = False
    allowance: Allowance = UNLIMITED

    @property
    def sees(self) -> str | None:
        """The owner whose objects it sees, or None for all owners."""
        return None if self.sees_all else self.name


# A server without any key lets everybody do everything. Objects that named clients made
# before, when it had keys, stay hidden.
ANYBODY = Caller("", Role.ADMIN)

FixedKeys = dict[bytes, Caller]


def digest(secret: bytes) -> bytes:
    """The SHA-256 of a key, which is kept in its place."""
    return hashlib.sha256(secret).digest()


def check_name(name: Any) -> str:
    """Check the name of a client. Raises ValueError with a message for the caller."""
    if (
        not isinstance(name, str)
        or len(name) > NAME_LEN
        or not _NAME.fullmatch(name)
        or name == SGLANG_ADMIN
    ):
        raise ValueError(
            f"the name {name!r:.100} must be 1 to {NAME_LEN} letters, digits and "
            f"'._@-', not only dots, and not {SGLANG_ADMIN!r}"
        )
    return name


def caller_of(name: str, role: Role) -> Caller:
    return Caller(name, role, sees_all=role is Role.ADMIN)


def read_api_keys(path: str) -> FixedKeys:
    """Read a file of keys.

    Returns the caller for the digest of each key. Each line is ``NAME KEY`` or
    ``NAME KEY admin``. Blank lines and comments (``#``) are skipped. A name may
    have several keys, so a key can be replaced without downtime. Raises
    ConfigError, whose message never contains a key, if a line is anything else.
    """
    keys: FixedKeys = {}
    lines: dict[bytes, int] = {}
    roles: dict[str, Role] = {}
    for number, words in lines_of_words("api_keys", path):
        where = f"{path}:{number}"
        name, key, role = _line_of_file(words, where)
        if key in keys:
            raise ConfigError(
                f"{where}: the key of {name!r} is already used on line {lines[key]}."
            )
        if roles.setdefault(name, role) is not role:
            raise ConfigError(
                f"{where}: {name!r} is both a client and an admin; use two names."
            )
        keys[key], lines[key] = caller_of(name, role), number
    if not keys:
        raise ConfigError(
            f"api_keys: {path} has no 'NAME KEY' line, so every call would be refused."
        )
    return keys


def lines_of_words(setting: str, path: str) -> Iterator[tuple[int, list[str]]]:
    """The lines of a setting's file, without comments. ConfigError: it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}: cannot read {path!r}: {error}.") from None
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            yield number, words


def _line_of_file(words: list[str], where: str) -> tuple[str, bytes, Role]:
    """The name, digest of the key and role on a line that is not a comment."""
    if len(words) not in (2, 3):
        raise ConfigError(
            f"{where}: expected 'NAME KEY' or 'NAME KEY admin', not {len(words)} words."
        )
    name, key, *role = words
    try:
        check_name(name)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}.") from None
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"{where}: the key of {name!r} must be 1 to 512 printable ASCII characters."
        )
    if role and role[0] not in KEY_ROLES:
        # Not quoted: it may be a key.
        raise ConfigError(
            f"{where}: the third word of {name!r} must be {' or '.join(KEY_ROLES)}."
        )
    return name, digest(key.encode()), KEY_ROLES[role[0] if role else "client"]


def given_keys(
    config: OfflineBatchConfig, api_key: str | None, admin_key: str | None
) -> tuple[FixedKeys, Caller | None]:
    """The callers by key, and who calls without one: None if a key is needed.

    The options mean what they mean on SGLang. Raises ConfigError if the file of
    keys cannot be used, or has a key of the options too.
    """
    fixed: FixedKeys = {}
    if config.api_keys is not None:
        fixed |= read_api_keys(config.api_keys)
    role = Role.USER if admin_key else Role.ADMIN
    for flag, key, caller in (
        (SGLANG_ADMIN, admin_key, caller_of(SGLANG_ADMIN, Role.ADMIN)),
        ("--api-key", api_key, caller_of(SGLANG_CLIENT, role)),
    ):
        # One key for both is the admin's.
        if not key or (flag == "--api-key" and key == admin_key):
            continue
        known = fixed.setdefault(digest(key.encode()), caller)
        if known is not caller:
            raise ConfigError(
                f"{flag} is also the key of {known.name or '--api-key'!r}, which would "
                "have two roles; use different keys."
            )
    if config.api_keys is not None or api_key:
        return fixed, None
    # As in SGLang: without --api-key, the routes that are not the admin's stay open.
    return fixed, Caller(SGLANG_CLIENT, Role.USER) if admin_key else ANYBODY


# The endpoints on which SGLang runs the adapter of a body. On all others it ignores the
# adapter and runs the served model.
WITH_ADAPTERS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
    }
)

Refusal = tuple[str, str]
"""Why a request is refused, and the parameter that is the reason."""


@dataclass(frozen=True, slots=True)
class ModelRules:
    """The models and adapters that a client may use, and the models that are served."""

    allowed: Sequence[str]
    served: Sequence[str]

    def refusal(self, url: str, body: object) -> Refusal | None:
        """Why a client may not send a body, None if it may.

        Like SGLang, it takes the adapter of ``base:adapter`` before that of
        ``lora_path``, and otherwise the served model. Adapters are allowed as
        ``adapter`` or ``base:adapter``.
        """
        fields = body if isinstance(body, dict) else {}
        model = fields.get("model")
        if not isinstance(model, str):
            return self._message("must name its model"), "model"
        if url in WITH_ADAPTERS:
            adapter = self._adapter(model)
            if adapter is not None:
                return self._adapter_refusal(adapter, "model")
            if fields.get("lora_path"):
                return self.native_refusal(fields)
        known = (*self.allowed, *self.served)
        if model not in known and self._adapter(model) not in self.allowed:
            return self._message(f"may not use the model {model!r:.200}"), "model"
        return self._base_refusal("model")

    def native_refusal(self, fields: dict[str, Any]) -> Refusal | None:
        """Like :meth:`refusal` for a native request, which names adapters only."""
        paths = fields.get("lora_path")
        for adapter in (paths or [None]) if isinstance(paths, list) else [paths]:
            why = (
                self._adapter_refusal(adapter, "lora_path")
                if adapter
                else self._base_refusal("lora_path")
            )
            if why is not None:
                return why
        return None

    def body_refusal(self, url: str, body: bytes) -> Refusal | None:
        """Like :meth:`refusal`, for a body that is not parsed yet."""
        try:
            # As SGLang's routes parse it: of two equal keys, the last one counts.
            fields = json.loads(body)
        except (ValueError, RecursionError):
            return "The body of the call cannot be read to check its model.", "model"
        return self.refusal(url, fields)

    def _adapter_refusal(self, adapter: object, param: str) -> Refusal | None:
        # Not in a set: the adapter is any JSON value.
        others = (name for name in self.allowed if name not in self.served)
        if adapter in [self._adapter(name) or name for name in others]:
            return None
        return self._message(f"may not use the adapter {adapter!r:.200}"), param

    def _base_refusal(self, param: str) -> Refusal | None:
        if any(name in self.allowed for name in self.served):
            return None
        problem = "may not use the model without an adapter"
        if self.served:
            name = self.served[0]
            problem = (
                f"may not use the model {name!r} without an adapter; name one as "
                f"'{name}:ADAPTER' where the endpoint takes adapters"
            )
        return self._message(problem), param

    def _adapter(self, model: str) -> str | None:
        """The adapter in ``base:adapter``, as SGLang splits it."""
        if model in self.served:  # it may have colons, as in s3://bucket/model
            return None
        for name in self.served:
            if model.startswith(f"{name}:"):
                return model[len(name) + 1 :].strip() or None
        return model.partition(":")[2].strip() or None

    def _message(self, problem: str) -> str:
        return f"This API key {problem}; its models are: {', '.join(self.allowed)}."


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
    secret = SECRET_PREFIX + secrets.token_urlsafe(32)
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
        " lines, tokens, enqueued_tokens FROM keys JOIN clients USING (name)"
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
    found = query("SELECT * FROM clients WHERE name = ?", (name,))
    return allowance_of(found[0]) if found else UNLIMITED


def allowance_of(row: Row) -> Allowance:
    models = row["models"]
    return Allowance(
        models=None if models is None else tuple(json.loads(models)),
        **{n: row[n] for n in ("batches", "lines", "tokens", "enqueued_tokens")},
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
