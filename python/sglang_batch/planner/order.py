"""From tokenized prompts to the order in which they are sent to the engine.

A job's prompts arrive as one flat buffer ``tokens`` (int32 ``[num_tokens]``) with
``offsets`` (int64 ``[num_requests + 1]``): prompt ``i`` is
``tokens[offsets[i]:offsets[i + 1]]``. An order is a permutation (int64
``[num_requests]``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Offsets = NDArray[np.int64]
Order = NDArray[np.int64]


def make_order(tokens: Tokens, offsets: Offsets, policy: str) -> Order:
    """The order of a policy: ``fcfs`` (input order) or ``dfs``.

    ``dfs`` is the depth-first order of the prompts' prefix tree: prompts sorted
    lexicographically by token id, so that all requests below a shared prefix follow
    one another. Equal prompts keep their input order.

    Raises:
        ValueError: the policy is not known.
    """
    num_requests = len(offsets) - 1
    if policy == "fcfs":
        return np.arange(num_requests, dtype=np.int64)
    if policy != "dfs":
        raise ValueError(f"policy={policy!r} is not known; choose fcfs or dfs.")
    # Unsigned big-endian bytes compare as the token ids do, so sorting needs one
    # key per prompt and no comparison in Python.
    keys = [
        tokens[offsets[i] : offsets[i + 1]].astype(">u4").tobytes()
        for i in range(num_requests)
    ]
    return np.array(sorted(range(num_requests), key=keys.__getitem__), dtype=np.int64)


def optimal_prefix_sharing_ratio(
    tokens: Tokens, offsets: Offsets, dfs_order: Order | None = None
) -> float:
    """Share of all prompt tokens that an unbounded prefix cache would save, 0..1.

    One minus the tokens of the prefix tree over the tokens of all prompts. In
    depth-first order each prompt adds to the tree what it does not share with its
    predecessor. ``dfs_order`` is that order, where the caller has it already.
    """
    num_tokens = int(offsets[-1])
    if num_tokens == 0:
        return 0.0
    order = make_order(tokens, offsets, "dfs") if dfs_order is None else dfs_order
    shared = 0
    previous = tokens[:0]
    for i in order:
        current = tokens[offsets[i] : offsets[i + 1]]
        shared += _common_prefix_len(previous, current)
        previous = current
    return shared / num_tokens


def _common_prefix_len(a: Tokens, b: Tokens) -> int:
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length
