"""Throughput over time and rates of batches, from the counters that rows hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import run
from fake_engine import FakeEngine

from sglang_batch.job.engine import KvUse
from sglang_batch.server import progress as history_module
from sglang_batch.server.progress import NUM_POINTS, SAMPLE_S, WINDOW_S, History, Rate
from sglang_batch.store.batch_store import BatchStore

KV = KvUse(running=3, left=400, right=100, online=20, shared=80, capacity=1000)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BatchStore]:
    store = BatchStore(tmp_path)
    yield store
    store.close()


def add(store: BatchStore, batch_id: str = "b", **fields: Any) -> None:
    store.insert(
        "batches",
        {
            "id": batch_id,
            "status": "in_progress",
            "endpoint": "/v1/completions",
            "input_file_id": "file-1",
            "completion_window": "24h",
            "created_at": 0,
            "expires_at": 86_400,
            "total": 1000,
            **fields,
        },
    )


def grow(store: BatchStore, lines: int, batch_id: str = "b") -> None:
    """The counters of a batch whose lines have 10 + 5 tokens, 4 of them cached."""
    store.update_batch(
        batch_id,
        completed=lines,
        input_tokens=10 * lines,
        cached_tokens=4 * lines,
        output_tokens=5 * lines,
    )


async def sample_all(
    history: History, store: BatchStore, lines: list[int], start: float = 100.0
) -> None:
    """A sample every ``SAMPLE_S`` seconds, with these numbers of lines done."""
    for i, count in enumerate(lines):
        grow(store, count)
        await history.sample(start + i * SAMPLE_S)


def test_throughput_is_the_gain_of_all_batches_since_the_last_sample(
    store: BatchStore,
) -> None:
    async def scenario() -> None:
        history = History(store, FakeEngine())
        add(store)
        grow(store, 100)
        await history.sample(100.0)
        grow(store, 150)
        add(store, "new")
        grow(store, 10, "new")
        await history.sample(105.0)
        first, second = history.points()
        # Results of earlier servers do not count.
        assert first.computed_tokens_per_s == 0
        assert second.computed_tokens_per_s == 60 * 6 / 5
        assert second.cached_tokens_per_s == 60 * 4 / 5
        assert second.output_tokens_per_s == 60 * 5 / 5
        assert second.lines_left == 850 + 990
        assert history.points(after=100.0) == [second]

    run(scenario())


def test_the_last_lines_of_a_batch_that_ended_count(store: BatchStore) -> None:
    async def scenario() -> None:
        history = History(store)
        add(store)
        await sample_all(history, store, [900, 950])
        grow(store, 1000)
        store.transition("b", ("in_progress",), "completed")
        await history.sample(110.0)
        await history.sample(115.0)
        speeds = [point.output_tokens_per_s for point in history.points()]
        assert speeds == [0, 50, 50, 0]
        assert history.rate("b") is None
        assert history.points()[-1].lines_left == 0

    run(scenario())


def test_a_batch_between_two_samples_counts_once(store: BatchStore) -> None:
    async def scenario() -> None:
        history = History(store)
        add(store, "before", status="completed")
        grow(store, 50, "before")
        await history.sample(100.0)
        add(store, status="completed")
        grow(store, 50)
        await history.sample(105.0)
        await history.sample(110.0)
        speeds = [point.output_tokens_per_s for point in history.points()]
        assert speeds == [0, 50, 0]

    run(scenario())


def test_a_rate_is_that_of_the_last_minute(store: BatchStore) -> None:
    async def scenario() -> None:
        history = History(store)
        add(store)
        # Ten minutes at 1 line in 5 s, then a minute at 2 lines.
        slow = list(range(120))
        fast = [119 + 2 * i for i in range(1, int(WINDOW_S / SAMPLE_S) + 1)]
        await sample_all(history, store, slow)
        assert history.rate("b") == Rate(
            0.2, 3.0, 1.0, pytest.approx((1000 - 119) / 0.2)
        )
        await sample_all(history, store, fast, 100.0 + 120 * SAMPLE_S)
        left = 1000 - fast[-1]
        assert history.rate("b") == Rate(0.4, 6.0, 2.0, pytest.approx(left / 0.4))

    run(scenario())


def test_the_wait_for_the_first_line_does_not_slow_a_rate(store: BatchStore) -> None:
    async def scenario() -> None:
        history = History(store)
        await history.sample(95.0)
        add(store)
        await sample_all(history, store, [0] * 8)
        assert history.rate("b") is None
        await sample_all(history, store, [50], 100.0 + 8 * SAMPLE_S)
        assert history.rate("b") == Rate(10.0, 150.0, 50.0, 95.0)

    run(scenario())


def test_a_batch_without_progress_has_no_estimated_time(store: BatchStore) -> None:
    async def scenario() -> None:
        history = History(store)
        add(store)
        await sample_all(history, store, [0, 5, *[10] * 14])
        assert history.rate("b") == Rate(0.0, 0.0, 0.0, None)

    run(scenario())


def test_counters_that_go_back_count_from_there(store: BatchStore) -> None:
    async def scenario() -> None:
        history = History(store)
        add(store)
        await sample_all(history, store, [0, 100, 40, 50])
        speeds = [point.output_tokens_per_s for point in history.points()]
        assert speeds == [0, 100, 0, 10]
        assert history.rate("b") == Rate(2.0, 30.0, 10.0, 475.0)

    run(scenario())


def test_a_clock_that_is_set_back_begins_a_new_history(store: BatchStore) -> None:
    async def scenario() -> None:
        history = History(store)
        add(store)
        await sample_all(history, store, [0, 100], start=5000.0)
        await sample_all(history, store, [100, 110], start=100.0)
        assert [point.time for point in history.points()] == [100.0, 105.0]
        # A caller with a time before the change gets all points since.
        assert len(history.points(after=5005.0)) == 2
        assert history.rate("b") == Rate(2.0, 30.0, 10.0, 445.0)

    run(scenario())


def test_no_more_than_an_hour_is_kept(store: BatchStore) -> None:
    async def scenario() -> None:
        history = History(store)
        for i in range(NUM_POINTS + 5):
            await history.sample(100.0 + i)
        points = history.points()
        assert len(points) == NUM_POINTS
        assert points[0].time == 105.0

    run(scenario())


def test_the_engine_is_asked_only_while_a_batch_is_in_progress(
    store: BatchStore,
) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.kv = KV
        history = History(store, engine)
        await history.sample(100.0)
        add(store, status="validating")
        await history.sample(105.0)
        store.transition("b", ("validating",), "in_progress")
        await history.sample(110.0)
        assert [point.kv for point in history.points()] == [None, None, KV]

    run(scenario())


def test_a_sample_that_fails_is_not_the_last(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(FakeEngine):
        num_asked = 0

        async def kv_use(self) -> KvUse | None:
            self.num_asked += 1
            self._note()
            if self.num_asked == 1:
                raise OSError("gone")
            return KV

    async def scenario() -> None:
        engine = Broken()
        history = History(store, engine)
        add(store)
        history.sampling.start()
        await engine.until(lambda: engine.num_asked == 3)
        await history.sampling.stop()
        assert history.points()[0].kv == KV

    monkeypatch.setattr(history_module, "SAMPLE_S", 0.001)
    run(scenario())
