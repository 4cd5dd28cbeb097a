"""Lines of the log about batches."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from sglang_batch.batch_api.objects import batch_object
from sglang_batch.server.progress import (
    ProgressLog,
    Rate,
    batch_changed,
    batch_progress,
    cached_percent,
    duration,
)


def make_row(**fields: Any) -> dict[str, Any]:
    """A batch of five lines that runs, as the store has it."""
    return {
        "id": "batch_1",
        "status": "in_progress",
        "endpoint": "/v1/embeddings",
        "input_file_id": "file-1",
        "completion_window": "24h",
        "owner": "",
        "api": "openai",
        "priority": 0,
        "created_at": 1000,
        "model": "demo",
        "total": 5,
        "completed": 3,
        "failed": 1,
        "input_tokens": 200,
        "cached_tokens": 50,
        "output_tokens": 80,
        "errors": None,
        "output_file_id": None,
        "error_file_id": None,
        "paused_reason": None,
        **fields,
    }


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"status": "validating", "owner": "alice", "priority": 5},
            "batch=batch_1 state=validating endpoint=/v1/embeddings "
            "input_file_id=file-1 completion_window=24h owner=alice priority=5 "
            "api=openai",
        ),
        ({}, "batch=batch_1 state=in_progress total=5 model=demo done=4 failed=1"),
        (
            {"paused_reason": "outside of batch_hours"},
            "batch=batch_1 state=in_progress total=5 model=demo done=4 failed=1 "
            'paused="outside of batch_hours"',
        ),
        (
            {"status": "cancelled", "cancelled_at": 1095, "output_file_id": "file-o"},
            "batch=batch_1 state=cancelled total=5 completed=3 failed=1 unrun=1 "
            "input_tokens=200 output_tokens=80 cached=25% took=1m35s "
            "output_file_id=file-o",
        ),
        (
            {
                "status": "failed",
                "failed_at": 1001,
                "input_tokens": 0,
                "output_tokens": 0,
                "total": 0,
                "completed": 0,
                "failed": 0,
                "errors": '{"data": [{"message": "Not JSON."}, {"message": "b"}]}',
            },
            "batch=batch_1 state=failed total=0 completed=0 failed=0 took=1s "
            'errors=2 first_error="Not JSON."',
        ),
    ],
)
def test_a_change_is_one_line(
    caplog: pytest.LogCaptureFixture, fields: dict[str, Any], line: str
) -> None:
    with caplog.at_level(logging.INFO, "sglang_batch"):
        assert batch_changed(make_row(**fields)) == line
    assert caplog.messages == [line]


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("org/model-7B:v1", "org/model-7B:v1"),
        ("two words", '"two words"'),
        ("x state=failed", '"x state=failed"'),
        ('a"b', '"a\\"b"'),
        ("a\\nb", '"a\\\\nb"'),
        ("one\nbatch=batch_2 state=failed", '"one\\nbatch=batch_2 state=failed"'),
        ("\u2028\x1b[2J", '"\\u2028\\u001b[2J"'),
    ],
)
def test_no_value_of_a_client_forges_a_line_or_a_pair(model: str, shown: str) -> None:
    line = batch_changed(make_row(model=model))
    assert f" model={shown} done=4 " in line


def test_progress_has_the_rate_if_it_is_known() -> None:
    start = "batch=batch_1 done=4 total=5 failed=1"
    row = make_row()
    assert batch_progress(row, None) == f"{start} cached=25%"
    rate = Rate(0.123, 4567.8, 321.0, eta_s=95.2)
    rates = "lines_per_s=0.1 tokens_per_s=4568 cached=25%"
    assert batch_progress(row, rate) == f"{start} {rates} eta=1m35s"
    stalled = Rate(0.0, 0.0, 0.0, eta_s=None)
    paused = make_row(paused_reason="hours", input_tokens=0)
    assert batch_progress(paused, stalled) == (
        f"{start} lines_per_s=0.0 tokens_per_s=0 paused=hours"
    )


def test_merged_lines_count_neither_as_cached_nor_as_possible() -> None:
    row = make_row(input_tokens=200, cached_tokens=150)
    assert cached_percent(row) == "75%"
    merged = {"merged_input_tokens": 100, "merged_cached_tokens": 90}
    assert cached_percent(row | merged) == "60%"
    assert cached_percent(row | merged | {"input_tokens": 100}) is None
    for shared, possible in ((0.5, 0.6), (0.8, 0.8)):
        more = {"metadata": None, "reasoning_tokens": 0, "merged_output_tokens": 0}
        found = {**row, **merged, **more, "optimal_cached_share": shared}
        details = batch_object(found)["usage"]["input_tokens_details"]
        assert details["optimal_cached_share"] == possible
        assert details["merged_cached_tokens"] == 90
    for ended_early in ({"status": "cancelled"}, {"input_tokens": 100}):
        shown = batch_object(found | ended_early)
        assert "optimal_cached_share" not in shown["usage"]["input_tokens_details"]


def test_progress_is_logged_now_and_then() -> None:
    time = 100.0
    log = ProgressLog(every_s=30.0, clock=lambda: time)
    logged = []
    for second in range(100):
        time = 100.0 + second
        done = min(second, 70)
        if log.tick(make_row(completed=done), None):
            logged.append(second)
        if second == 40:
            assert log.tick(make_row(id="batch_2"), None) is None
    assert logged == [30, 60, 90]
    time += 100.0
    assert log.tick(make_row(completed=70), None) is None  # nothing new
    assert log.tick(make_row(completed=70, paused_reason="hours"), None)
    log.forget("batch_1")
    assert log.tick(make_row(), None) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (3599, "59m59s"),
        (3660, "1h01m"),
        (90_000, "1d1h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
