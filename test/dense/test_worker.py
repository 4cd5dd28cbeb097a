"""The worker: calls from several threads, its end, and its failure."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from dense_runs import (
    generated,
    greedy,
    limit_cells,
    prioritized,
    prompts,
    runs_nothing,
)
from tiny_models import tiny_model

from sglang_batch.dense.decode_loop import DecodeLoop
from sglang_batch.dense.model import LoadedModel, wrap
from sglang_batch.dense.row_request import (
    DenseAnswer,
    DenseRequest,
    DenseSettings,
    OnAnswer,
)
from sglang_batch.dense.rows import SlabRows
from sglang_batch.dense.worker import DenseWorker

SETTINGS = DenseSettings(max_rows=4, shortest_shared=4)
WAIT_S = 120.0


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return wrap(tiny_model("bloom"))


class Answers:
    """Answers as they come, from the worker's thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.found: dict[str, DenseAnswer] = {}
        self.counts: Counter[str] = Counter()

    def __call__(self, request: DenseRequest, answer: DenseAnswer) -> None:
        with self.changed:
            self.found[request.rid] = answer
            self.counts[request.rid] += 1
            self.changed.notify_all()

    def wait(self, count: int) -> dict[str, DenseAnswer]:
        """Wait until so many requests are answered."""
        with self.changed:
            done = self.changed.wait_for(lambda: len(self.found) >= count, WAIT_S)
            assert done, f"only {len(self.found)} of {count} requests are answered"
            return dict(self.found)


class Started:
    """A worker over a slab that has started."""

    def __init__(self, model: LoadedModel, rows: Any = None) -> None:
        self.answers = Answers()
        rows = rows or SlabRows(model, 4096, SETTINGS.shortest_shared)
        self.worker = DenseWorker(
            lambda answered: self._loop(model, rows, answered), self.answers
        )
        self.worker.start()

    def _loop(self, model: LoadedModel, rows: Any, answered: OnAnswer) -> DecodeLoop:
        self.loop = DecodeLoop(model, rows, SETTINGS, answered)
        return self.loop

    def limit_cells(self, max_cells: int) -> None:
        self.worker.call(lambda: limit_cells(self.loop, max_cells))

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *error: object) -> None:
        self.worker.stop()


class Failing(SlabRows):
    """Rows whose third step fails for good, and which say when it does."""

    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        if max(self.lengths) > 12:
            raise RuntimeError("the device is gone")
        return super().decode(tokens)


def requests_of(count: int, answer: int, name: str = "") -> list[DenseRequest]:
    return [
        greedy(f"{name}{number}", ids, answer)
        for number, ids in enumerate(prompts(count, seed=len(name), longest=20))
    ]


