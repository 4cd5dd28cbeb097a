"""Steps that run out of memory: memory that is released, and tokens that are computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense_runs import Run, ShortOfMemory, generated, greedy, prompts
from tiny_models import tiny_model

from sglang_batch.dense.model import LoadedModel, wrap
from sglang_batch.dense.row_request import DenseRequest, DenseSettings
from sglang_batch.dense.rows import SeparateRows, SlabRows


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return wrap(tiny_model("gpt2"))


class Released(ShortOfMemory):
    """Counts what is released."""

    forgotten = moved = 0

    def forget(self) -> None:
        self.forgotten += 1
        self._rows.forget()

    def to_host(self, kv: Any) -> Any:
        self.moved += 1
        return self._rows.to_host(kv)


def requests_of(count: int) -> list[DenseRequest]:
    return [
        greedy(str(place), ids, 10 + 3 * place, place=place)
        for place, ids in enumerate(prompts(count, seed=12))
    ]


def expected(model: LoadedModel, requests: list[DenseRequest]) -> dict[str, list[int]]:
    return {
        each.rid: generated(model, each.input_ids, each.stopping.max_new_tokens)
        for each in requests
    }


def test_a_row_alone_is_tried_again_without_what_is_kept_for_others(
    model: LoadedModel,
) -> None:
    requests = requests_of(3)
    rows = Released(SlabRows(model, 4096, 4), {"decode": (4,)})
    run = Run(model, DenseSettings(max_rows=1), rows=rows).add(requests).steps(3)
    assert (rows.forgotten, rows.moved) == (0, 0)
    run.steps(1)
    # Two prompts had been computed ahead, on the device.
    assert (rows.forgotten, rows.moved) == (1, 2)
    assert rows.calls["decode"] == 5
    assert run.loop.running() == ["0"]
    answers = run.finish()
    assert {answer.error for answer in answers.values()} == {None}
    assert run.tokens() == expected(model, requests)


def test_it_is_tried_again_at_every_step_that_runs_out_of_memory(
    model: LoadedModel,
) -> None:
    requests = requests_of(2)
    rows = Released(SlabRows(model, 4096, 4), {"decode": (4, 6, 9, 15)})
    run = Run(model, DenseSettings(max_rows=1), rows=rows).add(requests)
    answers = run.finish()
    assert {answer.error for answer in answers.values()} == {None}
    assert run.tokens() == expected(model, requests)


def test_several_rows_are_halved_and_nothing_is_kept_for_others(
    model: LoadedModel,
) -> None:
    requests = requests_of(6)
    rows = Released(SlabRows(model, 4096, 4), {"decode": (4,)})
    run = Run(model, DenseSettings(max_rows=4), rows=rows).add(requests).steps(4)
    assert len(run.loop.running()) == 2
    assert rows.forgotten == 1
    run.finish()
    assert run.tokens() == expected(model, requests)


class OutOfMemoryIn:
    """Runs out of memory in some of the calls of a module, counted from 1."""

    def __init__(self, module: torch.nn.Module, failing: tuple[int, ...]) -> None:
        self.calls, self._failing = 0, failing
        module.register_forward_pre_hook(self._count)

    def _count(self, module: torch.nn.Module, args: Any) -> None:
        self.calls += 1
        if self.calls in self._failing:
            raise torch.OutOfMemoryError(f"call {self.calls}")


LAST_LAYERS = {
    "jamba": "model.layers.1",
    "olmo_hybrid": "model.layers.1",
    "roformer": "roformer.encoder.layer.1",
    "mbart": "model.decoder.layers.1",
    "t5": "decoder.block.1",
}
"""The last of two layers: the first has taken the token when it runs out of memory."""


# Calls 1 to 3 are prompts. 5 and 8 are the second rows of steps, 4 and 15 first ones.
@pytest.mark.parametrize("failing", [(5,), (4, 8, 15)], ids=str)
@pytest.mark.parametrize("kind", LAST_LAYERS)
def test_a_step_that_broke_off_leaves_the_caches_of_separate_rows_right(
    kind: str, failing: tuple[int, ...]
) -> None:
    encodes = kind in ("mbart", "t5")
    plain = tiny_model(kind, encoder_decoder=True if encodes else None)
    if encodes:
        plain.generation_config.decoder_start_token_id = 1
    model = wrap(plain)
    requests = requests_of(3)
    right = expected(model, requests)
    memory = OutOfMemoryIn(plain.get_submodule(LAST_LAYERS[kind]), failing)
    run = Run(model, DenseSettings(max_rows=3), rows=SeparateRows(model))
    answers = run.add(requests).finish()
    assert memory.calls > max(failing)
    assert {answer.error for answer in answers.values()} == {None}
    assert run.tokens() == right
