"""Windows of a stream, over a transport that answers at once, when told to, or never."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sglang_batch.errors import ConfigError, EngineError
from sglang_batch.lang import streamer
from sglang_batch.lang.streamer import StreamAnswer, Streamer, stream
from sglang_batch.lang.waves import OnAnswer

WAIT_S = 30


class LocalTransport:
    """Echoes lines.

    hold: custom ids that are answered once ``release`` is set.
    fail_at: a window with this custom id fails, after its other lines are answered.

    Attributes:
        windows: the custom ids of each window, as they were sent.
    """

    max_inflight: int | None = None
    loop = None

    def __init__(self, hold: set[str] | None = None, fail_at: str = "") -> None:
        self.windows: list[list[str]] = []
        self.hold = hold or set()
        self.fail_at = fail_at
        self.release = threading.Event()
        self.cancelled = False
        self.closed = 0

    def check_caller(self) -> None: ...

    async def close(self) -> None:
        self.closed += 1

    async def send(self, bodies: list[bytes], on_answer: OnAnswer) -> None:
        ids = [json.loads(body)["custom_id"] for body in bodies]
        self.windows.append(ids)
        held = []
        # Not in the order of the rows.
        for index in reversed(range(len(bodies))):
            if ids[index] in self.hold:
                held.append(index)
            elif ids[index] != self.fail_at:
                self._answer(bodies, index, on_answer)
        if self.fail_at in ids:
            raise EngineError("the engine is gone.")
        try:
            while held and not self.release.is_set():
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        for index in held:
            self._answer(bodies, index, on_answer)

    @staticmethod
    def _answer(bodies: list[bytes], index: int, on_answer: OnAnswer) -> None:
        found = json.loads(bodies[index])["body"]
        body = {"choices": [{"text": str(found["i"])}]}
        on_answer(index, 200, json.dumps(body).encode())


class LocalStreamer(Streamer):
    """A streamer with this transport."""

    def __init__(self, transport: LocalTransport) -> None:
        super().__init__(server="http://none")
        self.transport = transport

    def _transport(self) -> Any:
        return self.transport


def numbered(count: int | None = None) -> Iterator[dict[str, int]]:
    numbers = itertools.count() if count is None else range(count)
    return ({"i": i} for i in numbers)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_each_row_is_answered_once_with_its_row() -> None:
    transport = LocalTransport()
    answers = list(LocalStreamer(transport).stream(numbered(1000), window=64))
    assert sorted(answer.index for answer in answers) == list(range(1000))
    assert all(a.row == {"i": a.index} and a.text == str(a.index) for a in answers)
    assert [answer.index for answer in answers] != list(range(1000))
    assert max(map(len, transport.windows)) == 64
    # Rows that are there at once fill their windows.
    assert len(transport.windows) <= 1000 / 64 + 3
    assert transport.closed == 1


def test_answers_may_be_in_the_order_of_the_rows() -> None:
    streamer = LocalStreamer(LocalTransport())
    answers = streamer.stream(numbered(500), window=50, ordered=True)
    assert [answer.index for answer in answers] == list(range(500))


def test_rows_that_cannot_be_sent_are_answered_in_their_place() -> None:
    rows = ({"i": i} if i % 3 else "no json" for i in range(30))
    answers = list(LocalStreamer(LocalTransport()).stream(rows, ordered=True))
    assert [answer.ok for answer in answers] == [bool(i % 3) for i in range(30)]
    assert list(LocalStreamer(LocalTransport()).stream([])) == []
    only_bad = LocalStreamer(LocalTransport()).stream(["x", "y"])
    assert [answer.status_code for answer in only_bad] == [400, 400]


@pytest.mark.parametrize("ordered", [False, True])
def test_an_endless_stream_is_read_three_windows_ahead(ordered: bool) -> None:
    read = 0

    def rows() -> Iterator[dict[str, int]]:
        nonlocal read
        for row in numbered():
            read = row["i"] + 1
            yield row

    # In order, nothing comes before the first answer.
    transport = LocalTransport(hold={"0"} if ordered else set())
    streamer = LocalStreamer(transport)
    answers = streamer.stream(rows(), window=20, ordered=ordered)
    first: list[StreamAnswer] = []
    taking = threading.Thread(target=lambda: first.append(next(answers)))
    taking.start()
    until(lambda: read >= 60)
    time.sleep(0.1)
    assert read <= 62
    transport.release.set()
    taking.join(WAIT_S)
    taken = [*first, *itertools.islice(answers, 199)]
    assert len(taken) == 200
    assert read <= 200 + 62
    answers.close()  # type: ignore[attr-defined]
    assert transport.closed == 1


def test_slow_rows_are_sent_without_waiting_for_a_full_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streamer, "QUIET_S", 0.01)
    answered = threading.Semaphore(0)

    def rows() -> Iterator[dict[str, int]]:
        for row in numbered(4):
            yield row
            # The next row comes only after the answer to this one.
            assert answered.acquire(timeout=WAIT_S)

    transport = LocalTransport()
    for answer in LocalStreamer(transport).stream(rows(), window=1000):
        assert answer.ok
        answered.release()
    assert transport.windows == [["0"], ["1"], ["2"], ["3"]]


def test_the_next_window_waits_until_little_of_the_last_is_unanswered() -> None:
    held = {str(i) for i in range(40)}
    transport = LocalTransport(hold=held)
    answers = LocalStreamer(transport).stream(numbered(80), window=40)
    found: list[StreamAnswer] = []
    taking = threading.Thread(target=lambda: found.extend(answers))
    taking.start()
    until(lambda: bool(transport.windows))
    time.sleep(0.1)
    assert [len(window) for window in transport.windows] == [40]
    transport.release.set()
    taking.join(WAIT_S)
    assert len(found) == 80
    # With a quarter left it is sent, or with what keeps the engine full if that is less.
    for max_inflight, left in ((None, 10), (500, 10), (3, 3)):
        for more in (0, 1):
            transport = LocalTransport(hold=set(sorted(held)[: left + more]))
            transport.max_inflight = max_inflight
            answers = LocalStreamer(transport).stream(numbered(80), window=40)
            taken = 40 - left - more if more else 80 - left
            assert len(list(itertools.islice(answers, taken))) == taken
            time.sleep(0.02)
            assert len(transport.windows) == (1 if more else 2)
            transport.release.set()
            assert len(list(answers)) == 80 - taken


def test_a_window_has_no_more_bytes_than_a_server_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streamer, "MAX_WINDOW_BYTES", 1000)
    transport = LocalTransport()
    rows = ({"i": i, "text": "x" * 300} for i in range(30))
    assert len(list(LocalStreamer(transport).stream(rows))) == 30
    assert max(map(len, transport.windows)) <= 3


def test_an_error_of_the_rows_comes_after_the_answers_before_it() -> None:
    def rows() -> Iterator[dict[str, int]]:
        yield from numbered(30)
        raise KeyError("the source is gone")

    answers = LocalStreamer(LocalTransport()).stream(rows(), window=8)
    found: list[int] = []
    with pytest.raises(KeyError, match="the source is gone"):
        found.extend(answer.index for answer in answers)
    assert sorted(found) == list(range(30))


def test_an_error_of_the_engine_comes_after_the_answers_before_it() -> None:
    transport = LocalTransport(fail_at="20")
    answers = LocalStreamer(transport).stream(numbered(), window=8)
    found: list[int] = []
    with pytest.raises(EngineError, match="the engine is gone"):
        found.extend(answer.index for answer in answers)
    assert 16 <= len(found) <= 48 and 20 not in found
    assert transport.closed == 1


def test_a_stream_that_is_left_aborts_what_is_unanswered() -> None:
    transport = LocalTransport(hold={"3"})
    streamer = LocalStreamer(transport)
    answers = streamer.stream(numbered(10), window=10)
    assert len(list(itertools.islice(answers, 9))) == 9
    streamer.close()
    assert transport.cancelled and transport.closed == 1
    assert list(answers) == []
    names = [thread.name for thread in threading.enumerate()]
    assert "sglang-batch-stream" not in names


def test_streams_at_the_same_time() -> None:
    streamer = LocalStreamer(LocalTransport())
    pairs = zip(
        streamer.stream(numbered(100), window=7, ordered=True),
        streamer.stream(numbered(100), window=9, ordered=True),
        strict=True,
    )
    assert all(a.index == b.index for a, b in pairs)


@pytest.mark.parametrize(
    "where",
    [
        {},
        {"model_path": "m", "server": "http://a"},
        {"server": "http://a", "tp": 2},
        {"model_path": "m", "key": "k"},
        {"server": "http://a", "priority": 1001},
        {"server": "http://a", "window": 0},
        {"server": "http://a", "url": "/v1/none"},
        {"model_path": "m", "port": 1},
    ],
)
def test_arguments_are_checked_by_the_call(where: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        next(stream(iter([{"i": 1}]), **where))
