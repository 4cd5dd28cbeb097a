"""Rows that cannot fit, and priorities that change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dense_runs import Run, generated, greedy, prioritized, prompts
from tiny_models import tiny_model

from sglang_batch.dense.admission import ByLength
from sglang_batch.dense.model import LoadedModel, wrap
from sglang_batch.dense.row_request import DenseRequest, DenseSettings
from sglang_batch.planner.kv_lengths.batch_state import GROUPS


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return wrap(tiny_model("gpt2"))


def request(
    name: str, length: int, count: int, *, place: int = 0, priority: int = 0
) -> DenseRequest:
    (ids,) = prompts(1, seed=len(name) + length, shortest=length, longest=length)
    return greedy(name, ids, count, place=place, priority=priority)


def expected(model: LoadedModel, requests: list[DenseRequest]) -> dict[str, list[int]]:
    return {
        each.rid: generated(model, each.input_ids, each.stopping.max_new_tokens)
        for each in requests
    }


@pytest.mark.parametrize("by_length", [None, ByLength(GROUPS, 40)])
def test_a_row_that_can_never_fit_fails_at_once(
    model: LoadedModel, by_length: ByLength | None
) -> None:
    settings = DenseSettings(max_rows=2, max_cells=50)
    grows, never = request("grows", 40, 30), request("never", 60, 3)
    grows = replace(grows, by_length=by_length)
    run = Run(model, settings).add([grows, never])
    told = "do not fit into the 50 cells of KV"
    assert f"61 tokens {told}" in str(run.answers["never"].error)
    answers = run.finish()
    assert f"51 tokens {told}" in str(answers["grows"].error)
    right = generated(model, grows.input_ids, 30)
    assert list(answers["grows"].output_ids) == right[:11]


class TestPriorities:
    def test_a_row_that_waits_displaces_one_that_runs(self, model: LoadedModel) -> None:
        first, second = request("a-1", 8, 20), request("b-1", 8, 5)
        run = Run(model, DenseSettings(max_rows=1)).add([first, second]).steps(4)
        assert run.loop.running() == ["a-1"]
        run.loop.revise(prioritized(lambda rid: rid.startswith("b-"), 1))
        run.steps(1)
        assert run.loop.running() == ["b-1"]
        run.finish()
        assert list(run.answers) == ["b-1", "a-1"]
        assert run.loop.counts.preempted == 1
        assert run.tokens() == expected(model, [first, second])

    def test_a_row_that_runs_gives_way_once_its_priority_is_lower(
        self, model: LoadedModel
    ) -> None:
        first, second = (
            request(name, 8, 10, priority=3, place=place)
            for place, name in enumerate(("a-1", "b-1"))
        )
        run = Run(model, DenseSettings(max_rows=1)).add([first, second]).steps(3)
        run.loop.revise(prioritized(lambda rid: rid.startswith("a-"), 2))
        run.steps(1)
        assert run.loop.running() == ["b-1"]
        run.finish()
        assert list(run.answers) == ["b-1", "a-1"]

    def test_rows_that_wait_are_put_in_the_new_order(self, model: LoadedModel) -> None:
        requests = [request(f"{n}-1", 8, 3, place=n) for n in range(6)]
        run = Run(model, DenseSettings(max_rows=1)).add(requests).steps(1)
        run.loop.revise(prioritized(lambda rid: rid in ("4-1", "5-1"), 1))
        run.loop.revise(prioritized(lambda rid: rid == "5-1", 2))
        run.finish()
        assert list(run.answers) == ["5-1", "4-1", "0-1", "1-1", "2-1", "3-1"]
