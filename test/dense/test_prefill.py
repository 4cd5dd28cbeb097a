"""Prefill of prompts that share prefixes, against a forward pass for each alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from dense_runs import greedy, prompts
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model

from sglang_batch.dense.model import LoadedModel, wrap
from sglang_batch.dense.prefill import Prefill, cheapest_cuts
from sglang_batch.dense.row_request import DenseRequest, LogprobsWanted

SHORTEST = 4
NO_LIMIT = 1 << 20


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return wrap(tiny_model("gpt2"))


class CountedModel:
    """A model, and the rows and columns of the tokens that it was given."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self.shapes: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def logits(self, input_ids: torch.Tensor, *others: Any) -> torch.Tensor:
        self.shapes.append((input_ids.shape[0], input_ids.shape[1]))
        return self._model.logits(input_ids, *others)


def alone(model: LoadedModel, ids: Sequence[int]) -> torch.Tensor:
    """Logits of a forward pass without a cache, ``[tokens, vocab]``."""
    with torch.inference_mode():
        logits: torch.Tensor = model.model(torch.tensor([list(ids)])).logits[0]
    return logits


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.allclose(one, other, rtol=1e-4, atol=1e-4))


def trie_tokens(all_ids: Sequence[Sequence[int]]) -> int:
    """Tokens of the prefix tree of prompts, each node once."""
    return len({tuple(ids[:end]) for ids in all_ids for end in range(1, len(ids) + 1)})


def tree() -> list[list[int]]:
    """Prompts of a prefix tree of three levels, depth first. Branches have 5 tokens or
    more, so that each is worth sharing."""
    root, *parts = prompts(9, seed=3, shortest=6, longest=12)
    a, b, c, *leaves = parts
    return [
        [*root, *a, *b, *leaves[0]],
        [*root, *a, *b, *leaves[1]],
        [*root, *a, *c, *leaves[2]],
        [*root, *a, *c, *leaves[3]],
        [*root, *leaves[4]],
    ]


def requests_of(all_ids: Sequence[Sequence[int]]) -> Iterator[DenseRequest]:
    for number, ids in enumerate(all_ids):
        yield greedy(str(number), ids, 4, place=number)


def test_each_node_of_the_prefix_tree_is_computed_once(model: LoadedModel) -> None:
    prefill = Prefill(model, NO_LIMIT, SHORTEST)
    all_ids = tree()
    found = list(prefill.compute(list(requests_of(all_ids))))
    assert prefill.computed_tokens == trie_tokens(all_ids)
    cached = {each.request.rid: each.cached_tokens for each in found}
    root = len(all_ids[4]) - len(prompts(9, seed=3, shortest=6, longest=12)[8])
    assert cached["4"] == root
    # What the first computes of a prefix is no one else's, nor from the cache.
    assert cached["0"] == 0
    assert root < cached["2"] < min(cached["1"], cached["3"])
    for each in found:
        assert close(each.logits, alone(model, each.request.input_ids)[-1])
        assert each.kv.length == len(each.request.input_ids)
        assert each.prompt_logits is None


def test_prefixes_are_shared_from_one_call_to_the_next(model: LoadedModel) -> None:
    prefill = Prefill(model, NO_LIMIT, SHORTEST)
    all_ids = tree()
    requests = list(requests_of(all_ids))
    for request, then in zip(requests, [*requests[1:], None], strict=True):
        list(prefill.compute([request], then))
    assert prefill.computed_tokens == trie_tokens(all_ids)


def test_what_was_forgotten_is_computed_again(model: LoadedModel) -> None:
    prefill = Prefill(model, NO_LIMIT, SHORTEST)
    first, second = list(requests_of(tree()))[:2]
    list(prefill.compute([first], second))
    prefill.forget()
    (found,) = prefill.compute([second])
    assert found.cached_tokens == 0
    assert prefill.computed_tokens == len(first.input_ids) + len(second.input_ids)
    assert close(found.logits, alone(model, second.input_ids)[-1])


def test_a_prefix_shorter_than_the_shortest_is_computed_again(
    model: LoadedModel,
) -> None:
    stem, one, other = prompts(3, shortest=9, longest=9)
    all_ids = [[*stem[: SHORTEST - 1], *one], [*stem[: SHORTEST - 1], *other]]
    counted = CountedModel(model)
    prefill = Prefill(counted, NO_LIMIT, SHORTEST)  # type: ignore[arg-type]
    found = list(prefill.compute(list(requests_of(all_ids))))
    assert prefill.computed_tokens == sum(map(len, all_ids))
    assert [each.cached_tokens for each in found] == [0, 0]
    assert counted.shapes == [(2, SHORTEST - 1 + 9)]


def test_equal_prompts_compute_only_the_last_token_twice(model: LoadedModel) -> None:
    (ids,) = prompts(1, shortest=20, longest=20)
    prefill = Prefill(model, NO_LIMIT, SHORTEST)
    found = list(prefill.compute(list(requests_of([ids, ids, ids]))))
    assert prefill.computed_tokens == 19 + 3
    assert [each.cached_tokens for each in found] == [0, 19, 19]
    for each in found:
        assert close(each.logits, alone(model, ids)[-1])


