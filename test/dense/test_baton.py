"""What the Baton paper claims, sections 4.1 to 4.3, one test for each claim."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense_runs import Run, ShortOfMemory, generated, greedy, prompts
from tiny_models import tiny_model

from sglang_batch.dense.model import LoadedModel, wrap
from sglang_batch.dense.row_request import DenseRequest, DenseSettings
from sglang_batch.dense.rows import Rows, SeparateRows, SlabRows
from sglang_batch.dense.slab import slack

SETTINGS = DenseSettings(max_rows=8)


@pytest.fixture(scope="module", params=["bloom", "llama"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return wrap(tiny_model(request.param))


@pytest.fixture(scope="module")
def gpt2() -> LoadedModel:
    return wrap(tiny_model("gpt2"))


def cells_of(rows: Rows) -> int:
    """Rows times columns in use."""
    return len(rows.lengths) * max(rows.lengths, default=0)


class CountedRows(SlabRows):
    """Rows in a slab, with the tokens of each step and prompt that were computed."""

    def __init__(self, model: LoadedModel, settings: DenseSettings) -> None:
        super().__init__(model, settings.prefill_tokens, settings.shortest_shared)
        self.decoded: list[int] = []
        self.taken = 0
        self.shapes: list[tuple[int, ...]] = []
        model.model.register_forward_pre_hook(self._seen, with_kwargs=True)

    def _seen(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.shapes.append(tuple(kwargs["input_ids"].shape))

    def decode(self, tokens: Any) -> torch.Tensor:
        self.decoded.append(len(tokens))
        return super().decode(tokens)

    def take(self, row: int) -> Any:
        self.taken += 1
        return super().take(row)


def requests_of(
    lengths: list[tuple[int, int]], *, seed: int = 0, **others: Any
) -> list[DenseRequest]:
    """One request for each length of a prompt and of its answer."""
    made = []
    for number, (length, count) in enumerate(lengths):
        (ids,) = prompts(1, seed=100 * seed + number, shortest=length, longest=length)
        made.append(greedy(f"{seed}-{number}", ids, count, place=number, **others))
    return made


def expected(model: LoadedModel, requests: list[DenseRequest]) -> dict[str, list[int]]:
    return {
        request.rid: generated(
            model, request.input_ids, request.stopping.max_new_tokens
        )
        for request in requests
    }


class TestVectorShaping:
    """Section 4.1."""

    def test_a_row_that_joins_changes_no_token_of_the_others(
        self, model: LoadedModel
    ) -> None:
        first = requests_of([(12, 30), (5, 25), (20, 28)])
        second = requests_of([(9, 6), (3, 4)], seed=1)
        run = Run(model, SETTINGS).add(first).steps(7)
        assert set(run.loop.running()) == {request.rid for request in first}
        run.add(second).steps(1)
        assert len(run.loop.running()) == 5
        run.finish()
        assert run.tokens() == expected(model, [*first, *second])

    def test_a_query_is_answered_before_longer_ones_of_its_batch_end(
        self, model: LoadedModel
    ) -> None:
        requests = requests_of([(10, 40), (10, 3), (10, 20)])
        run = Run(model, SETTINGS).add(requests)
        run.finish()
        assert list(run.answers) == ["0-1", "0-2", "0-0"]

    def test_a_waiting_query_takes_the_place_of_one_that_ends(
        self, model: LoadedModel
    ) -> None:
        settings = DenseSettings(max_rows=2)
        requests = requests_of([(8, 20), (8, 5), (8, 5), (8, 5), (8, 5)])
        run = Run(model, settings).add(requests)
        run.finish()
        # Of each answer, prefill has the first token. No step has an empty place.
        assert run.loop.counts.steps == 19
        assert run.loop.counts.decoded_rows == 19 + 4 * 4
        assert run.tokens() == expected(model, requests)


class TestResourceReleasing:
    """Section 4.1."""

    def test_the_front_that_no_row_reaches_any_longer_is_released(
        self, model: LoadedModel
    ) -> None:
        requests = requests_of([(150, 3), (10, 20), (8, 20)])
        run = Run(model, SETTINGS).add(requests).steps(1)
        wide, widest = cells_of(run.rows), run.rows.allocated_cells
        assert wide == 3 * 151
        run.steps(4)
        assert "0-0" in run.answers
        assert cells_of(run.rows) == 2 * 15
        assert run.rows.allocated_cells <= 2 * (15 + slack(15))
        assert run.loop.counts.peak_cells == widest
        run.finish()
        assert run.rows.allocated_cells == 0
        assert run.tokens() == expected(model, requests)


class TestVectorEmbedding:
    """Section 4.2: the KV of a prompt is put into that of the batch."""

    @pytest.mark.parametrize("length", [5, 120], ids=["shorter", "longer"])
    def test_a_prompt_of_any_length_joins_a_batch(
        self, model: LoadedModel, length: int
    ) -> None:
        running = requests_of([(30, 40), (12, 40)])
        (newcomer,) = requests_of([(length, 15)], seed=2)
        run = Run(model, SETTINGS).add(running).steps(4)
        width = max(run.rows.lengths)
        assert (length < width) == (length == 5)
        run.add([newcomer]).steps(1)
        assert list(run.rows.lengths) == [35, 17, length + 1]
        run.finish()
        assert run.tokens() == expected(model, [*running, newcomer])

    def test_rows_that_join_one_by_one_seldom_copy_the_others(
        self, gpt2: LoadedModel
    ) -> None:
        requests = requests_of([(20, 40)] * 16)
        run = Run(gpt2, DenseSettings(max_rows=16))
        for request in requests:
            run.add([request]).steps(1)
        assert len(run.loop.running()) == 16
        # To 3, 6, 10 and 16 rows, and never for want of columns.
        assert run.rows._slab.num_resized == 4
        run.finish()
        assert run.tokens() == expected(gpt2, requests)


class TestPrefillApartFromDecode:
    """Section 4.2."""

    def test_steps_of_a_batch_have_one_token_per_row_whatever_prompt_joins(
        self,
    ) -> None:
        model = wrap(tiny_model("bloom"))
        rows = CountedRows(model, SETTINGS)
        running = requests_of([(10, 20), (6, 20)])
        (newcomer,) = requests_of([(180, 5)], seed=1)
        run = Run(model, SETTINGS, rows=rows).add(running).steps(3)
        run.add([newcomer])
        run.finish()
        prefills = [shape for shape in rows.shapes if shape[1] > 1]
        assert prefills == [(2, 10), (1, 180)]
        steps = [shape for shape in rows.shapes if shape[1] == 1]
        assert steps == [(count, 1) for count in rows.decoded]
        # As many steps as without the newcomer, three of which it did not see.
        assert rows.decoded == [2] * 3 + [3] * 4 + [2] * 12
        assert run.tokens() == expected(model, [*running, newcomer])


class TestPreemption:
    """Section 4.3."""

    def test_a_query_of_high_priority_starts_before_those_of_low_priority_end(
        self,
    ) -> None:
        model = wrap(tiny_model("bloom"))
        settings = DenseSettings(max_rows=2)
        rows = CountedRows(model, settings)
        low = requests_of([(10, 40), (14, 40)])
        (high,) = requests_of([(9, 6)], seed=1, priority=1)
        run = Run(model, settings, rows=rows).add(low).steps(5)
        run.add([high]).steps(1)
        assert high.rid in run.loop.running()
        # The row with the fewest tokens to move made place.
        assert low[0].rid not in run.loop.running()
        assert run.loop.counts.preempted == rows.taken == 1
        run.finish()
        assert next(iter(run.answers)) == high.rid
        # Its KV was kept on the host.
        assert run.loop.counts.recomputed_tokens == 0
        assert rows.computed_tokens == sum(
            len(request.input_ids) for request in [*low, high]
        )
        assert run.tokens() == expected(model, [*low, high])

    def test_the_interrupted_query_comes_back_before_those_that_wait(
        self, model: LoadedModel
    ) -> None:
        settings = DenseSettings(max_rows=1)
        first, waiting = requests_of([(10, 20), (10, 20)])
        (high,) = requests_of([(9, 4)], seed=1, priority=1)
        run = Run(model, settings).add([first, waiting]).steps(5)
        run.add([high]).finish()
        assert list(run.answers) == [high.rid, first.rid, waiting.rid]
        assert run.tokens() == expected(model, [first, waiting, high])

    def test_queries_of_equal_priority_interrupt_none(self, model: LoadedModel) -> None:
        settings = DenseSettings(max_rows=1)
        first, second = requests_of([(10, 20), (5, 2)], priority=3)
        run = Run(model, settings).add([first]).steps(3).add([second])
        run.finish()
        assert list(run.answers) == [first.rid, second.rid]
        assert run.loop.counts.preempted == 0


class TestBatchSizeScaling:
    """Section 4.3: rows go to the host when memory is short, and come back."""

    LENGTHS = ((20, 40), (12, 45), (30, 30), (8, 50), (16, 35), (25, 40))

    @pytest.mark.parametrize("host_cells", [1 << 20, 0], ids=["kept", "computed_again"])
    def test_a_lower_limit_loses_nothing_and_a_higher_one_brings_rows_back(
        self, model: LoadedModel, host_cells: int
    ) -> None:
        settings = DenseSettings(max_rows=8, max_cells=600, host_cells=host_cells)
        requests = requests_of(list(self.LENGTHS))
        run = Run(model, settings).add(requests).steps(10)
        before = len(run.loop.running())
        assert before > 2
        limit = cells_of(run.rows) // 2
        run.limit_cells(limit)
        for _ in range(8):
            run.steps(1)
            assert cells_of(run.rows) <= limit
        fewer = len(run.loop.running())
        assert 1 <= fewer < before
        run.limit_cells(4000)
        run.steps(1)
        assert len(run.loop.running()) > fewer
        answers = run.finish()
        assert {answer.reason for answer in answers.values()} == {"length"}
        assert run.tokens() == expected(model, requests)
        assert run.loop.counts.preempted >= before - fewer
        assert (run.loop.counts.recomputed_tokens > 0) == (host_cells == 0)

    def test_the_host_takes_only_as_many_cells_as_it_may(
        self, model: LoadedModel
    ) -> None:
        settings = DenseSettings(max_rows=8, host_cells=40)
        requests = requests_of(list(self.LENGTHS))
        run = Run(model, settings).add(requests).steps(10)
        run.limit_cells(90)
        run.steps(2)
        run.limit_cells(2000)
        run.finish()
        computed = run.loop.counts.recomputed_tokens
        assert 0 < computed < 10 * len(requests) + sum(n for n, _ in self.LENGTHS)
        assert run.tokens() == expected(model, requests)

    def test_no_step_uses_more_cells_than_the_limit(self, model: LoadedModel) -> None:
        settings = DenseSettings(max_rows=8, max_cells=250)
        # Answers are longer than expected, so rows must leave in mid-run.
        requests = requests_of(list(self.LENGTHS), expected_len=4)
        run = Run(model, settings).add(requests)
        while run.loop.can_step:
            run.steps(1)
            assert cells_of(run.rows) <= 250
        assert run.loop.counts.preempted > 0
        assert run.tokens() == expected(model, requests)


class TestShortMemory:
    """Section 4.3: the batch shrinks where memory runs out, and grows again."""

    FAILING = (
        ("prefill", (1, 2)),
        ("prefill", (4, 9, 10)),
        ("join", (1, 2)),
        ("join", (2, 3)),
        ("decode", (1,)),
        ("decode", (5, 6)),
        ("decode", (3, 20)),
    )

    def requests(self) -> list[DenseRequest]:
        return [
            greedy(str(place), ids, 10 + 5 * (place % 4), place=place)
            for place, ids in enumerate(prompts(10, seed=12))
        ]

    @pytest.mark.slow
    @pytest.mark.parametrize("host_cells", [1 << 20, 0], ids=["kept", "computed_again"])
    @pytest.mark.parametrize(
        ("name", "calls"), FAILING, ids=[f"{name}{calls}" for name, calls in FAILING]
    )
    def test_fewer_rows_run_and_nothing_is_lost(
        self, gpt2: LoadedModel, name: str, calls: tuple[int, ...], host_cells: int
    ) -> None:
        settings = DenseSettings(max_rows=6, shortest_shared=4, host_cells=host_cells)
        real = SlabRows(gpt2, settings.prefill_tokens, settings.shortest_shared)
        rows = ShortOfMemory(real, {name: calls})
        requests = self.requests()
        run = Run(gpt2, settings, rows=rows).add(requests)
        answers = run.finish()
        assert rows.calls[name] > max(calls)
        assert {answer.error for answer in answers.values()} == {None}
        assert run.tokens() == expected(gpt2, requests)

    @pytest.mark.slow
    def test_a_step_without_memory_halves_the_rows_which_grow_again(
        self, gpt2: LoadedModel
    ) -> None:
        settings = DenseSettings(max_rows=4)
        rows = ShortOfMemory(SlabRows(gpt2, 4096, 16), {"decode": (4,)})
        requests = [
            greedy(str(place), ids, 200)
            for place, ids in enumerate(prompts(4, seed=12, longest=20))
        ]
        run = Run(gpt2, settings, rows=rows).add(requests).steps(4)
        assert len(run.loop.running()) == 2
        run.steps(60)
        assert len(run.loop.running()) == 2
        run.steps(10)
        assert len(run.loop.running()) == 3
        run.steps(64)
        assert len(run.loop.running()) == 4
        run.finish()
        assert run.tokens() == expected(gpt2, requests)

    def test_a_row_whose_step_does_not_fit_alone_fails_with_what_it_has(
        self, gpt2: LoadedModel
    ) -> None:
        settings = DenseSettings(max_rows=1)
        requests = self.requests()[:2]
        rows = ShortOfMemory(SlabRows(gpt2, 4096, 16), {"decode": (4, 5)})
        run = Run(gpt2, settings, rows=rows).add(requests)
        answers = run.finish()
        assert "memory" in str(answers["0"].error)
        tokens, right = run.tokens(), expected(gpt2, requests)
        assert tokens == {"0": right["0"][:4], "1": right["1"]}

    def test_a_request_that_does_not_fit_alone_is_the_only_one_that_fails(
        self, gpt2: LoadedModel
    ) -> None:
        settings = DenseSettings(max_rows=1)
        requests = self.requests()[:3]
        # The first time with others, which are computed ahead, the second time alone.
        rows = ShortOfMemory(SlabRows(gpt2, 4096, 16), {"prefill": (1, 2)})
        run = Run(gpt2, settings, rows=rows).add(requests)
        answers = run.finish()
        assert "memory" in str(answers["0"].error)
        tokens = run.tokens()
        assert {rid: tokens[rid] for rid in "12"} == expected(gpt2, requests[1:])

    def test_answers_of_an_encoder_decoder_do_not_become_its_prompt(self) -> None:
        model = wrap(tiny_model("mbart", encoder_decoder=True))
        settings = DenseSettings(max_rows=3, max_cells=1000)
        requests = [
            greedy(str(place), ids, 20)
            for place, ids in enumerate(prompts(3, shortest=20, longest=20))
        ]
        rows = ShortOfMemory(SeparateRows(model), {"prefill": (3,)})
        run = Run(model, settings, rows=rows).add(requests[:2]).steps(5)
        run.limit_cells(45)
        run.steps(1)
        assert run.loop.counts.preempted == 1
        # The row that comes back and a new one join together, and memory is short.
        run.limit_cells(1000)
        run.add(requests[2:]).finish()
        assert rows.calls["prefill"] == 4
        assert run.tokens() == expected(model, requests)
