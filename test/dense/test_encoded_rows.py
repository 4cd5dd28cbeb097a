"""Rows of an encoder-decoder that share batches, against ``generate`` for each alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense_runs import Run, ShortOfMemory, generated, greedy, prompts
from tiny_models import tiny_model

from sglang_batch.dense.model import LoadedModel, wrap
from sglang_batch.dense.row_request import DenseRequest, DenseSettings, LogprobsWanted
from sglang_batch.dense.rows import EncodedRows


@pytest.fixture(scope="module", params=["mbart", "t5"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    plain = tiny_model(request.param, encoder_decoder=True)
    plain.generation_config.decoder_start_token_id = 1
    return wrap(plain)


def requests_of(count: int, longest: int = 30) -> list[DenseRequest]:
    all_ids = prompts(count, seed=21, longest=longest)
    return [
        greedy(str(place), ids, 5 + 7 * (place % 4), place=place)
        for place, ids in enumerate(all_ids)
    ]


def expected(model: LoadedModel, requests: list[DenseRequest]) -> dict[str, list[int]]:
    return {
        each.rid: generated(model, each.input_ids, each.stopping.max_new_tokens)
        for each in requests
    }


def run_of(model: LoadedModel, settings: DenseSettings) -> Run:
    return Run(model, settings, rows=EncodedRows(model, settings.prefill_tokens))


class Shapes:
    """Rows and tokens of the forward passes of a module, by the name of its ids."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.found: list[tuple[int, ...]] = []
        module.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.found.append(tuple(kwargs["input_ids"].shape))


def test_rows_that_join_and_leave_at_any_time_share_each_step(
    model: LoadedModel,
) -> None:
    requests = requests_of(9)
    right = expected(model, requests)
    steps = Shapes(model.model.get_decoder())
    run = run_of(model, DenseSettings(max_rows=4)).add(requests[:3]).steps(4)
    run.add(requests[3:]).finish()
    assert run.tokens() == right
    assert all(tokens == 1 for _, tokens in steps.found)
    counts = run.loop.counts
    assert counts.decoded_rows > 2.5 * counts.steps
    assert run.rows.allocated_cells == 0


@pytest.mark.parametrize("most", [1, 50, 4096])
def test_prompts_are_encoded_together_within_the_limit(
    model: LoadedModel, most: int
) -> None:
    requests = requests_of(12)
    right = expected(model, requests)
    encoded = Shapes(model.model.get_encoder())
    settings = DenseSettings(max_rows=8, prefill_tokens=most)
    run = run_of(model, settings).add(requests)
    run.finish()
    assert run.tokens() == right
    assert all(rows == 1 or rows * longest <= most for rows, longest in encoded.found)
    assert sum(rows for rows, _ in encoded.found) == 12
    assert (max(rows for rows, _ in encoded.found) > 1) == (most > 1)
    assert run.rows.computed_tokens == sum(len(each.input_ids) for each in requests)


def test_a_preempted_row_comes_back_with_both_parts(model: LoadedModel) -> None:
    settings = DenseSettings(max_rows=2, host_cells=0)
    low = [greedy(str(n), ids, 20) for n, ids in enumerate(prompts(2, seed=3))]
    high = greedy("high", [9, 8, 7], 4, priority=1)
    run = run_of(model, settings).add(low).steps(5).add([high])
    run.finish()
    assert run.loop.counts.preempted == 1
    # What the decoder has answered cannot become the encoder's prompt.
    assert run.loop.counts.recomputed_tokens == 0
    assert run.tokens() == expected(model, [*low, high])


@pytest.mark.parametrize(
    ("name", "calls"), [("prefill", (2,)), ("join", (1, 3)), ("decode", (3, 4, 9))]
)
def test_nothing_is_lost_where_memory_runs_out(
    model: LoadedModel, name: str, calls: tuple[int, ...]
) -> None:
    requests = requests_of(8)
    rows = ShortOfMemory(EncodedRows(model, 4096), {name: calls})
    run = Run(model, DenseSettings(max_rows=4), rows=rows).add(requests)
    answers = run.finish()
    assert rows.calls[name] > max(calls)
    assert {answer.error for answer in answers.values()} == {None}
    assert run.tokens() == expected(model, requests)


def test_both_parts_have_the_same_rows_after_a_join_that_broke_off(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of(6)
    run = run_of(model, DenseSettings(max_rows=6)).add(requests[:3]).steps(2)
    answers = run.rows._answers
    insert = answers.insert
    failing = [True]

    def insert_later(rows: Any) -> None:
        if failing.pop() if failing else False:
            raise torch.OutOfMemoryError
        insert(rows)

    monkeypatch.setattr(answers, "insert", insert_later)
    run.add(requests[3:]).steps(1)
    assert not failing
    assert len(run.rows._answers) == len(run.rows._prompts)
    run.finish()
    assert run.tokens() == expected(model, requests)


def test_a_row_that_is_not_finite_fails_alone() -> None:
    broken = tiny_model("mbart", encoder_decoder=True)
    with torch.no_grad():
        broken.get_encoder().embed_tokens.weight[251] = torch.nan
    model = wrap(broken)
    good = requests_of(4)
    bad = greedy("bad", [5, 251, 6], 9)
    run = run_of(model, DenseSettings(max_rows=5)).add([*good[:2], bad, *good[2:]])
    answers = run.finish()
    assert "NaN" in str(answers.pop("bad").error)
    tokens = run.tokens()
    assert {rid: tokens[rid] for rid in answers} == expected(model, good)


def test_log_probabilities_of_a_prompt_are_refused(model: LoadedModel) -> None:
    asked = greedy("asked", [5, 6, 7, 8], 4, logprobs=LogprobsWanted(prompt_from=0))
    good = requests_of(2)
    answers = run_of(model, DenseSettings()).add([asked, *good]).finish()
    told = "The model gives no log probabilities of a prompt."
    assert answers["asked"].error == told
    assert answers["0"].error is None