def test_a_prompt_that_begins_another_shares_all_but_its_last_token(
    model: LoadedModel,
) -> None:
    (ids,) = prompts(1, shortest=30, longest=30)
    for all_ids in ([ids[:12], ids], [ids, ids[:12]], [ids[:12], ids, ids[:12]]):
        prefill = Prefill(model, NO_LIMIT, SHORTEST)
        found = list(prefill.compute(list(requests_of(all_ids))))
        assert prefill.computed_tokens <= len(ids) + len(all_ids)
        for each in found:
            assert close(each.logits, alone(model, each.request.input_ids)[-1])


@pytest.mark.parametrize("most", [1, 40, 100])
def test_batches_keep_to_the_limit_with_their_padding(
    model: LoadedModel, most: int
) -> None:
    counted = CountedModel(model)
    prefill = Prefill(counted, most, SHORTEST)  # type: ignore[arg-type]
    all_ids = prompts(20, seed=1, shortest=2, longest=30)
    found = list(prefill.compute(list(requests_of(all_ids))))
    assert sorted(int(each.request.rid) for each in found) == list(range(20))
    for rows, columns in counted.shapes:
        assert rows == 1 or rows * columns <= most
    if most == 100:
        assert any(rows > 1 for rows, _ in counted.shapes)
    for each in found:
        assert close(each.logits, alone(model, each.request.input_ids)[-1])
    assert prefill.computed_tokens == sum(map(len, all_ids))


@pytest.mark.parametrize("begin", [0, 7, 15, 29])
def test_logits_of_a_prompt_equal_those_of_a_forward_pass(
    model: LoadedModel, begin: int
) -> None:
    stem, *leaves = prompts(4, seed=2, shortest=15, longest=15)
    all_ids = [[*stem, *leaf] for leaf in leaves]
    requests = list(requests_of(all_ids))
    requests[1] = greedy("1", all_ids[1], 4, logprobs=LogprobsWanted(prompt_from=begin))
    prefill = Prefill(model, NO_LIMIT, SHORTEST)
    found = {each.request.rid: each for each in prefill.compute(requests)}
    asked = found["1"]
    assert asked.prompt_logits is not None
    assert close(asked.prompt_logits, alone(model, all_ids[1])[begin:])
    assert asked.cached_tokens <= begin
    for number, ids in enumerate(all_ids):
        assert close(found[str(number)].logits, alone(model, ids)[-1])


def test_random_trees_in_any_order_give_the_logits_of_each_prompt_alone(
    model: LoadedModel,
) -> None:
    stems = prompts(5, seed=7, shortest=1, longest=25)
    leaves = prompts(40, seed=8, shortest=1, longest=20)
    all_ids = [[*stems[n % 5], *stems[n % 3], *leaf] for n, leaf in enumerate(leaves)]
    for order in (all_ids, sorted(all_ids)):
        prefill = Prefill(model, 150, SHORTEST)
        found = list(prefill.compute(list(requests_of(order))))
        assert len(found) == len(order)
        for each in found:
            assert close(each.logits, alone(model, each.request.input_ids)[-1])
        cached = sum(each.cached_tokens for each in found)
        assert prefill.computed_tokens + cached == sum(map(len, all_ids))
    assert prefill.computed_tokens < 0.8 * sum(map(len, all_ids))


def test_prompts_of_about_the_same_length_are_computed_together(
    model: LoadedModel,
) -> None:
    counted = CountedModel(model)
    lengths = [100, 3, 90, 5, 97, 4]
    requests = [
        greedy(str(i), prompts(1, seed=i, shortest=n, longest=n)[0], 1)
        for i, n in enumerate(lengths)
    ]
    prefill = Prefill(counted, NO_LIMIT, SHORTEST)  # type: ignore[arg-type]
    found = {each.request.rid: each for each in prefill.compute(requests)}
    assert counted.shapes == [(3, 100), (3, 5)]
    for request in requests:
        expected = alone(model, request.input_ids)[-1]
        assert close(found[request.rid].logits, expected)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=7),
    st.integers(1, 40),
    st.integers(1, 120),
)
def test_cuts_are_the_cheapest_of_all(lengths: list[int], each: int, most: int) -> None:
    lengths.sort(reverse=True)
    n = len(lengths)

    def cost(cuts: Sequence[tuple[int, int]]) -> int | None:
        batches = [(end - begin, lengths[begin] * (end - begin)) for begin, end in cuts]
        if any(count > 1 and tokens > most for count, tokens in batches):
            return None
        return sum(each + tokens for _, tokens in batches)

    choices = []
    for chosen in range(1 << (n - 1)):
        ends = [i + 1 for i in range(n - 1) if chosen >> i & 1] + [n]
        choices.append(cost(list(zip([0, *ends], ends, strict=False))))
    found = cheapest_cuts(lengths, each, most)
    assert [begin for begin, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == n
    assert cost(found) == min(each for each in choices if each is not None)
