"""Jobs of a few words for the planner's tests, and sets of prefixes to count by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.costs.tree_work import LeafWork, leaf_work
from sglang_batch.planner.plan import Candidates
from sglang_batch.planner.prefixes.prefix_tree import PrefixTree, build_prefix_tree
from sglang_batch.planner.requests import UNKNOWN, Int64s, PlanRequests

Prompt = tuple[int, ...]
Bools = NDArray[np.bool_]

# Powers of two, so that sums of whole numbers of tokens are exact.
COST = CostModel(token_time_s=2.0, kv_read_time_s=0.5)
ATTENTIVE = CostModel(token_time_s=2.0, kv_read_time_s=0.5, attention_time_s=0.25)
PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=7).map(tuple), max_size=20)

HELLO = tuple(range(100, 140))
EDGE_PROMPTS: dict[str, list[Prompt]] = {
    "none": [],
    "one": [(5, 6, 7)],
    "two that share": [(1, 2), (1, 3)],
    "two that share nothing": [(1, 2), (3, 4)],
    "equal": [HELLO] * 20,
    "empty": [()] * 5,
    "empty and others": [(), (1,), (), (1, 2), (1, 2)],
    "prefixes of others": [HELLO[:k] for k in (7, 3, 40, 0, 1, 2, 40, 12, 3)],
    "mixed": [(*HELLO[: 3 * (i % 4)], i) for i in range(24)],
}


def sent_order(job: Candidates, policy: str) -> Int64s:
    """Requests in the order in which they enter the engine."""
    order = job.order(policy)
    return job.run(policy).admission_order if order.is_dynamic else order.requests


def make_requests(
    prompts: Sequence[Prompt],
    max_new_tokens: int | Sequence[int] = 1000,
    known_output_len: int | Sequence[int] = UNKNOWN,
) -> PlanRequests:
    n = len(prompts)
    return PlanRequests(
        tokens=np.array([t for prompt in prompts for t in prompt], dtype=np.int32),
        offsets=np.cumsum([0, *map(len, prompts)], dtype=np.int64),
        max_new_tokens=np.resize(np.array(max_new_tokens, np.int32), n),
        known_output_len=np.resize(np.array(known_output_len, np.int32), n),
    )


def tree_of(prompts: Sequence[Prompt]) -> PrefixTree:
    requests = make_requests(prompts)
    return build_prefix_tree(requests.tokens, requests.offsets, count_media=True)


def work_of(
    tree: PrefixTree, output_len: Iterable[float], cost: CostModel = COST
) -> LeafWork:
    """Work at the leaves, from output lengths by request."""
    est_output_len = np.array(list(output_len), dtype=np.float64)
    return leaf_work(tree, cost, est_output_len, est_output_len**2)


def outputs_of(num_requests: int, seed: int, most: int = 30) -> NDArray[np.float64]:
    """Whole numbers of tokens, 1 or more."""
    rng = np.random.default_rng(seed)
    return rng.integers(1, most + 1, num_requests).astype(np.float64)


def prefixes(prompts: Iterable[Prompt]) -> set[Prompt]:
    return {prompt[:d] for prompt in prompts for d in range(1, len(prompt) + 1)}


def repeated(parts: Iterable[Iterable[Prompt]]) -> int:
    """Tokens computed more than once where parts share nothing with one another."""
    found = [prefixes(part) for part in parts]
    return sum(map(len, found)) - len(set[Prompt]().union(*found))
