"""The offline scheduler in real SGLang, one thing at a time: see stress_scenarios."""

from __future__ import annotations

from typing import Any

import pytest
from stress_runs import KV, STATES


@pytest.fixture
def found(stress_run: dict[str, Any]) -> Any:
    """All scenarios in one engine, which also checks the answers."""
    return stress_run


def test_what_does_not_fit_together_runs_one_after_the_other(found: Any) -> None:
    assert found["too_long"]["recomputed"] == 0


def test_a_prompt_longer_than_the_kv_fails_alone(found: Any) -> None:
    assert found["too_long"]["status"] == 400
    assert found["too_long"]["answered"] == 6


def test_an_answer_that_outgrows_the_kv_ends_there(found: Any) -> None:
    assert KV - 20 < found["too_long"]["longest"] <= KV


@pytest.mark.parametrize("state", STATES)
def test_a_line_is_aborted_in_any_state(found: Any, state: str) -> None:
    assert found["aborts"][state] == [1, 1]


def test_the_answer_to_an_abort_has_its_reason(found: Any) -> None:
    assert sum(found["aborts"]["answered"]) > 0


def test_a_request_without_kv_for_its_next_token_leaves_its_job(found: Any) -> None:
    assert found["aborts"]["starved"] == 1


def test_a_job_is_stopped_and_opened_again(found: Any) -> None:
    assert 0 < found["aborts"]["stopped"] < 30


def test_everything_is_aborted(found: Any) -> None:
    assert 0 < found["aborts"]["everything"] < 40


@pytest.mark.parametrize("shape", ["decodes", "chunks"])
@pytest.mark.parametrize("length", ["short", "long"])
def test_an_online_request_starts_at_once(found: Any, length: str, shape: str) -> None:
    beside = found["online"][f"{length}_{shape}"]
    assert beside["unfinished"] > 0
    assert beside["online"] == 4
    assert beside["delay"] <= 2


@pytest.mark.parametrize("length", ["short", "long", "many"])
def test_batch_lines_are_offloaded_for_online_requests(found: Any, length: str) -> None:
    assert found["online"][f"{length}_decodes"]["offloaded_for"] > 0


@pytest.mark.parametrize("shape", ["decodes", "chunks"])
def test_many_online_requests_are_answered(found: Any, shape: str) -> None:
    assert found["online"][f"many_{shape}"]["online"] == 20
    assert found["online"]["alone"]["online"] == 30


def test_lines_with_a_grammar_are_answered_by_it(found: Any) -> None:
    assert found["kinds"]["written"] == 11
    assert set(found["kinds"]["texts"]) <= {'{"a":"x"}', '{"a":"y"}'}


def test_log_probabilities_and_beams_leave_steps_mixed(found: Any) -> None:
    # That log probabilities are right is asserted in there.
    assert found["kinds"]["mixed_logprobs"] > 0
    assert found["random"]["mixed_logprobs"] > 100
    # One line in twelve is a beam search. No prompt is computed beside it and decodes.
    assert found["unmixed"]["mixed"] > 3 * found["unmixed"]["unmixed"]
    assert found["unmixed"]["lengths"] == [24]


def test_steps_are_apart_where_the_plans_costs_say_so(found: Any) -> None:
    # That answers are right is asserted in there.
    assert found["apart"].get("mixed", 0) == 0
    assert found["apart"]["unmixed"] > 10


def test_prompts_with_log_probabilities_share_what_the_plan_says(found: Any) -> None:
    shared = found["prompt_logprobs"]
    # The first line computes 48 tokens that 17 would share, six of them 20, six none.
    assert shared["cached"] == shared["planned"] == 48 * 17 - 3 * 28 - 3 * 48


def test_the_cache_is_flushed_when_nothing_holds_it(found: Any) -> None:
    found = found["between"]
    assert not found["flushed_busy"]
    assert found["flushed"]


def test_offloaded_lines_keep_through_a_pause_but_not_through_a_retraction(
    found: Any,
) -> None:
    found = found["between"]
    assert found["offloaded_now"] > 0
    # Their earlier names, for one release.
    for name in ("", "_now", "_host_bytes"):
        assert found[f"parked{name}"] == found[f"offloaded{name}"] > 0
    assert not found["flushed_paused"]
    assert found["offloaded_retracted"] == 0
    assert found["flushed_retracted"]
