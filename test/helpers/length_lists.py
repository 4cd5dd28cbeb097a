"""AlignedServe's Algorithm 1, and groups of lengths, on plain lists: slow, and without a tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from sglang_batch.planner.kv_lengths.batch_state import LengthRange
from sglang_batch.planner.kv_lengths.length_groups import GROUP_SHARE, BatchLaw
from sglang_batch.planner.kv_lengths.length_tree import (
    LengthTree,
    insert,
    make_tree,
    take_out,
)

LONGEST = 65_536


class Waiting(NamedTuple):
    """A request that waits. Lists of them are in the order in which they came."""

    request: int
    length: int
    tokens: int


def waiting_of(sizes: Iterable[tuple[int, int]]) -> list[Waiting]:
    """Requests of these (length, tokens), numbered from 0."""
    return [
        Waiting(i, min(max(length, 1), LONGEST), tokens)
        for i, (length, tokens) in enumerate(sizes)
    ]


# Algorithm 1


def algorithm_1(
    waiting: Sequence[Waiting], max_tokens: int, min_rows: int
) -> list[int]:
    """The requests of the next batch, the shortest first.

    Section 3.3 of AlignedServe: from the whole range of lengths down to the quarter with
    most requests, until all in the range fit. If they are too few, those of the three
    other quarters join as long as they fit: the left ones from right to left, then the
    right ones from left to right.
    """
    begin, width = 1, LONGEST
    chosen = list(waiting)
    while _tokens(chosen) > max_tokens and width > 1:
        width //= 4
        quarters = [_between(waiting, begin + k * width, width) for k in range(4)]
        most = max(map(len, quarters))
        k = next(k for k in range(4) if len(quarters[k]) == most)
        begin, chosen = begin + k * width, quarters[k]
    if _tokens(chosen) > max_tokens:  # of one length
        whole, chosen = chosen, []
        _join(chosen, whole, max_tokens, len(whole))
        chosen = chosen or whole[:1]
    elif width < LONGEST:
        first = begin - (begin - 1) % (4 * width)
        left = _between(waiting, first, begin - first)
        right = _between(waiting, begin + width, first + 3 * width - begin)
        left.sort(key=lambda each: -each.length)
        right.sort(key=lambda each: each.length)
        _join(chosen, left, max_tokens, min_rows)
        _join(chosen, right, max_tokens, min_rows)
    place = {each.request: k for k, each in enumerate(waiting)}
    chosen.sort(key=lambda each: (each.length, place[each.request]))
    return [each.request for each in chosen]


def _between(waiting: Iterable[Waiting], begin: int, width: int) -> list[Waiting]:
    return [each for each in waiting if begin <= each.length < begin + width]


def _tokens(waiting: Iterable[Waiting]) -> int:
    return sum(each.tokens for each in waiting)


def _join(
    chosen: list[Waiting], beside: list[Waiting], max_tokens: int, rows: int
) -> None:
    """Add the first of those beside, until there are enough or the next does not fit."""
    for each in beside:
        if len(chosen) >= rows or _tokens(chosen) + each.tokens > max_tokens:
            return
        chosen.append(each)


# The tree with the same requests


class TreeOf:
    """A tree that is used for one list of requests after the other."""

    def __init__(self, most: int) -> None:
        self.tree: LengthTree = make_tree(most)

    def fill(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Replace all requests."""
        for i in self.tree.length.nonzero()[0].tolist():
            take_out(self.tree, i)
        for i, (length, tokens) in enumerate(sizes):
            insert(self.tree, i, length, tokens, 0)

    def requests(self, chosen: LengthRange) -> list[int]:
        """The requests of a range, the shortest first."""
        if chosen.rows == 0:
            return []
        length, first = self.tree.length, self.tree.first
        found = []
        for each in sorted({*length[length > 0].tolist()}):
            if chosen.shortest <= each <= chosen.longest:
                here = []
                i = int(first[each - 1])
                while i >= 0:
                    here.append(i)
                    i = int(self.tree.after[i])
                if each == chosen.shortest:
                    here = here[: chosen.at_shortest]
                elif each == chosen.longest:
                    here = here[: chosen.at_longest]
                found += here
        return found


# Random states


