"""The summary: errors by reason, this run and the whole job, tokens by kind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from sglang_batch.fleet.fleet_worker import WorkerState
from sglang_batch.inputs.field_sample import FieldSaving
from sglang_batch.request import Cuts, Usage
from sglang_batch.run.outputs import Outputs
from sglang_batch.run.summary import (
    Counts,
    ErrorGroup,
    LastRequests,
    Summary,
    error_groups,
)
from sglang_batch.store.result_log import ResultLog


def answer(custom_id: str, message: str | None = None) -> bytes:
    body = {} if message is None else {"error": {"message": message}}
    response = {"status_code": 400 if message else 200, "body": body}
    line = {"custom_id": custom_id, "response": response, "error": None}
    return json.dumps(line).encode()


def resumed_log(path: Path) -> tuple[ResultLog, Counts]:
    """A job of six: three done by an earlier run. Its log, and its counts then."""
    log = ResultLog(path, 6)
    usage = Usage(100, cached_tokens=60, output_tokens=10, reasoning_tokens=4)
    log.put(0, answer("a"), ok=True, usage=usage)
    log.put(1, answer("b", "Input of 90 tokens is too long"), ok=False, usage=Usage())
    log.put(2, answer("c"), ok=True, usage=usage)
    before = Counts.of(log)
    log.put(3, answer("d", "Input of 7 tokens is too long"), ok=False, usage=Usage())
    log.put(4, answer("e", "no tool 'x'"), ok=False, usage=Usage())
    log.put(5, answer("f"), ok=True, usage=usage)
    return log, before


def test_errors_are_grouped_by_reason(tmp_path: Path) -> None:
    log, before = resumed_log(tmp_path / "log")
    summary = Summary.of_log(log, before, seconds=2.0)
    assert summary.errors == (
        ErrorGroup("Input of 90 tokens is too long", 2, "b"),
        ErrorGroup("no tool 'x'", 1, "e"),
    )
    shown = summary.as_table()
    assert "2 x Input of 90 tokens is too long (such as b)" in shown


def test_errors_of_any_shape_are_grouped() -> None:
    shapes: list[dict[str, object]] = [
        {"response": {"body": {"error": "as text"}}},
        {"response": {"body": ["a list"]}},
        {"response": {"body": None}, "error": "of the line"},
        {"response": "text", "error": {"message": None}},
        {"response": {"body": {"error": 5}}},
    ]
    found = error_groups(json.dumps({"custom_id": "a", **s}).encode() for s in shapes)
    reasons = ["as text", "['a list']", "of the line", "unknown error", "5"]
    assert [group.reason for group in found] == reasons


def test_rates_are_of_this_run_and_counts_of_the_job(tmp_path: Path) -> None:
    log, before = resumed_log(tmp_path / "log")
    summary = Summary.of_log(log, before, seconds=2.0)
    assert (summary.completed, summary.failed) == (3, 3)
    assert summary.output_tokens == 30
    assert summary.this_run == Counts(
        completed=1,
        failed=2,
        prompt_tokens=100,
        cached_tokens=60,
        output_tokens=10,
        reasoning_tokens=4,
    )
    assert summary.output_tokens_per_second == 5.0
    assert summary.computed_tokens_per_second == 20.0
    shown = " ".join(summary.as_table().split())
    assert "this run 3 requests, 10 output tokens" in shown
    assert "output tokens 30 of reasoning 12" in shown
    alone = Summary.of_log(log, Counts(), seconds=2.0)
    assert alone.this_run is None and "this run" not in alone.as_table()


def test_the_files_are_named(tmp_path: Path) -> None:
    log, before = resumed_log(tmp_path / "log")
    summary = Summary.of_log(log, before, seconds=2.0)
    together = " ".join(summary.as_table(Outputs.of("out", None, None)).split())
    assert together.endswith("results out errors among the results")
    apart = " ".join(summary.as_table(Outputs.of("out", "bad", None)).split())
    assert apart.endswith("results out errors bad")


def test_several_engines_are_listed(tmp_path: Path) -> None:
    log, before = resumed_log(tmp_path / "log")
    gone = "its server is gone"
    states = [
        WorkerState("http://a", "running", 0, 0, 5, 600, 250.0, 0.5, 0, ""),
        WorkerState("http://b", "left out", 0, 0, 1, 110, None, 0.0, 3, gone),
        WorkerState("http://c", "running", 0, 0, 0, 0, None, 0.0, 1, gone),
        WorkerState("http://d", "starting", 0, 0, 0, 0, None, 0.0, 2, gone),
        WorkerState("http://e", "released", 0, 0, 1, 110, None, 0.0, 0, "", 1.5),
    ]
    summary = Summary.of_log(log, before, seconds=2.0, engines=states)
    shown = summary.as_table().split("\n")
    first = next(i for i, row in enumerate(shown) if row.startswith("engines "))
    assert [
        row.removeprefix("engines").strip() for row in shown[first : first + 5]
    ] == [
        "http://a: 5 requests, 300 tokens/s, cached 50.0%",
        "http://b: 1 requests, 55 tokens/s, cached 0.0%; left out, lost 3 times: "
        + gone,
        "http://c: 0 requests, 0 tokens/s, cached 0.0%; lost 1 time: " + gone,
        "http://d: 0 requests, 0 tokens/s, cached 0.0%; starting again, lost 2 times: "
        + gone,
        "http://e: 1 requests, 55 tokens/s, cached 0.0%; released after 2 engine seconds",
    ]
    engines = json.loads(summary.as_json())["engines"]
    assert [engine["tokens_per_second"] for engine in engines] == [
        300.0,
        55.0,
        0.0,
        0.0,
        55.0,
    ]
    assert summary.engine_s == 1.5
    assert engines[1]["reason"] == gone
    assert msgspec.convert(json.loads(summary.as_json()), Summary) == summary


def test_a_single_engine_is_not_listed(tmp_path: Path) -> None:
    log, before = resumed_log(tmp_path / "log")
    alone = [WorkerState("http://a", "running", 0, 0, 5, 600, 250.0, 0.5, 0, "")]
    for states in ([], alone):
        summary = Summary.of_log(log, before, seconds=2.0, engines=states)
        assert "engines" not in json.loads(summary.as_json())
        assert "engines" not in summary.as_table()


def test_a_recorded_summary_is_read_back(tmp_path: Path) -> None:
    log, before = resumed_log(tmp_path / "log")
    summary = Summary.of_log(log, before, seconds=2.0)
    assert msgspec.convert(json.loads(summary.as_json()), Summary) == summary


def test_merged_requests_are_counted_and_in_no_rate(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "log", 3)
    usage = Usage(input_tokens=100, cached_tokens=60, output_tokens=10)
    log.put(0, answer("a"), ok=True, usage=usage)
    log.put(1, answer("b"), ok=True, usage=usage, merged=True)
    log.put(2, answer("c"), ok=True, usage=usage, merged=True)
    log.close()
    log = ResultLog(tmp_path / "log", 3)  # as a run that resumes the job reads it
    summary = Summary.of_log(log, Counts(), seconds=2.0)
    assert (summary.completed, summary.merged) == (3, 2)
    assert (summary.prompt_tokens, summary.merged_prompt_tokens) == (300, 200)
    assert (summary.output_tokens, summary.merged_output_tokens) == (30, 20)
    assert summary.merged_cached_tokens == 120
    assert summary.cached_share == 0.6
    assert summary.output_tokens_per_second == 5.0
    assert summary.computed_tokens_per_second == 20.0
    assert (
        "2, equal to others or in the cache: 200 prompt and 20 output"
        in summary.as_table()
    )
    assert (
        "merged"
        not in Summary.of_log(
            ResultLog(tmp_path / "none", 0), Counts(), seconds=1.0
        ).as_table()
    )
    assert msgspec.convert(summary.as_dict(), Summary) == summary
    log.close()


def test_no_more_is_cached_than_was_possible(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "log", 3)
    usage = Usage(input_tokens=100, cached_tokens=60, output_tokens=10)
    log.put(0, answer("a"), ok=True, usage=usage)

    def possible(shared: float, before: Counts) -> float | None:
        made = Summary.of_log(log, before, 1.0, optimal_cached_share=shared)
        return made.optimal_cached_share

    assert possible(0.7, Counts()) == 0.7
    # The cache had what others computed.
    assert possible(0.5, Counts()) == 0.6
    # The rest of a job that is resumed has another share than the whole.
    assert possible(0.7, Counts.of(log)) is None
    log.close()


def test_answers_cut_by_stop_rules_are_counted(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "results.jsonl", 3)
    usage = Usage(10, 0, 5)
    log.put(0, answer("a"), ok=True, usage=usage, cuts=Cuts(json=2))
    log.put(1, answer("b"), ok=True, usage=usage, cuts=Cuts(repetition=1))
    log.close()
    log = ResultLog(tmp_path / "results.jsonl", 3)
    before = Counts.of(log)
    log.put(2, answer("c"), ok=True, usage=usage, cuts=Cuts(json=1))
    summary = Summary.of_log(log, before, seconds=1.0)
    assert (summary.cut_json, summary.cut_regex, summary.cut_repetition) == (3, 0, 1)
    assert summary.this_run is not None and summary.this_run.cut_json == 1
    assert "4 by stop rules: 3 by json, 1 by repetition" in summary.as_table()
    log.close()


@pytest.mark.parametrize(("answers", "advice"), [(10, True), (100, False)])
def test_truncated_answers_are_counted(
    tmp_path: Path, answers: int, advice: bool
) -> None:
    log = ResultLog(tmp_path / "results.jsonl", answers)
    for index in range(answers):
        cuts = Cuts(length=int(index < 2))
        log.put(index, answer("a"), ok=True, usage=Usage(10, 0, 5), cuts=cuts)
    log.close()
    log = ResultLog(tmp_path / "results.jsonl", answers)
    summary = Summary.of_log(log, Counts(), seconds=1.0)
    assert json.loads(summary.as_json())["truncated"] == 2
    assert "answers truncated    2 at their limit of tokens" in summary.as_table()
    assert ("raise max_tokens" in summary.as_table()) == advice
    log.close()


def test_the_order_of_fields_is_told(tmp_path: Path) -> None:
    log, before = resumed_log(tmp_path / "log")
    summary = Summary.of_log(log, before, seconds=2.0)
    assert "fields" not in summary.as_dict()
    saving = FieldSaving(rows=6, sampled=3, own_bytes=5000, bytes=1200)
    summary = replace(summary, fields=msgspec.structs.asdict(saving))
    assert msgspec.convert(json.loads(summary.as_json()), Summary) == summary
    assert (
        "order of fields      1,200 bytes of different beginnings, 5,000 in the template's "
        "order, by a sample of 3 rows\n"
    ) in summary.as_table()


def test_the_tail_the_cost_and_what_was_given_up_are_told(tmp_path: Path) -> None:
    log, before = resumed_log(tmp_path / "log")
    tail = LastRequests(1.25, 2, ("z", "y"))
    summary = Summary.of_log(log, before, seconds=9.0, tail=tail, price=4.0)
    assert (summary.engine_s, summary.dollars) == (9.0, 0.01)
    assert summary.given_up == 0
    summary = replace(summary, given_up=2)
    assert msgspec.convert(json.loads(summary.as_json()), Summary) == summary
    shown = " ".join(summary.as_table().split())
    assert "cost $0.0100 of this run" in shown
    assert (
        "tail 1.2 engine seconds less than half full, for 2 requests, the last of them z"
    ) in shown
    assert "requests given up 2, as enough have an answer" in shown
    both = Summary.of_log(log, before, seconds=9.0, price=4.0, replicas=2)
    assert (both.seconds, both.engine_s, both.dollars) == (9.0, 18.0, 0.02)
    plain = Summary.of_log(log, before, seconds=9.0)
    assert plain.dollars is None and "tail" not in plain.as_table()
