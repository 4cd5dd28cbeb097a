"""A job with a cache: requests that have an answer in it are not computed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...batch_api.equal_requests import request_key
from ...config import OfflineBatchConfig
from ...request import BatchRequestInput, RequestOutput, Requests, Sink
from .answer_cache import AnswerCache
from .answer_scope import answer_scope


class CachedAnswers:
    """The answers of one scope in a cache.

    Args:
        scope: of :func:`~.answer_scope.answer_scope`.
    """

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
    """The cache of a model, which is the same for all its jobs.

    Args:
        model, options: see :func:`~.answer_scope.answer_scope`.

    Raises:
        ConfigError: the directory of ``config.answer_cache`` cannot be used.
    """

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
