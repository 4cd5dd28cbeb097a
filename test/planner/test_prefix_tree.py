"""The prefix tree, against sorted lists and sets of prefixes made the slow way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from prefix_tree_check import check_prefix_tree, shared_with_previous

from sglang_batch.planner.prefixes import prefix_sort
from sglang_batch.planner.prefixes.prefix_tree import (
    PrefixTree,
    build_prefix_tree,
)

Prompt = tuple[int, ...]
Job = tuple[PrefixTree, NDArray[np.int32], NDArray[np.int64]]

# Few distinct tokens, so that prompts share prefixes and repeat, and the highest id.
TOKEN_IDS = st.sampled_from([0, 1, 2, 255, 256, 65_535, 2**31 - 2, 2**31 - 1])
PROMPTS = st.lists(
    st.lists(st.one_of(st.integers(0, 1), TOKEN_IDS), max_size=9).map(tuple),
    max_size=25,
)
DTYPES = {
    "order": np.int64,
    "input_len": np.int32,
    "lcp": np.int32,
    "leaf_parent": np.int32,
    "parent": np.int32,
    "depth": np.int32,
    "leaf_begin": np.int64,
    "leaf_end": np.int64,
}


def as_arrays(
    prompts: Sequence[Prompt],
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    tokens = np.array([token for prompt in prompts for token in prompt], dtype=np.int32)
    offsets = np.cumsum([0, *map(len, prompts)], dtype=np.int64)
    return tokens, offsets


def build(prompts: Sequence[Prompt]) -> PrefixTree:
    return build_prefix_tree(*as_arrays(prompts))


def common_prefix(a: Prompt, b: Prompt) -> Prompt:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return a[:length]


def expected_tree(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """The arrays of the tree, from the set of prefixes that two requests share."""
    n = len(prompts)
    order = sorted(range(n), key=prompts.__getitem__)  # sorted() is stable
    leaves = [prompts[i] for i in order]
    nodes: list[Prompt] = sorted(
        {(), *(common_prefix(a, b) for k, a in enumerate(leaves) for b in leaves[:k])}
    )
    below = [
        [k for k, leaf in enumerate(leaves) if leaf[: len(node)] == node]
        for node in nodes
    ]

    def deepest(prompt: Prompt, lengths: range) -> int:
        return max(
            (nodes.index(prompt[:d]) for d in lengths if prompt[:d] in nodes),
            default=-1,
        )

    lcp = [len(common_prefix(a, b)) for a, b in pairwise(leaves)]
    return {
        "order": order,
        "input_len": [len(leaf) for leaf in leaves],
        "lcp": [0, *lcp] if n else [],
        "leaf_parent": [deepest(leaf, range(len(leaf) + 1)) for leaf in leaves],
        "parent": [deepest(node, range(len(node))) for node in nodes],
        "depth": [len(node) for node in nodes],
        "leaf_begin": [min(leaf, default=0) for leaf in below],
        "leaf_end": [max(leaf, default=-1) + 1 for leaf in below],
    }


def num_distinct_prefixes(prompts: Sequence[Prompt]) -> int:
    return len({prompt[:d] for prompt in prompts for d in range(1, len(prompt) + 1)})


def assert_is_expected(tree: PrefixTree, prompts: Sequence[Prompt]) -> None:
    for name, values in expected_tree(prompts).items():
        array = getattr(tree, name)
        assert array.tolist() == values, name
        assert array.dtype == DTYPES[name], name


@settings(deadline=None, max_examples=examples(300))
@given(PROMPTS)
def test_tree_is_the_set_of_prefixes_that_requests_share(prompts: list[Prompt]) -> None:
    tree = build(prompts)
    assert_is_expected(tree, prompts)
    check_prefix_tree(tree, *as_arrays(prompts))


@settings(deadline=None)
@given(PROMPTS)
def test_counts_and_ratio(prompts: list[Prompt]) -> None:
    tree = build(prompts)
    num_tokens, num_unique = sum(map(len, prompts)), num_distinct_prefixes(prompts)
    assert tree.num_requests == len(prompts)
    assert tree.num_nodes == len(expected_tree(prompts)["depth"])
    assert tree.num_tokens == num_tokens
    assert tree.num_unique_tokens == num_unique
    expected = (num_tokens - num_unique) / num_tokens if num_tokens else 0.0
    assert tree.prefix_sharing_ratio == expected


@settings(deadline=None)
@given(PROMPTS)
def test_sums_below_each_node(prompts: list[Prompt]) -> None:
    tree = build(prompts)
    values = np.arange(1.0, len(prompts) + 1) ** 2
    unique, sums = (
        tree.unique_below(tree.input_len, tree.lcp),
        tree.subtree_sums(values),
    )
    assert (unique.dtype, sums.dtype) == (np.int64, np.float64)
    assert len(unique) == len(sums) == tree.num_nodes
    for node in range(tree.num_nodes):
        leaves = slice(tree.leaf_begin[node], tree.leaf_end[node])
        below = [prompts[i] for i in tree.order[leaves]]
        assert unique[node] == num_distinct_prefixes(below)
        assert sums[node] == values[leaves].sum()


def many_prompts(seed: int, num_prompts: int, num_groups: int = 12) -> list[Prompt]:
    """Groups with a shared part of any length, some in groups of groups, some equal."""
    rng = np.random.default_rng(seed)
    ids = np.array([0, 1, 300, 70_000, 2**24, 2**31 - 1])

    def draw(most: int) -> Prompt:
        return tuple(rng.choice(ids, rng.integers(0, most + 1)).tolist())

    common, shared = draw(40), [draw(30) for _ in range(num_groups)]
    prompts = [
        common * (group % 2) + shared[group] + draw(3)
        for group in rng.integers(0, num_groups, num_prompts).tolist()
    ]
    return [*prompts, (), common]


@pytest.mark.parametrize("seed", range(6))
def test_groups_of_hundreds(seed: int) -> None:
    prompts = many_prompts(seed, num_prompts=300, num_groups=2 + 5 * (seed % 2))
    assert_is_expected(build(prompts), prompts)


@settings(deadline=None, max_examples=examples(50))
@given(PROMPTS, st.integers(0, 3))
def test_threads_make_the_same_tree(prompts: list[Prompt], rounds: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prefix_sort, "_MANY", 1)
        patched.setattr(prefix_sort, "_MOST_ROUNDS", rounds)
        assert_is_expected(build(prompts), prompts)


def test_threads_sort_hundreds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_sort, "_MANY", 1)
    prompts = many_prompts(3, 600)
    assert_is_expected(build(prompts), prompts)


@pytest.mark.parametrize("top", [1, 2**8, 2**15, 2**31 - 1])
def test_ids_of_any_size_sort_by_value(top: int) -> None:
    rng = np.random.default_rng(top)
    ids = rng.integers(0, top, (500, 3), endpoint=True)
    prompts = [tuple(row) for row in ids.tolist()]
    assert_is_expected(build(prompts), prompts)


def test_no_requests() -> None:
    tree = build([])
    assert_is_expected(tree, [])
    assert (tree.num_requests, tree.num_nodes, tree.num_tokens) == (0, 1, 0)
    assert tree.unique_below(tree.input_len, tree.lcp).tolist() == [0]
    assert tree.subtree_sums(np.empty(0)).tolist() == [0.0]
    check_prefix_tree(tree, *as_arrays([]))


@pytest.mark.parametrize(
    "prompts",
    [
        [()],
        [(5,)],
        [(), ()],
        [(), (0,), ()],
        [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)],
        [(2**31 - 1, 2**31 - 1), (2**31 - 1,), (2**31 - 1, 2**31 - 2)],
        [(7, 8, 9)] * 3,
        [(7, 8, 9, 7)] * 100,
        [(1, 2, 3)] * 70 + [(1, 2, 3, 4)] * 70 + [(1, 2)] * 70,
    ],
)
def test_edge_cases(prompts: list[Prompt]) -> None:
    tree = build(prompts)
    assert_is_expected(tree, prompts)
    check_prefix_tree(tree, *as_arrays(prompts))


def test_equal_prompts_make_one_node_in_input_order() -> None:
    tree = build([(1, 2, 3)] * 200)
    assert tree.order.tolist() == list(range(200))
    assert tree.depth.tolist() == [0, 3]
    assert set(tree.leaf_parent.tolist()) == {1}
    assert tree.prefix_sharing_ratio == 199 / 200


def test_a_chain_of_prompts_each_one_token_longer() -> None:
    n = 3_000
    rng = np.random.default_rng(0)
    lengths = rng.permutation(n)
    text = rng.integers(0, 2**31, n).astype(np.int32)
    tokens = np.concatenate([text[:length] for length in lengths])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tree = build_prefix_tree(tokens, offsets)
    assert tree.input_len.tolist() == list(range(n))
    assert tree.lcp.tolist() == [0, *range(n - 1)]
    # Every prompt but the longest is continued by the next ones.
    assert tree.depth.tolist() == list(range(n - 1))
    assert tree.parent.tolist() == list(range(-1, n - 2))
    assert tree.num_unique_tokens == n - 1
    check_prefix_tree(tree, tokens, offsets)


@pytest.mark.slow
def test_tokens_that_cannot_be_written_will_do() -> None:
    prompts = many_prompts(0, num_prompts=50)
    tokens, offsets = as_arrays(prompts)
    tokens.flags.writeable = offsets.flags.writeable = False
    assert_is_expected(build_prefix_tree(tokens, offsets), prompts)


@pytest.fixture(scope="module")
def job() -> Job:
    arrays = as_arrays(many_prompts(seed=1, num_prompts=20_000, num_groups=500))
    return build_prefix_tree(*arrays), *arrays


def test_integrity_of_a_large_tree(job: Job) -> None:
    tree, tokens, offsets = job
    check_prefix_tree(tree, tokens, offsets)
    assert tree.num_nodes > 1_000
    assert 0.5 < tree.prefix_sharing_ratio < 1


def test_integrity_fails_for_other_prompts(job: Job) -> None:
    tree, tokens, offsets = job
    inner = int(np.flatnonzero(tree.lcp > 2)[0])  # a leaf that shares its first token
    other = tokens.copy()
    other[offsets[tree.order[inner]]] += 1
    with pytest.raises(AssertionError, match="in common with the leaf before"):
        check_prefix_tree(tree, other, offsets)
    with pytest.raises(AssertionError, match="every request has one leaf"):
        check_prefix_tree(tree, tokens, offsets[:-1])


@settings(deadline=None, max_examples=examples(300))
@given(PROMPTS.filter(bool), st.data())
def test_integrity_fails_for_any_single_change(
    prompts: list[Prompt], data: st.DataObject
) -> None:
    tree = build(prompts)
    name = data.draw(st.sampled_from(sorted(DTYPES)))
    array = getattr(tree, name).copy()
    place = data.draw(st.integers(0, len(array) - 1))
    change = data.draw(st.integers(-3, 3).filter(bool))
    array[place] += change
    with pytest.raises(AssertionError, match="Not the prefix tree"):
        check_prefix_tree(
            dataclasses.replace(tree, **{name: array}), *as_arrays(prompts)
        )


# Leaves by position: 0 (1, 2), 1 (1, 2, 3, 4), 2 (1, 2, 3, 5), 3 and 4 (6, 7).
# Nodes: 0 the root, 1 (1, 2), 2 (1, 2, 3), 3 (6, 7).
SMALL: list[Prompt] = [(6, 7), (1, 2, 3, 5), (1, 2), (6, 7), (1, 2, 3, 4)]

Arrays = dict[str, NDArray[np.int64]]


def without_node_2(tree: Arrays) -> None:
    for name in ("parent", "depth", "leaf_begin", "leaf_end"):
        tree[name] = np.delete(tree[name], 2)
    tree["leaf_parent"][:] = [1, 1, 1, 2, 2]


def with_an_only_child(tree: Arrays) -> None:
    for name, value in (("parent", 2), ("depth", 4), ("leaf_begin", 1)):
        tree[name] = np.insert(tree[name], 3, value)
    tree["leaf_end"] = np.insert(tree["leaf_end"], 3, 3)


def siblings_swapped(tree: Arrays) -> None:
    tree["order"][1:3] = tree["order"][2:0:-1]


def equals_swapped(tree: Arrays) -> None:
    tree["order"][3:] = tree["order"][:2:-1]


def set_to(name: str, place: int, value: int) -> Callable[[Arrays], None]:
    return lambda tree: tree[name].__setitem__(place, value)


@pytest.mark.parametrize(
    ("corrupt", "rule"),
    [
        (lambda tree: tree.update(lcp=tree["lcp"][:-1]), "arrays by leaf are of one"),
        (lambda tree: tree.update(depth=tree["depth"][:-1]), "arrays by node of anoth"),
        (set_to("order", 0, 1), "order is a permutation"),
        (set_to("input_len", 0, 3), "input_len is the number"),
        (set_to("parent", 0, 0), "node 0 is the root"),
        (set_to("leaf_end", 0, 4), "node 0 is the root"),
        (set_to("parent", 1, 2), "a parent comes before its children"),
        (set_to("parent", 3, 1), "nodes are in preorder; node 3"),
        (set_to("parent", 2, 0), "nodes are in preorder; node 2"),
        (set_to("leaf_end", 2, 4), "a node's leaves are among its parent's; node 2"),
        (set_to("depth", 2, 2), "a node is deeper than its parent; node 2"),
        (set_to("leaf_begin", 3, 4), "two leaves or more.*; node 3"),
        (with_an_only_child, "fewer than a parent that is not the root; node 3"),
        (without_node_2, "lcp is the depth of the lowest node.*; leaf 2"),
        (set_to("depth", 3, 1), "lcp is the depth of the lowest node.*; leaf 4"),
        (set_to("leaf_parent", 1, 1), "leaf_parent is the deepest node.*; leaf 1"),
        (siblings_swapped, "children of a node differ .* sorted by it; leaf 2"),
        (equals_swapped, "equal prompts are in input order; leaf 4"),
    ],
)
def test_integrity_names_the_broken_rule(
    corrupt: Callable[[Arrays], None], rule: str
) -> None:
    arrays = {name: getattr(build(SMALL), name).copy() for name in DTYPES}
    check_prefix_tree(PrefixTree(**arrays), *as_arrays(SMALL))
    corrupt(arrays)
    with pytest.raises(AssertionError, match=rule):
        check_prefix_tree(PrefixTree(**arrays), *as_arrays(SMALL))


# --- Parts of a tree, and sequences of leaves.


@settings(deadline=None, max_examples=examples(200))
@given(PROMPTS, st.data())
def test_a_part_is_the_tree_of_its_prompts(
    prompts: list[Prompt], data: st.DataObject
) -> None:
    tree = build(prompts)
    n = len(prompts)
    chosen = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    leaves = np.flatnonzero(np.array(chosen, bool))
    part = tree.restricted_to(leaves)
    assert part.order.tolist() == tree.order[leaves].tolist()
    requests = sorted(part.order.tolist())
    numbered = part.renumbered()
    assert_is_expected(numbered, [prompts[i] for i in requests])
    assert [requests[i] for i in numbered.order] == part.order.tolist()


@settings(deadline=None)
@given(PROMPTS)
def test_the_whole_tree_is_a_part_and_is_numbered_already(
    prompts: list[Prompt],
) -> None:
    tree = build(prompts)
    assert_is_expected(tree.restricted_to(np.arange(len(prompts))), prompts)
    assert_is_expected(tree.renumbered(), prompts)


@settings(deadline=None)
@given(PROMPTS, st.randoms(use_true_random=False), st.integers(0, 25))
def test_shared_with_previous_is_the_common_prefix(
    prompts: list[Prompt], random: Random, k: int
) -> None:
    tree = build(prompts)
    leaves = random.sample(range(len(prompts)), min(k, len(prompts)))
    shared = shared_with_previous(tree, leaves)
    sent = [prompts[tree.order[leaf]] for leaf in leaves]
    common = [len(common_prefix(a, b)) for a, b in pairwise(sent)]
    assert shared == ([0, *common] if leaves else [])


def test_parts_of_a_large_tree(job: Job) -> None:
    tree, tokens, offsets = job
    leaves = np.flatnonzero(np.random.default_rng(0).random(tree.num_requests) < 0.2)
    part = tree.restricted_to(leaves)
    requests = np.sort(part.order)
    prompts = [
        tuple(tokens[offsets[i] : offsets[i + 1]].tolist()) for i in requests.tolist()
    ]
    check_prefix_tree(part.renumbered(), *as_arrays(prompts))
    assert part.lcp.tolist() == shared_with_previous(tree, leaves.tolist())
