"""Drafts verified in PyTorch, compared with their definitions."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
import torch

from sgl_kernel_ext.draft_verification import (
    accepted_slots,
    assign_slots,
    assigned_slots,
    build_tree,
    drafted_slots,
    first_slots,
    keep_top_k,
    keep_top_p,
    last_tokens,
    tree_links,
    verify_greedy,
    verify_sampling,
)
from sglang_batch.srt.cpu.cpu_attention import attend, draft_trees

NUM_DRAFTS, VOCAB = 7, 4


class Tree:
    """A random tree. No two children of a node have one token."""

    def __init__(self, random: Random) -> None:
        self.parents, self.tokens = [-1], [random.randrange(VOCAB)]
        while len(self.parents) < NUM_DRAFTS:
            parent = random.randrange(len(self.parents))
            free = set(range(VOCAB)) - {self.tokens[i] for i in self.children(parent)}
            if free:
                self.parents.append(parent)
                self.tokens.append(random.choice(sorted(free)))

    def children(self, node: int) -> list[int]:
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> list[int]:
        above = [] if node == 0 else self.path(self.parents[node])
        return [*above, node]

    @property
    def mask(self) -> torch.Tensor:
        mask = torch.zeros(NUM_DRAFTS, NUM_DRAFTS, dtype=torch.bool)
        for node in range(NUM_DRAFTS):
            mask[node, self.path(node)] = True
        return mask


def links(trees: list[Tree], lengths: list[int]) -> tuple[torch.Tensor, ...]:
    shape = (len(trees), NUM_DRAFTS)
    positions = torch.empty(len(trees) * NUM_DRAFTS, dtype=torch.long)
    index, child, sibling = (torch.empty(shape, dtype=torch.long) for _ in range(3))
    mask = torch.cat([tree.mask.flatten() for tree in trees])
    number = len(trees)
    tree_links(
        mask,
        torch.tensor(lengths),
        positions,
        index,
        child,
        sibling,
        number,
        NUM_DRAFTS,
    )
    return positions, index, child, sibling


@pytest.mark.parametrize("seed", range(20))
def test_links_are_those_of_the_trees(seed: int) -> None:
    random = Random(seed)
    trees, lengths = [Tree(random) for _ in range(3)], [5, 0, 9]
    positions, index, child, sibling = links(trees, lengths)
    for row, (tree, length) in enumerate(zip(trees, lengths, strict=True)):
        for node in range(NUM_DRAFTS):
            at = row * NUM_DRAFTS + node
            assert index[row, node] == at
            assert positions[at] == length + len(tree.path(node)) - 1
            found, each = [], int(child[row, node])
            while each >= 0:
                found.append(each)
                each = int(sibling[row, each])
            assert found == tree.children(node)


def test_trees_of_candidates() -> None:
    """Two steps of two branches each: candidates 0 and 1, then 2 to 5, of which the branches
    go on with 2 and 4, then 6 to 9."""
    groups = torch.tensor([[-1, 0, 1, 2, 4]] * 2)
    chosen = torch.tensor([[0, 1, 2, 4, 6, 9], [0, 2, 3, 5, 6, 7]])
    lengths = torch.tensor([3, 0])
    mask = torch.ones(NUM_DRAFTS * (3 + 2 * NUM_DRAFTS), dtype=torch.bool)
    positions = torch.empty(2 * NUM_DRAFTS, dtype=torch.long)
    index, child, sibling = (torch.empty(2, NUM_DRAFTS).long() for _ in range(3))
    build_tree(
        groups, chosen, lengths, mask, positions, index, child, sibling, 2, 3,
        NUM_DRAFTS, 0,
    )  # fmt: skip
    # In the second tree, the parent of candidate 5 is not chosen: nothing leads there.
    assert child.tolist() == [[1, 3, 4, 5, 6, -1, -1], [1, 2, 5, -1, -1, -1, -1]]
    assert sibling.tolist() == [[-1, 2] + [-1] * 5, [-1, -1, 3, -1, -1, 6, -1]]
    assert positions.tolist() == [3, 4, 4, 5, 5, 6, 6, 0, 1, 2, 2, 0, 3, 3]
    first, second = draft_trees(mask, lengths.tolist(), [NUM_DRAFTS] * 2)
    assert first is not None and second is not None
    assert first[5].nonzero().flatten().tolist() == [0, 1, 3, 5]
    assert second[6].nonzero().flatten().tolist() == [0, 1, 2, 6]
    assert mask[: NUM_DRAFTS * 10].view(NUM_DRAFTS, 10)[:, :3].all()


@pytest.mark.parametrize("depth", [NUM_DRAFTS, 3])
@pytest.mark.parametrize("seed", range(20))
def test_greedy_takes_the_longest_path_the_model_agrees_with(
    seed: int, depth: int
) -> None:
    random = Random(seed)
    trees = [Tree(random) for _ in range(4)]
    _, index, child, sibling = links(trees, [3] * 4)
    target = torch.randint(VOCAB, (4, NUM_DRAFTS))
    predicts = torch.zeros(4 * NUM_DRAFTS, dtype=torch.int32)
    accepted = torch.full((4, depth), -1, dtype=torch.int32)
    number = torch.empty(4, dtype=torch.int32)
    drafts = torch.tensor([tree.tokens for tree in trees])
    verify_greedy(predicts, accepted, number, drafts, index, child, sibling, target)
    for row, tree in enumerate(trees):
        right = [
            tree.path(node)
            for node in range(NUM_DRAFTS)
            if len(tree.path(node)) <= depth
            and all(
                target[row, parent] == tree.tokens[each]
                for parent, each in pairwise(tree.path(node))
            )
        ]
        best = max(right, key=len)
        assert number[row] == len(best) - 1
        numbers = [row * NUM_DRAFTS + node for node in best]
        assert accepted[row].tolist() == numbers + [-1] * (depth - len(best))
        assert predicts[numbers].tolist() == target[row, best].tolist()


def test_samples_are_those_of_the_model() -> None:
    """Over many draws, the tokens of a step are distributed as without drafts."""
    tree, draws = Tree(Random(3)), 20_000
    torch.manual_seed(0)
    probs = torch.rand(NUM_DRAFTS, VOCAB).softmax(-1)
    _, index, child, sibling = links([tree] * draws, [0] * draws)
    predicts = torch.full((draws * NUM_DRAFTS,), -1)
    accepted = torch.full((draws, NUM_DRAFTS), -1)
    number = torch.empty(draws, dtype=torch.long)
    verify_sampling(
        predicts, accepted, number, torch.tensor([tree.tokens] * draws), index, child,
        sibling, torch.rand(draws, NUM_DRAFTS), torch.rand(draws),
        probs.expand(draws, -1, -1), torch.zeros(1),
    )  # fmt: skip
    # Of every node that was reached, the tokens that followed it.
    predicts = predicts.view(draws, NUM_DRAFTS)
    reached = torch.zeros(draws, NUM_DRAFTS, dtype=torch.bool)
    for row, count in enumerate(number.tolist()):
        reached[row, accepted[row, : count + 1] % NUM_DRAFTS] = True
    for node in range(NUM_DRAFTS):
        tokens = predicts[reached[:, node], node]
        if len(tokens) < 500:
            continue
        shares = tokens.bincount(minlength=VOCAB) / len(tokens)
        tolerance = 4 * (0.25 / len(tokens)) ** 0.5
        assert torch.allclose(shares, probs[node], atol=tolerance), node
    assert reached[:, 1:].any()


def test_probabilities_of_the_likeliest() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.1, 0.1]])
    of_two = keep_top_k(probs, torch.tensor([2, 1]))
    assert torch.allclose(of_two[0], torch.tensor([0, 4 / 7, 0, 3 / 7]))
    assert of_two[1].tolist() == [1, 0, 0, 0]
    most = keep_top_p(probs, torch.tensor([0.65, 0.5]))
    assert torch.allclose(most[0], torch.tensor([0, 4 / 7, 0, 3 / 7]))
    assert most[1].tolist() == [1, 0, 0, 0]


def test_slots() -> None:
    rows = torch.zeros(4, 10, dtype=torch.int32)
    at, starts, ends = torch.tensor([2, 0]), torch.tensor([1, 4]), torch.tensor([3, 7])
    assign_slots(at, rows, starts, ends, torch.tensor([11, 12, 13, 14, 15]), 2)
    assert rows[2].tolist() == [0, 11, 12, *[0] * 7]
    assert rows[0].tolist() == [0] * 4 + [13, 14, 15, 0, 0, 0]
    found = assigned_slots(
        req_pool_indices=at, req_to_token=rows, start_offset=starts, end_offset=ends
    )
    assert found.tolist() == [11, 12, 13, 14, 15]
    drafted = torch.zeros(4, dtype=torch.long)
    drafted_slots(at, rows, starts, drafted, 1, 2)
    assert drafted.tolist() == [11, 12, 13, 14]
    slots = torch.tensor([20, 21, 22, 30, 31, 32])
    first, moved = torch.zeros(6, dtype=torch.long), torch.zeros(6, dtype=torch.long)
    first_slots(torch.tensor([2, 1]), slots, first)
    assert first.tolist() == [20, 21, 30, 0, 0, 0]
    accepted = torch.tensor([[0, 2, -1], [3, -1, -1]])
    accepted_slots(accepted, slots, moved, 6)
    assert moved.tolist() == [20, 22, 30, 0, 0, 0]
    last = torch.zeros(2, dtype=torch.int32)
    last_tokens(torch.tensor([5, 6, 0, 7, 0, 0]), torch.tensor([2, 1]), last, 3, 2)
    assert last.tolist() == [6, 7]


@pytest.mark.parametrize("window", [None, 2])
def test_a_draft_sees_what_is_above_it(window: int | None) -> None:
    """As if its path followed the prefix, without the other drafts."""
    torch.manual_seed(0)
    tree, before = Tree(Random(1)), 5
    queries = torch.randn(NUM_DRAFTS, 4, 8)
    keys, values = torch.randn(2, before + NUM_DRAFTS, 2, 8)
    full = torch.cat([torch.ones(NUM_DRAFTS, before, dtype=torch.bool), tree.mask], 1)
    (mask,) = draft_trees(full.flatten(), [before], [NUM_DRAFTS])
    found = attend(
        queries, keys, values, scale=0.3, window=window, sinks=None, tree=mask
    )
    for node in range(NUM_DRAFTS):
        path = tree.path(node)
        at = [*range(before), *(before + each for each in path)]
        alone = attend(
            queries[path], keys[at], values[at], scale=0.3, window=window, sinks=None
        )
        assert torch.allclose(found[node], alone[-1], atol=1e-6)
