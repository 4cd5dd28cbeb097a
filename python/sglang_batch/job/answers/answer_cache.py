"""Answers on disk, by a key: the least recently used make room, and none gets too old."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ...errors import ConfigError
from ...request import RequestOutput, Usage

logger = logging.getLogger(__name__)

NAME = "answers.sqlite3"
_DAY_S = 86_400
# A cache that is full is emptied to this share, so that not each answer has to make room.
_KEPT_SHARE = 0.9


class AnswerCache:
    """A cache in a directory, which several processes may use at a time. Each makes room for what
    it adds itself.

    Only its opening can fail. A failure later is logged once, and the cache is empty from then on.

    Args:
        most_bytes: of answers.
        days: after which an answer is too old.

    Raises:
        ConfigError: the directory cannot be written.
    """

    def __init__(
        self,
        directory: Path,
        most_bytes: int,
        days: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._most_bytes = most_bytes
        self._max_age_s = days * _DAY_S
        self._clock = clock
        self._lock = threading.Lock()
        self._broken = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                directory / NAME,
                isolation_level=None,
                check_same_thread=False,
                timeout=10,
            )
            self._db.execute("PRAGMA journal_mode = WAL")
            # A lost answer is computed again.
            self._db.execute("PRAGMA synchronous = OFF")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, body BLOB,"
                " usage TEXT, made_at REAL, used_at REAL, bytes INTEGER) WITHOUT ROWID"
            )
            self._db.execute(
                "CREATE INDEX IF NOT EXISTS answers_by_use ON answers (used_at)"
            )
            self._bytes = self._sum()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"answer_cache={str(directory)!r} cannot be used: {error}; name a "
                "directory that can be written."
            ) from None

    def get(self, key: bytes) -> RequestOutput | None:
        """The answer with a key, without an id of its request. None if there is none."""
        with self._lock:
            try:
                return self._get(key)
            except (sqlite3.Error, ValueError) as error:
                self._give_up(error)
        return None

    def put(self, key: bytes, answer: RequestOutput) -> None:
        """Keep an answer, in place of an earlier one."""
        with self._lock:
            try:
                self._put(key, answer)
            except sqlite3.Error as error:
                self._give_up(error)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _get(self, key: bytes) -> RequestOutput | None:
        if self._broken:
            return None
        now = self._clock()
        found = self._db.execute(
            "SELECT body, usage FROM answers WHERE key = ? AND made_at > ?",
            (key, now - self._max_age_s),
        ).fetchone()
        if found is None:
            return None
        self._db.execute("UPDATE answers SET used_at = ? WHERE key = ?", (now, key))
        body, usage = found
        return RequestOutput(200, "", body, Usage(*map(int, usage.split())))

    def _put(self, key: bytes, answer: RequestOutput) -> None:
        size = len(answer.body)
        if self._broken or size > self._most_bytes:
            return
        now, usage = self._clock(), answer.usage
        counts = (
            usage.input_tokens,
            usage.cached_tokens,
            usage.output_tokens,
            usage.reasoning_tokens,
        )
        self._db.execute(
            "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?)",
            (key, answer.body, " ".join(map(str, counts)), now, now, size),
        )
        self._bytes += size
        if self._bytes > self._most_bytes:
            self._make_room(now)

    def _make_room(self, now: float) -> None:
        self._db.execute(
            "DELETE FROM answers WHERE made_at <= ?", (now - self._max_age_s,)
        )
        over = self._sum() - int(_KEPT_SHARE * self._most_bytes)
        if over > 0:
            self._db.execute(
                "DELETE FROM answers WHERE key IN (SELECT key FROM (SELECT key,"
                " SUM(bytes) OVER (ORDER BY used_at, key) - bytes AS before"
                " FROM answers) WHERE before < ?)",
                (over,),
            )
        self._bytes = self._sum()

    def _sum(self) -> int:
        [total] = self._db.execute(
            "SELECT COALESCE(SUM(bytes), 0) FROM answers"
        ).fetchone()
        return int(total)

    def _give_up(self, error: Exception) -> None:
        if not self._broken:
            logger.warning("The answer cache is not used any more: %s", error)
        self._broken = True
