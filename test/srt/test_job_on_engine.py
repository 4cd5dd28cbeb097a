"""Whole jobs on real SGLang: a sample first, plans made again, lines of many parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from jobs_on_engine import GATHERED, MAX_INFLIGHT, NUM_REQUESTS

from sglang_batch.request import engine_request_id, named_job_id, part_request_id


@pytest.fixture
def found(job_runs: dict[str, Any]) -> dict[str, Any]:
    return job_runs


def test_later_jobs_are_planned_with_the_seconds_of_steps(
    found: dict[str, Any],
) -> None:
    costs = found["costs"]
    assert costs["samples"] > 40
    # Other processes disturb this machine.
    assert 0 < costs["noise"] < 1
    assert costs["after"] != costs["before"]
    # The tiny model's steps take Python's time besides that of its matrices.
    assert any(costs["extras"])


@pytest.mark.parametrize("policy", ["dual-scan", "auto"])
def test_a_job_of_unknown_lengths_is_answered_and_planned_again(
    found: dict[str, Any], policy: str
) -> None:
    run = found[policy]
    assert len(run["answers"]) == NUM_REQUESTS
    assert run["sent"] == list(range(NUM_REQUESTS))
    assert len(run["opened"]) >= 2
    assert run["opened"][0] == ("dfs" if policy == "auto" else policy)
    assert run["same"]


def test_the_estimates_come_to_be_those_of_the_answers(found: dict[str, Any]) -> None:
    run = found["dual-scan"]
    steps = [tokens - 1 for tokens in run["answers"].values()]
    true_mean = sum(steps) / len(steps)
    first, *_, last = run["estimates"]
    assert abs(last - true_mean) < 0.3 * true_mean
    assert abs(first - true_mean) > abs(last - true_mean)


def test_both_sides_are_in_the_engine_while_both_have_requests(
    found: dict[str, Any],
) -> None:
    sides = found["dual-scan"]["sides"]
    assert all(left + right <= MAX_INFLIGHT for left, right in sides)
    middle = sides[MAX_INFLIGHT : NUM_REQUESTS // 2]
    # The sample fills the engine first, and it is sent from the left.
    begin = next(i for i, (_, right) in enumerate(middle) if right)
    assert begin < 0.1 * len(middle), middle
    both = [bool(left and right) for left, right in middle[begin:]]
    # Answers that come all at once may leave a side without any for a moment.
    assert sum(both) > 0.75 * len(both), middle


def test_the_parts_of_a_line_have_ids_of_the_job(found: dict[str, Any]) -> None:
    parts = found["parts"]
    assert parts["choices"] == [12, 11, 4]
    assert parts["states_left"] == 0
    lines = [engine_request_id(named_job_id("parts"), i) for i in range(3)]
    prompts = [part_request_id(lines[0], i) for i in range(12)]
    # SGLang computes the prompt of several samples once before them.
    samples = [part_request_id(lines[1], i) for i in range(12)]
    both = [part_request_id(lines[2], i) for i in range(6)]
    assert sorted(parts["rids"]) == sorted([*prompts, *samples, *both])
    assert no_prefixes(parts["rids"])


def test_no_part_is_taken_for_an_online_request(found: dict[str, Any]) -> None:
    names, *rows = (line.split(",") for line in found["steps"])
    online = [names.index(name) for name in ("prefill_online", "decode_online")]
    tokens = sum(int(row[column]) for row in rows for column in online)
    assert tokens < 20  # SGLang's own warm-up at most


def test_the_engine_tells_how_long_lines_have_been_running(
    found: dict[str, Any],
) -> None:
    seconds = found["seconds"]
    first, second = seconds["first"], seconds["second"]
    assert 0 < len(first) <= len(second) < len(seconds["ids"])  # the others wait
    assert set(first) <= set(second) <= set(seconds["ids"])
    assert all(second[line] > first[line] + 0.15 for line in first)
    assert min(first.values()) > 0
    assert max(first.values()) < 60
    assert seconds["shared"]


def test_a_line_is_rendered_once_wherever_it_waits(found: dict[str, Any]) -> None:
    stored = found["from_disk"]
    assert stored["ok"]
    assert stored["differing"] == []
    again = {url for url, count in stored["lines"].items() if url == "/v1/responses"}
    assert stored["prepared"] == {
        url: count * (2 if url in again else 1)
        for url, count in stored["lines"].items()
    }
    # Only a list of prompts, which SGLang tokenizes at once.
    assert set(stored["tokenized_by_sglang"]) == {"one", "another"}


def no_prefixes(ids: Iterable[str]) -> bool:
    """Whether no id is the beginning of another: SGLang aborts by prefix."""
    ordered = sorted(ids)
    return not any(b.startswith(a) for a, b in itertools.pairwise(ordered))


def test_single_calls_that_arrive_together_share_their_prefixes(
    found: dict[str, Any],
) -> None:
    answers = found["gathered"]
    infos = [answer["meta_info"] for answer in answers]
    assert [info["id"] for info in infos] == [f"mine-{i}" for i in range(GATHERED)]
    aborted = infos.pop(GATHERED - 2)
    assert aborted["finish_reason"]["type"] == "abort"
    assert aborted["completion_tokens"] == 0
    assert all(info["completion_tokens"] == 4 for info in infos)
    # Of each document, one call computes the prefix, or one of each of two groups.
    for document in range(3):
        mine = [infos[i]["cached_tokens"] for i in range(document, GATHERED - 2, 3)]
        assert sum(cached < 60 for cached in mine) <= 2, mine
    assert infos[-1]["cached_tokens"] >= 60
    assert found["unsent_left"] == 0


def test_prefixes_that_kv_has_no_room_for_come_back_from_the_host(
    found: dict[str, Any],
) -> None:
    restored = found["restored"]
    groups, prefix_len = restored["groups"], restored["prefix_len"]
    assert groups * prefix_len > found["capacity"]
    assert restored["saved"] >= groups // 2
    assert restored["restored"] >= groups // 2
    assert restored["answers"] == restored["alone"]
    assert restored["alone_cached"] < prefix_len
    # No group's prefix is computed a second time.
    again = restored["cached"][groups:]
    assert [cached >= prefix_len for cached in again] == [True] * groups


def test_two_jobs_compute_a_document_once(found: dict[str, Any]) -> None:
    both = found["of_one_corpus"]
    in_all = both["documents"] * both["document_len"]
    assert in_all > found["capacity"]
    assert both["answers"] == 480
    # The rest are questions and templates.
    assert both["prompt"] - both["cached"] < 1.25 * in_all
