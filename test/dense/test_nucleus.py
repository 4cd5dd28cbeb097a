"""Top-p, against a stable sort of all tokens."""

from __future__ import annotations

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_batch.dense.row_request import Sampling
from sglang_batch.dense.sampling import RowSampler, choose, keep_nucleus

VOCAB = 20_000


def sorted_whole(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """What is kept by a stable sort of all tokens."""
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.double().cumsum(-1) - ordered
    ordered[before > top_ps] = 0.0
    return torch.zeros_like(probs).scatter_(-1, ids, ordered)


def column(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def drawn_probs(spreads: list[float], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """A row for each spread of the logits. In bfloat16, many are equal."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(spreads), VOCAB, generator=generator)
    logits = logits * torch.tensor(spreads)[:, None]
    return logits.to(dtype).float().softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_the_same_tokens_are_kept_as_by_a_sort(seed: int, dtype: torch.dtype) -> None:
    spreads = [0.0, 0.1, 1.0, 2.0, 3.0, 4.0, 6.0, 20.0]
    for top_p in (0.05, 0.5, 0.9, 0.95, 0.999, 1 - 1e-9):
        probs = drawn_probs(spreads, seed, dtype)
        top_ps = column([top_p] * len(spreads))
        expected = sorted_whole(probs, top_ps)
        keep_nucleus(probs, top_ps)
        assert torch.equal(probs, expected)


@settings(deadline=None, max_examples=examples(200))
@given(
    st.lists(
        st.lists(st.integers(0, 4), min_size=12, max_size=12).filter(any),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9]), min_size=4, max_size=4),
)
def test_of_equal_probabilities_the_first_are_kept(
    weights: list[list[int]], top_ps: list[float]
) -> None:
    probs = torch.tensor(weights, dtype=torch.float32)
    probs /= probs.sum(-1, keepdim=True)
    limits = column(top_ps[: len(weights)])
    expected = sorted_whole(probs, limits)
    keep_nucleus(probs, limits)
    assert torch.equal(probs, expected)


def test_tokens_of_a_vocabulary_are_not_sorted_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_sort(*args: object, **kwargs: object) -> None:
        raise AssertionError("tokens are sorted")

    monkeypatch.setattr(torch.Tensor, "sort", no_sort)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    rows = [
        RowSampler(Sampling(temperature=0.3, top_p=0.95), vocab_size=VOCAB, seed=row)
        for row in range(4)
    ]
    assert len(set(choose(logits, rows).tokens)) > 1
