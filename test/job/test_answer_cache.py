"""Answers that are kept on disk for later jobs."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from builders import make_request

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.errors import ConfigError
from sglang_batch.job.answer_cache import (
    NAME,
    AnswerCache,
    ModelAnswers,
    answer_known,
    answer_scope,
)
from sglang_batch.request import BatchRequestInput, RequestOutput, Usage

USAGE = Usage(10, 4, 3, 1)


def answer(body: bytes = b"{}") -> RequestOutput:
    return RequestOutput(200, "id", body, USAGE)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_an_answer_is_there_for_the_next_process(tmp_path: Path) -> None:
    first = AnswerCache(tmp_path / "new", 1000, 1)
    first.put(b"a", answer(b'{"x": 1}'))
    first.close()
    found = AnswerCache(tmp_path / "new", 1000, 1).get(b"a")
    assert found == RequestOutput(200, "", b'{"x": 1}', USAGE)
    assert AnswerCache(tmp_path / "new", 1000, 1).get(b"b") is None


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    clock = Clock()
    cache = AnswerCache(tmp_path, 1000, 1, clock)
    for name in (b"a", b"b", b"c", b"d"):
        clock.now += 1
        cache.put(name, answer(b"x" * 240))
    clock.now += 1
    assert cache.get(b"a") is not None
    clock.now += 1
    cache.put(b"e", answer(b"x" * 240))
    # 900 bytes are kept: three answers.
    kept = {name for name in (b"a", b"b", b"c", b"d", b"e") if cache.get(name)}
    assert kept == {b"a", b"d", b"e"}
    cache.put(b"f", answer(b"x" * 2000))
    assert cache.get(b"f") is None


def test_an_old_answer_is_computed_again(tmp_path: Path) -> None:
    clock = Clock()
    cache = AnswerCache(tmp_path, 1000, 2, clock)
    cache.put(b"a", answer())
    clock.now += 2 * 86_400 - 1
    assert cache.get(b"a") is not None
    clock.now += 2
    assert cache.get(b"a") is None


def test_a_damaged_cache_loses_nothing_but_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = AnswerCache(tmp_path, 1000, 1)
    with sqlite3.connect(tmp_path / NAME) as db:
        db.execute("DROP TABLE answers")
    cache.put(b"a", answer())
    assert cache.get(b"a") is None
    assert len(caplog.records) == 1


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"answer_cache='.*file' cannot be used"):
        AnswerCache(tmp_path / "file", 1000, 1)


def test_the_scope_is_the_model_its_options_and_the_owner(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_bytes(b"1")
    base = answer_scope(str(model), {"dtype": "float32", "port": 1})
    assert base == answer_scope(str(model), {"dtype": "float32", "port": 2})
    others = [
        answer_scope(str(model), {"dtype": "bfloat16", "port": 1}),
        answer_scope(str(model), {"dtype": "float32", "port": 1}, owner="bob"),
        answer_scope(str(tmp_path), {"dtype": "float32", "port": 1}),
        answer_scope("org/model", {"dtype": "float32", "port": 1}),
    ]
    (model / "weights").write_bytes(b"12")
    others.append(answer_scope(str(model), {"dtype": "float32", "port": 1}))
    assert len({base, *others}) == 6


def requests(texts: str) -> list[BatchRequestInput]:
    return [make_request(i, text, temperature=0) for i, text in enumerate(texts)]


def test_a_later_job_computes_what_is_new(tmp_path: Path) -> None:
    config = OfflineBatchConfig(answer_cache=str(tmp_path))
    answered: list[tuple[int, bool]] = []

    def run(texts: str, owner: str = "") -> list[int]:
        """The requests that are computed."""
        answered.clear()
        cached = ModelAnswers(config, "org/model", {}).of(owner)
        job = requests(texts)

        def sink(request: BatchRequestInput, output: RequestOutput) -> None:
            answered.append((request.index, output.from_cache))

        async def known() -> list[int]:
            left, keep = await answer_known(
                cached, job, np.arange(len(job), dtype=np.int64), sink
            )
            for number in left.tolist():
                keep(job[number], answer())
            return [int(number) for number in left]

        return asyncio.run(known())

    assert run("ab") == [0, 1]
    assert run("bca") == [1]
    assert sorted(answered) == [(0, True), (1, False), (2, True)]
    assert run("abc", owner="bob") == [0, 1, 2]
    assert run("abc") == []


def test_errors_and_sampled_answers_are_not_kept(tmp_path: Path) -> None:
    cached = ModelAnswers(
        OfflineBatchConfig(answer_cache=str(tmp_path)), "org/model", {}
    ).of()
    assert cached is not None
    keep = cached.keeping(lambda request, output: None)
    [greedy] = requests("a")
    sampled = make_request(1, "b", temperature=1)
    keep(greedy, RequestOutput(500, "", b"{}"))
    keep(sampled, answer())
    assert not list(cached.known([greedy, sampled], np.arange(2)))
    assert ModelAnswers(OfflineBatchConfig(), "org/model", {}).of() is None
