"""Rows that join by length have the tokens of ``generate``, parked or not."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import pytest
from dense_runs import Run, ShortOfMemory, generated, greedy, prioritized, prompts
from tiny_models import tiny_model

from sglang_batch.dense.admission import ByLength
from sglang_batch.dense.model import LoadedModel, wrap
from sglang_batch.dense.row_request import DenseRequest, DenseSettings
from sglang_batch.dense.rows import SeparateRows, SlabRows
from sglang_batch.planner.kv_lengths.batch_state import GROUPS, TREE

RULES = pytest.mark.parametrize("rule", [TREE, GROUPS], ids=["tree", "window"])
# A step without rows costs little: padding is avoided, and batches are often replaced.
SETTINGS = DenseSettings(max_rows=6, max_cells=150, step_cells=20.0)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return wrap(tiny_model("gpt2"))


def request(
    name: str, rule: int, length: int, count: int, **others: Any
) -> DenseRequest:
    seed = zlib.crc32(name.encode())
    (ids,) = prompts(1, seed=seed, shortest=length, longest=length)
    return greedy(name, ids, count, by_length=ByLength(rule, length), **others)


def mixed(rule: int) -> list[DenseRequest]:
    """Short and long prompts and answers, more than AlignedServe's smallest batch."""
    sizes = [(4, 30), (5, 3), (6, 20), (40, 5), (42, 25), (38, 2), (15, 9), (16, 12)]
    return [
        request(f"{turn}-{number}", rule, length, count, place=number)
        for turn in range(6)
        for number, (length, count) in enumerate(sizes)
    ]


def expected(model: LoadedModel, requests: list[DenseRequest]) -> dict[str, list[int]]:
    return {
        each.rid: generated(model, each.input_ids, each.stopping.max_new_tokens)
        for each in requests
    }


class TestTokens:
    @pytest.mark.slow
    @RULES
    @pytest.mark.parametrize(
        "host_cells", [1 << 20, 60, 0], ids=["room", "few", "none"]
    )
    def test_they_are_those_of_generate(
        self, model: LoadedModel, rule: int, host_cells: int
    ) -> None:
        requests = mixed(rule)
        run = Run(model, replace(SETTINGS, host_cells=host_cells)).add(requests)
        run.finish()
        assert run.tokens() == expected(model, requests)
        if host_cells == 1 << 20:
            assert run.loop.counts.preempted > 0
            assert run.loop.counts.recomputed_tokens == 0

    def test_estimates_that_are_too_low_do_no_harm(self, model: LoadedModel) -> None:
        requests = [replace(each, expected_len=2) for each in mixed(GROUPS)]
        run = Run(model, SETTINGS).add(requests)
        run.finish()
        assert run.tokens() == expected(model, requests)

    @pytest.mark.slow
    def test_both_kinds_of_rows_run_side_by_side(self, model: LoadedModel) -> None:
        by_length, others = mixed(GROUPS), mixed(TREE)
        others = [
            replace(each, rid=f"other-{each.rid}", by_length=None) for each in others
        ]
        run = Run(model, SETTINGS).add([*by_length, *others]).steps(1)
        running = run.loop.running()
        assert 0 < sum(rid.startswith("other") for rid in running) < len(running)
        run.finish()
        assert run.tokens() == expected(model, [*by_length, *others])

    @pytest.mark.slow
    @RULES
    def test_memory_that_runs_out_loses_nobody(
        self, model: LoadedModel, rule: int
    ) -> None:
        requests = mixed(rule)
        # A row that is alone would end: no call fails when few are left.
        failing = {"join": (5,), "decode": (5, 30), "prefill": (4,)}
        rows = SlabRows(model, SETTINGS.prefill_tokens, SETTINGS.shortest_shared)
        run = Run(model, SETTINGS, rows=ShortOfMemory(rows, failing)).add(requests)
        run.finish()
        assert run.tokens() == expected(model, requests)

    def test_rows_that_are_computed_one_by_one_keep_their_order(
        self, model: LoadedModel
    ) -> None:
        requests = [
            request(str(place), GROUPS, length, 3, place=place)
            for place, length in enumerate((40, 5, 41, 6))
        ]
        run = Run(model, DenseSettings(max_rows=1), rows=SeparateRows(model))
        run.add(requests).finish()
        assert list(run.answers) == ["0", "1", "2", "3"]

    def test_a_family_shares_its_prefix(self, model: LoadedModel) -> None:
        """It is computed once, though others of the same length arrive in between."""
        (prefix,) = prompts(1, seed=3, shortest=30, longest=30)
        family = [
            greedy(f"family-{n}", [*prefix, 50 + n], 4, by_length=place, place=n)
            for n, place in enumerate([ByLength(GROUPS, 31, 7)] * 4)
        ]
        others = [request(f"{n}-other", GROUPS, 31, 4, place=9) for n in range(3)]
        run = Run(model, DenseSettings(max_rows=2, shortest_shared=4))
        run.add([others[0], *family, *others[1:]]).finish()
        assert run.rows.computed_tokens == 3 * 31 + 30 + 4
        assert run.tokens() == expected(model, [*family, *others])


