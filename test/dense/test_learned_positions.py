"""Position embeddings of decoders, in batches whose columns are not positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from sglang_batch.dense.model import LearnedPositions

POSITIONS = torch.tensor([[4], [9], [0]])
"""Of one token of each of three rows."""


def embeddings_of(kind: str) -> tuple[Any, LearnedPositions]:
    """A decoder's position embeddings, and what hands positions to them."""
    model = tiny_model(kind)
    learned = LearnedPositions.of(model)
    assert learned is not None
    return model.model.decoder.embed_positions, learned


# The three ways in which they answer: [1, rows, ...], [rows, ...] and a slice of weights.
@pytest.mark.parametrize("kind", ["bart", "pegasus", "whisper"])
@torch.no_grad()
def test_each_row_has_its_own_position(kind: str) -> None:
    embed, learned = embeddings_of(kind)
    ids = torch.zeros(3, 1, dtype=torch.int64)
    shape_or_ids = ids.shape if kind == "pegasus" else ids
    with learned.given(POSITIONS):
        found = embed(shape_or_ids, 7)
    assert found.shape[:2] == (3, 1)
    for row, position in enumerate(POSITIONS.flatten().tolist()):
        one = ids[:1].shape if kind == "pegasus" else ids[:1]
        alone = embed(one, position).reshape(-1)
        assert torch.equal(found[row, 0], alone)


@pytest.mark.parametrize("kind", ["led", "m2m_100", "fsmt"])
@torch.no_grad()
def test_embeddings_that_take_no_positions_are_asked_for_each_row(kind: str) -> None:
    model = tiny_model(kind, encoder_decoder=True)
    learned = LearnedPositions.of(model)
    assert learned is not None
    embed = model.get_decoder().embed_positions
    ids = torch.tensor([[5, 6], [7, 8], [9, 10]])

    def call(rows: torch.Tensor, past: int) -> torch.Tensor:
        asked = rows.shape if kind == "led" else rows
        found: torch.Tensor = embed(asked, past_key_values_length=past)
        return found

    with learned.given(POSITIONS + torch.arange(2)):
        found = call(ids, 7)
    assert found.shape[:2] == (3, 2)
    for row, position in enumerate(POSITIONS.flatten().tolist()):
        alone = call(ids[row : row + 1], position)
        assert torch.equal(found[row].flatten(), alone.flatten())


@torch.no_grad()
def test_without_positions_they_count_as_before_even_after_an_error() -> None:
    embed, learned = embeddings_of("bart")
    ids = torch.zeros(3, 1, dtype=torch.int64)
    before = embed(ids, 7)
    with pytest.raises(ZeroDivisionError), learned.given(POSITIONS):
        raise ZeroDivisionError
    assert torch.equal(embed(ids, 7), before)


@pytest.mark.parametrize("kind", ["opt", "xglm", "bloom", "roformer"])
def test_other_models_are_left_alone(kind: str) -> None:
    # OPT and XGLM take positions themselves, and RoFormer's are no embeddings of rows.
    assert LearnedPositions.of(tiny_model(kind)) is None