def in_threads(calls: Sequence[Any]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture
def started(model: LoadedModel) -> Iterator[Started]:
    with Started(model) as running:
        yield running


def test_requests_of_several_threads_are_answered_once_and_rightly(
    model: LoadedModel, started: Started
) -> None:
    by_thread = [requests_of(5, 9, name) for name in ("a", "bb", "ccc")]

    def submit(requests: list[DenseRequest]) -> None:
        for request in requests:
            started.worker.submit(request)

    in_threads([lambda part=part: submit(part) for part in by_thread])
    answers = started.answers.wait(15)
    for request in chain(*by_thread):
        expected = generated(model, request.input_ids, 9)
        assert list(answers[request.rid].output_ids) == expected
    assert set(started.answers.counts.values()) == {1}
    assert runs_nothing(started.worker)


def test_requests_may_be_aborted_from_another_thread(
    model: LoadedModel, started: Started
) -> None:
    endless = requests_of(6, 100_000, "endless")
    short = requests_of(3, 5, "s")

    def submit() -> None:
        for request in [*endless, *short]:
            started.worker.submit(request)

    def abort() -> None:
        for request in endless:
            started.worker.abort("unknown")
            started.worker.abort(request.rid)

    submit()
    in_threads([abort, abort])
    answers = started.answers.wait(9)
    assert {answers[request.rid].reason for request in endless} == {"abort"}
    for request in short:
        expected = generated(model, request.input_ids, 5)
        assert list(answers[request.rid].output_ids) == expected
    assert set(started.answers.counts.values()) == {1}


def test_it_tells_which_requests_decode(started: Started) -> None:
    for request in requests_of(6, 100_000):
        started.worker.submit(request)
    deadline = time.monotonic() + WAIT_S
    while len(started.worker.running()) < 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    running = started.worker.running()
    assert set(running) == {"0", "1", "2", "3"}
    assert all(0 <= seconds < WAIT_S for seconds in running.values())
    assert started.loop.counts.decoded_rows >= 4


def test_a_limit_on_cells_may_be_changed_while_rows_run(
    model: LoadedModel, started: Started
) -> None:
    requests = requests_of(4, 40)
    for request in requests:
        started.worker.submit(request)
    started.limit_cells(100)
    started.limit_cells(1000)
    answers = started.answers.wait(4)
    for request in requests:
        expected = generated(model, request.input_ids, 40)
        assert list(answers[request.rid].output_ids) == expected


def test_priorities_reach_requests_that_are_open(started: Started) -> None:
    for request in [*requests_of(4, 100_000, "long-"), *requests_of(2, 4, "b-")]:
        started.worker.submit(request)
    deadline = time.monotonic() + WAIT_S
    while len(started.worker.running()) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    started.worker.revise(prioritized(lambda rid: rid == "unknown", 8))
    started.worker.revise(prioritized(lambda rid: rid == "b-1", 7))
    assert list(started.answers.wait(1)) == ["b-1"]
    assert started.loop.counts.preempted == 1


def test_it_stops_with_open_work(model: LoadedModel) -> None:
    with Started(model) as started:
        for request in requests_of(6, 100_000):
            started.worker.submit(request)
        started.worker.submit(requests_of(1, 1, "first")[0])
    assert "0" not in started.answers.found
    assert not any(thread.name == "dense" for thread in threading.enumerate())


def test_it_waits_without_using_the_processor(started: Started) -> None:
    started.worker.submit(requests_of(1, 2)[0])
    started.answers.wait(1)
    assert processor_s() < 0.2


def test_a_failure_answers_all_open_requests_and_later_ones(
    model: LoadedModel,
) -> None:
    rows = Failing(model, 4096, SETTINGS.shortest_shared)
    with Started(model, rows) as started:
        for request in requests_of(7, 50):
            started.worker.submit(request)
        answers = started.answers.wait(7)
        later = requests_of(2, 5, "later")
        for request in later:
            started.worker.submit(request)
        started.worker.abort("0")
        started.limit_cells(100)
        answers = started.answers.wait(9)
        assert str(started.worker.failure) == "the device is gone"
        for answer in answers.values():
            assert answer.reason == "abort"
            assert "the device is gone" in str(answer.error)
        assert processor_s() < 0.2
        assert set(started.answers.counts.values()) == {1}
        assert runs_nothing(started.worker)


def test_a_request_that_breaks_the_loop_is_answered_too(model: LoadedModel) -> None:
    (broken,) = prompts(1)
    broken[0] = "five"  # type: ignore[call-overload]
    with Started(model) as started:
        started.worker.submit(greedy("open", [5, 6, 7], 100_000))
        started.worker.submit(greedy("broken", broken, 5))
        answers = started.answers.wait(1)
        assert answers["broken"].error
        started.worker.submit(greedy("later", [5, 6], 3))
        assert "later" in started.answers.wait(2)


def processor_s() -> float:
    """Processor time of the worker's thread in a fifth of a second, in half seconds."""
    (ident,) = (
        thread.ident for thread in threading.enumerate() if thread.name == "dense"
    )
    assert ident is not None
    clock = time.pthread_getcpuclockid(ident)
    before = time.clock_gettime(clock)
    time.sleep(0.2)
    return (time.clock_gettime(clock) - before) * 2


def test_an_aborted_request_no_longer_runs(started: Started) -> None:
    started.worker.submit(greedy("only", [5, 6, 7], 10_000))
    deadline = time.monotonic() + WAIT_S
    while not started.worker.running() and time.monotonic() < deadline:
        time.sleep(0.001)
    started.worker.abort("only")
    assert started.answers.wait(1)["only"].reason == "abort"
    assert runs_nothing(started.worker)