class TestChanges:
    def parked(self, model: LoadedModel) -> tuple[Run, str]:
        """A run, and the id of a row that has left for a batch of other lengths."""
        run = Run(model, SETTINGS).add(mixed(GROUPS))
        seen: set[str] = set()
        for _ in range(200):
            run.steps(1)
            left = seen - {*run.loop.running()} - {*run.answers}
            if left:
                return run, min(left)
            seen |= {*run.loop.running()}
        raise AssertionError("no row was parked")

    def test_a_parked_row_may_be_aborted(self, model: LoadedModel) -> None:
        run, rid = self.parked(model)
        before = run.loop._host_cells
        run.loop.abort(rid)
        assert run.answers[rid].error == "The request was aborted."
        assert run.loop._host_cells < before
        run.finish()
        wanted = expected(model, mixed(GROUPS))
        assert run.tokens() == {**wanted, rid: run.tokens()[rid]}
        assert run.loop._host_cells == 0

    def test_a_running_row_may_be_aborted(self, model: LoadedModel) -> None:
        run = Run(model, SETTINGS).add(mixed(GROUPS)).steps(2)
        rid = run.loop.running()[0]
        run.loop.abort(rid)
        answers = run.finish()
        assert answers[rid].reason == "abort"
        assert len(answers) == len(mixed(GROUPS))

    @pytest.mark.slow
    @RULES
    def test_rows_of_a_higher_priority_take_their_places(
        self, model: LoadedModel, rule: int
    ) -> None:
        requests = mixed(rule)
        run = Run(model, replace(SETTINGS, max_rows=2)).add(requests).steps(3)
        first = {*run.loop.running()}
        last = next(each.rid for each in requests if each.rid not in first)
        run.loop.revise(prioritized(lambda rid: rid == last, 1))
        run.steps(1)
        assert last in run.loop.running()
        run.finish()
        assert run.tokens() == expected(model, requests)

    @pytest.mark.slow
    @RULES
    def test_running_rows_give_way_once_their_priority_is_lower(
        self, model: LoadedModel, rule: int
    ) -> None:
        requests = [replace(each, priority=2) for each in mixed(rule)]
        run = Run(model, replace(SETTINGS, max_rows=2)).add(requests).steps(1)
        first = {*run.loop.running()}
        run.loop.revise(prioritized(lambda rid: rid in first, 1))
        run.steps(1)
        assert not first & {*run.loop.running()}
        run.finish()
        assert {*list(run.answers)[-len(first) :]} == first
        assert run.tokens() == expected(model, requests)

    @pytest.mark.slow
    def test_requests_are_planned_anew(self, model: LoadedModel) -> None:
        """Some that joined in their order now join by length, and the reverse."""
        requests = mixed(GROUPS)
        orders = {each.rid: None if n % 2 else each.by_length
                  for n, each in enumerate(requests)}  # fmt: skip
        begun = [replace(each, by_length=orders[each.rid]) for each in requests]
        run = Run(model, SETTINGS).add(begun).steps(6)
        plans = {each.rid: each.by_length for each in requests}
        run.loop.revise(
            lambda each: replace(
                each,
                by_length=None if orders[each.rid] else plans[each.rid],
                expected_len=3,
                place=99,
            )
        )
        run.finish()
        assert run.tokens() == expected(model, requests)