@dataclass(frozen=True)
class State:
    """Requests that wait, as (length, tokens), and the limits of the next batch."""

    sizes: list[tuple[int, int]]
    max_tokens: int
    min_rows: int


def random_states(number: int, seed: int) -> Iterator[State]:
    """Few requests and many, spread, clustered or equal, with any limits."""
    rng = Random(seed)
    for _ in range(number):
        most = rng.choice([1, 3, 10, 30, 30, 100, 300])
        lengths = _random_lengths(rng, rng.randint(0, most))
        exact = rng.random() < 0.4  # tokens are the length, or anything
        sizes = [
            (length, length if exact else rng.randint(0, 2 * max(length, 1)))
            for length in lengths
        ]
        total = sum(tokens for _, tokens in sizes)
        share = rng.choice([0, 0.001, 0.01, 0.1, 0.3, 0.6, 0.9, 1, 2])
        max_tokens = round(share * total * rng.uniform(0.5, 1.5))
        if rng.random() < 0.1:
            max_tokens = total + rng.randint(-1, 1)
        min_rows = rng.choice([1, 2, 5, 36, len(sizes), len(sizes) + 1, 1000])
        yield State(sizes, max(0, max_tokens), min_rows)


def _random_lengths(rng: Random, number: int) -> list[int]:
    kind = rng.randrange(6)
    if kind == 0:
        return [rng.randint(1, LONGEST) for _ in range(number)]
    if kind == 1:
        return [round(rng.lognormvariate(7, 1.5)) for _ in range(number)]
    if kind == 2:  # clusters
        centres = [rng.randint(1, LONGEST) for _ in range(rng.randint(1, 6))]
        spread = rng.choice([1, 10, 300])
        return [
            max(1, rng.choice(centres) + rng.randint(-spread, spread))
            for _ in range(number)
        ]
    if kind == 3:  # few distinct ones, some beside borders of nodes
        some = [1, 2, 4, 5, 16, 17, 16_384, 16_385, 65_535, LONGEST, LONGEST + 9]
        kept = rng.sample(some, rng.randint(1, 4))
        return [rng.choice(kept) for _ in range(number)]
    if kind == 4:
        return [rng.randint(1, 64)] * number
    return [rng.randint(1, rng.choice([16, 256, 4096])) for _ in range(number)]


# Groups of lengths


def every_grouping(lengths: Iterable[int]) -> Iterator[list[list[int]]]:
    """Every way to part these lengths into groups, none of which lies in another's range."""
    distinct = sorted({*lengths})
    together = {each: [] for each in distinct}
    for length in lengths:
        together[length].append(length)
    for cuts in range(1 << (len(distinct) - 1)):
        groups: list[list[int]] = [[]]
        for place, length in enumerate(distinct):
            groups[-1] += together[length]
            if cuts >> place & 1:
                groups.append([])
        yield groups


def cost(law: BatchLaw, groups: Iterable[Sequence[int]]) -> float:
    """Seconds in which every request takes a step, all in full batches of their group."""
    seconds = 0.0
    for group in groups:
        longest = max(group)
        full = min(law.max_rows, GROUP_SHARE * law.capacity / longest)
        steps = max(1.0, len(group) / max(1.0, full))
        seconds += steps * law.weight_s + law.read_s * len(group) * longest
    return seconds


def cheapest(law: BatchLaw, lengths: Iterable[int]) -> dict[int, float]:
    """By the longest of the first group, the least cost of all ways to part these lengths."""
    least: dict[int, float] = {}
    for groups in every_grouping(lengths):
        longest, seconds = max(groups[0]), cost(law, groups)
        least[longest] = min(seconds, least.get(longest, seconds))
    return least


def random_law(rng: Random, lengths: Sequence[int]) -> BatchLaw:
    """A law of padded rows for which groups of these lengths differ."""
    return BatchLaw(
        weight_s=rng.choice([0.001, 0.1, 1.0, 10.0, 100.0]),
        read_s=rng.choice([0.001, 0.01, 1.0]),
        row_share=0.0,
        padded=True,
        capacity=float(max(lengths) * rng.randint(1, 40)),
        max_rows=rng.choice([1, 5, 100]),
        parks=True,
    )
