"""Text that many prompts have in common behind text or images that differ.

A prefix cache shares only how prompts begin. Instructions behind a document are computed again
for each document; in front of it, once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..planner.prefixes.prefix_tree import PrefixTree
from ..planner.requests import PlanRequests

# Prompts that are looked at.
SAMPLE = 512
# Tokens of a passage, so that a chat template's own tokens are none.
WINDOW = 32
# Changes from one token to the next in a passage. Images are one token many times.
MIN_CHANGES = WINDOW // 4
# Share of the prompts that have a passage.
MIN_SHARE = 0.05
# Tokens of a prompt that are looked at.
MOST_TOKENS = 16_384
# Hashes are polynomials modulo 2^64. An odd base has an inverse.
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)


def num_late_tokens(requests: PlanRequests, tree: PrefixTree) -> int:
    """Prompt tokens that are computed, and would be shared if they came first.

    An estimate from a sample of the prompts, without the tokens that each shares with the
    prompt before it in the tree.
    """
    assert len(requests) == tree.num_requests, "the tree is of these requests"
    number = min(SAMPLE, tree.num_requests)
    if not number:
        return 0
    draw = np.random.default_rng(0)
    places = draw.choice(tree.num_requests, number, replace=False)
    begins = requests.offsets[tree.order[places]] + tree.lcp[places]
    ends = requests.offsets[tree.order[places] + 1]
    found = [
        _passages(np.asarray(requests.tokens[begin : min(end, begin + MOST_TOKENS)]))
        for begin, end in zip(begins, ends, strict=True)
    ]
    distinct = [np.unique(hashes) for hashes, _ in found]
    known, counts = np.unique(np.concatenate(distinct), return_counts=True)
    enough = counts >= max(3, MIN_SHARE * number)
    known, counts = known[enough], counts[enough]
    late = 0.0
    for (hashes, at), own in zip(found, distinct, strict=True):
        _, places, _ = np.intersect1d(known, own, return_indices=True)
        begins = at[np.isin(hashes, known)]
        covered = np.unique(begins[:, None] + np.arange(WINDOW)).size
        # One of the prompts that have it computes it in any case.
        late += covered * (1 - 1 / counts[places].mean()) if covered else 0
    return round(late * tree.num_requests / number)


def _passages(tokens: NDArray[np.int32]) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
    """The hash of each window that is text, and where it begins."""
    if len(tokens) < WINDOW:
        return np.empty(0, np.uint64), np.empty(0, np.intp)
    changes = np.concatenate([[0], np.cumsum(np.diff(tokens) != 0)])
    at = np.flatnonzero(changes[WINDOW - 1 :] - changes[: 1 - WINDOW] >= MIN_CHANGES)
    powers, inverses = (
        np.cumprod(np.full(len(tokens), base, np.uint64)) for base in (_BASE, _INVERSE)
    )
    sums = np.concatenate(
        [[np.uint64(0)], np.cumsum(tokens.astype(np.uint64) * powers)]
    )
    return (sums[at + WINDOW] - sums[at]) * inverses[at], at
