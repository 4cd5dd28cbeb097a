"""Rows that wait for a higher limit, and priorities that change."""

from __future__ import annotations

import pytest
from dense_runs import Run, generated, greedy, prioritized, prompts
from tiny_models import tiny_model

from sglang_batch.dense.model import LoadedModel, wrap
from sglang_batch.dense.row_request import DenseRequest, DenseSettings


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


class TestTemporaryLimits:
    @pytest.mark.parametrize("host_cells", [1 << 20, 0], ids=["kept", "computed_again"])
    @pytest.mark.parametrize("max_cells", [None, 500], ids=["no_limit", "limit"])
    def test_a_row_that_has_started_waits_until_the_limit_is_lifted(
        self, model: LoadedModel, max_cells: int | None, host_cells: int
    ) -> None:
        settings = DenseSettings(max_rows=2, max_cells=max_cells, host_cells=host_cells)
        long, short = request("long", 40, 20), request("short", 5, 9)
        run = Run(model, settings).add([long]).steps(5)
        run.loop.limit_cells(30)
        run.add([short]).steps(20)
        assert list(run.answers) == ["short"]
        assert run.loop.has_work
        assert not run.loop.can_step
        assert run.rows.allocated_cells == 0
        run.loop.limit_cells(500)
        answers = run.finish()
        assert answers["long"].error is None
        assert run.tokens() == expected(model, [long, short])
        assert (run.loop.counts.recomputed_tokens > 0) == (host_cells == 0)

    def test_many_that_wait_for_it_do_not_hold_up_those_behind(
        self, model: LoadedModel
    ) -> None:
        settings = DenseSettings(max_rows=2)
        long = [request(f"long-{n}", 20, 2, place=n) for n in range(150)]
        short = request("short", 4, 5, place=999)
        run = Run(model, settings)
        run.loop.limit_cells(15)
        run.add([*long, short]).steps(12)
        assert list(run.answers) == ["short"]
        run.loop.limit_cells(1000)
        run.finish()
        # In the order of the plan, as if there had been no limit.
        assert list(run.answers) == ["short", *(each.rid for each in long)]

    def test_a_row_that_waits_for_it_may_be_aborted(self, model: LoadedModel) -> None:
        settings = DenseSettings(max_rows=2, host_cells=60)
        run = Run(model, settings)
        for _ in range(3):
            run.answers.clear()
            run.loop.limit_cells(100)
            run.add([request("long", 40, 20)]).steps(3)
            run.loop.limit_cells(30)
            run.steps(2)
            run.loop.abort("long")
            assert run.answers["long"].error == "The request was aborted."
            assert not run.loop.has_work
        # Each time, its host memory was given back.
        assert run.loop.counts.recomputed_tokens == 0

    def test_a_row_that_can_never_fit_fails_at_once(self, model: LoadedModel) -> None:
        settings = DenseSettings(max_rows=2, max_cells=50)
        grows, never = request("grows", 40, 30), request("never", 60, 3)
        run = Run(model, settings).add([grows, never])
        told = "do not fit into the 50 cells of KV"
        assert f"61 tokens {told}" in str(run.answers["never"].error)
        run.loop.limit_cells(20)
        run.steps(3)
        assert "grows" not in run.answers
        run.loop.limit_cells(50)
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

    def test_it_reaches_rows_that_wait_for_a_higher_limit(
        self, model: LoadedModel
    ) -> None:
        requests = [request(f"{n}-1", 30, 3, place=n) for n in range(3)]
        run = Run(model, DenseSettings(max_rows=1))
        run.loop.limit_cells(10)
        run.add(requests).steps(2)
        run.loop.revise(prioritized(lambda rid: rid == "2-1", 1))
        run.loop.limit_cells(1000)
        run.finish()
        assert list(run.answers) == ["2-1", "0-1", "1-1"]
