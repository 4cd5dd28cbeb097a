"""Finds the caller behind a key, and counts the tokens of online calls."""

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
from pathlib import Path
from typing import Any

from ...store.batch_store import BatchStore, Row
from ..background import Repeated, in_thread
from . import keys
from .keys import Caller, FixedKeys, Role, digest
from .usage import add_usage, check_limits, used_today

logger = logging.getLogger(__name__)

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
        self._db = _reader(self.store.directory)
        self._unwritten: dict[str, Counter[str]] = {}
        self._lock = threading.Lock()
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
        for caller in self.fixed.values():
            if caller.name == name:
                return keys.ROLE_NAMES.get(caller.role)
        return None

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

    def start(self) -> None:
        self._writing.start()

    async def stop(self) -> None:
        await self._writing.stop()
        self.write()

    def write(self) -> None:
        """Write the counts. A full disk only delays it."""
        for name in list(self._unwritten):
            with self._lock:
                counts = Counter(self._unwritten[name])
            try:
                add_usage(self.store, name, **counts)
            except sqlite3.Error as error:
                logger.warning("The usage of %r is not written yet: %s", name, error)
                continue
            # Not before, so that no check of a limit misses them.
            with self._lock:
                self._unwritten[name] -= counts
                if not self._unwritten[name]:
                    del self._unwritten[name]


def _reader(directory: Path) -> sqlite3.Connection:
    path = (directory / "batches.sqlite3").resolve()
    db = sqlite3.connect(
        f"{path.as_uri()}?mode=ro",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=5,
    )
    db.row_factory = sqlite3.Row
    return db
