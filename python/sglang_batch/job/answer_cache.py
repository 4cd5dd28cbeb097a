"""A cache of answers on disk, for jobs whose requests were answered before.

An answer depends on its request, the files of the model and the options of the engine: these
are its key. The least recently used answers make room, and none gets too old.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..batch_api.equal_requests import request_key
from ..config import OfflineBatchConfig
from ..errors import ConfigError
from ..request import BatchRequestInput, RequestOutput, Requests, Sink, Usage

# Options of SGLang that change no answer: where it listens, how it logs, how much it runs at a
# time, and the seed of requests that have none, whose answers are not kept.
IGNORED = (
    "offline_batch", "offline_config", "offline_batch_config", "offline_batch_dir",
    "host", "port", "nccl_port", "dist_init_addr", "dist_timeout", "grpc_port",
    "api_key", "admin_api_key", "ssl_keyfile", "ssl_certfile", "random_seed",
    "log_level", "log_level_http", "log_requests", "log_requests_level", "show_time_cost",
    "mem_fraction_static", "max_total_tokens", "max_running_requests",
    "max_queued_requests", "chunked_prefill_size", "max_prefill_tokens", "schedule_policy",
    "schedule_conservativeness", "cuda_graph_bs", "cuda_graph_max_bs",
    "enable_metrics", "watchdog_timeout", "tokenizer_worker_num", "skip_server_warmup",
)  # fmt: skip


def answer_scope(model: str, options: Mapping[str, Any], owner: str = "") -> bytes:
    """16 bytes that differ where equal requests may have other answers: by the model's files or its
    name, the engine's options, and the owner, who sees no answers of others."""
    digest = hashlib.blake2b(digest_size=16)
    place = Path(model)
    if place.is_dir():
        for file in sorted(place.rglob("*")):
            if file.is_file():
                stat = file.stat()
                told = (str(file.relative_to(place)), stat.st_size, stat.st_mtime_ns)
                digest.update(json.dumps(told).encode())
    digest.update(
        json.dumps([str(place.absolute()) if place.exists() else model]).encode()
    )
    kept = {
        name: str(value)
        for name, value in options.items()
        if not name.startswith("_") and name not in IGNORED
    }
    digest.update(json.dumps([kept, owner], sort_keys=True).encode())
    return digest.digest()


logger = logging.getLogger(__name__)

NAME = "answers.sqlite3"
_DAY_S = 86_400
# A cache that is full is emptied to this share, so that not each answer has to make room.
_KEPT_SHARE = 0.9


class AnswerCache:
    """A cache in a directory, which several processes may use at a time. Each makes room for what
    it adds itself. A failure is logged once, and the cache is empty from then on.

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

    @contextmanager
    def _one_use(self) -> Iterator[None]:
        """One thread at a time. The first failure ends the cache."""
        with self._lock:
            try:
                yield
            except (sqlite3.Error, ValueError) as error:
                if not self._broken:
                    logger.warning("The answer cache is not used any more: %s", error)
                self._broken = True

    def get(self, key: bytes) -> RequestOutput | None:
        """The answer with a key, without an id of its request. None if there is none."""
        with self._one_use():
            now = self._clock()
            found = None
            if not self._broken:
                found = self._db.execute(
                    "SELECT body, usage FROM answers WHERE key = ? AND made_at > ?",
                    (key, now - self._max_age_s),
                ).fetchone()
            if found is not None:
                self._db.execute(
                    "UPDATE answers SET used_at = ? WHERE key = ?", (now, key)
                )
                body, usage = found
                return RequestOutput(200, "", body, Usage(*map(int, usage.split())))
        return None

    def put(self, key: bytes, answer: RequestOutput) -> None:
        """Keep an answer, in place of an earlier one."""
        size = len(answer.body)
        if self._broken or size > self._most_bytes:
            return
        with self._one_use():
            now = self._clock()
            usage = " ".join(map(str, dataclasses.astuple(answer.usage)))
            self._db.execute(
                "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?)",
                (key, answer.body, usage, now, now, size),
            )
            self._bytes += size
            if self._bytes > self._most_bytes:
                self._make_room(now)

    def close(self) -> None:
        with self._lock:
            self._db.close()

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


class CachedAnswers:
    """The answers of one scope, of :func:`answer_scope`, in a cache."""

    def __init__(self, cache: AnswerCache, scope: bytes) -> None:
        self._cache = cache
        self._scope = scope

    def known(
        self, requests: Requests, numbers: NDArray[np.int64]
    ) -> Iterator[tuple[BatchRequestInput, RequestOutput]]:
        """The requests among ``numbers`` that have an answer, with it."""
        for number in numbers.tolist():
            request = requests[number]
            key = request_key(request)
            answer = None if key is None else self._cache.get(self._scope + key)
            if answer is not None:
                yield request, dataclasses.replace(answer, from_cache=True)

    def keeping(self, sink: Sink) -> Sink:
        """A sink that also keeps the answers that were computed."""

        def keep(request: BatchRequestInput, output: RequestOutput) -> None:
            sink(request, output)
            if output.status_code != 200 or not output.is_computed:
                return
            key = request_key(request)
            if key is not None:
                self._cache.put(self._scope + key, output)

        return keep


async def answer_known(
    cached: CachedAnswers | None,
    requests: Requests,
    todo: NDArray[np.int64],
    sink: Sink,
) -> tuple[NDArray[np.int64], Sink]:
    """Answer the requests whose answer is known.

    Args:
        cached: None to compute all.

    Returns:
        The numbers of the others, and the sink for them, which keeps their answers.
    """
    if cached is None:
        return todo, sink
    known = await asyncio.to_thread(lambda: list(cached.known(requests, todo)))
    for request, answer in known:
        sink(request, answer)
    done = np.array([request.index for request, _ in known], np.int64)
    return np.setdiff1d(todo, done, assume_unique=True), cached.keeping(sink)


class ModelAnswers:
    """The cache of a model, which is the same for all its jobs. Raises ConfigError if the directory
    of ``config.answer_cache`` cannot be used."""

    def __init__(
        self, config: OfflineBatchConfig, model: str, options: Mapping[str, Any]
    ) -> None:
        self._model = model
        self._options = options
        self._cache = None
        if config.answer_cache is not None:
            self._cache = AnswerCache(
                Path(config.answer_cache),
                config.answer_cache_bytes,
                config.answer_cache_days,
            )

    def of(self, owner: str = "") -> CachedAnswers | None:
        """The answers of one owner. None if none are kept."""
        if self._cache is None:
            return None
        scope = answer_scope(self._model, self._options, owner)
        return CachedAnswers(self._cache, scope)
