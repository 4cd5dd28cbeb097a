"""The papers' worked examples, which have to come out as they are printed."""

from __future__ import annotations

import numpy as np
from planner_stages import A100
from report import Figure

from sglang_batch.planner.admission_rules.dual_scanner import split_kv
from sglang_batch.planner.costs.cost_model import compute_density
from sglang_batch.planner.prefixes.prefix_groups import PrefixGroups, prefix_groups
from sglang_batch.planner.prefixes.prefix_tree import PrefixTree, build_prefix_tree
from sglang_batch.prediction.workloads.mix import Workload, shared_prefix_groups


def worked_examples() -> list[Figure]:
    def density(p: int, d: int) -> float:
        times = A100.compute_time_s(p, d), A100.memory_time_s(p, d)
        return float(compute_density(*times))

    left, right = split_kv(60.0, density(512, 256), density(256, 16_384), 1.27)
    saved, groups = figure_4()
    blendserve, batchllm = "BlendServe 5.2", "BatchLLM 6.3.1"
    return [
        exact("density of 512 in, 256 out", density(512, 256), 2, 3.74, blendserve),
        exact(
            "density of 256 in, 16384 out", density(256, 16384), 4, 0.0959, blendserve
        ),
        exact("KV of the left side, 60 GB at 1.27", left, 1, 19.3, "BlendServe 5.3"),
        exact("KV of the right side", right, 1, 40.7, "BlendServe 5.3"),
        exact("tokens saved by the groups", saved, 0, 10, "BatchLLM Fig. 4"),
        exact("groups as in the figure", groups, 0, 1, "1: all three"),
        exact("% saved, 2000/200, degree 16", equal_groups(2000), 1, 85.2, batchllm),
        exact("% saved, 16000/200, degree 16", equal_groups(16_000), 1, 92.6, batchllm),
    ]


def exact(name: str, value: float, digits: int, printed: float, source: str) -> Figure:
    """A figure that has to come out as its source prints it."""
    return Figure(name, round(float(value), digits), "", ("=", printed), source)


def figure_4() -> tuple[float, bool]:
    """Tokens saved in BatchLLM's example, and whether its groups are found.

    Node ``b``, one token, is shared by prompts 2 to 6; prompts 4 and 5 share their first
    8 tokens. The groups: prompt 1, the pair, the other three. The figure does not give
    the sizes of all nodes; 1 + 2 + 5 tokens make the 8.
    """
    b = [1]
    inner = [*b, 10, 11]
    eight = [*inner, 20, 21, 22, 23, 24]
    prompts = [[0, 0, 0], [*b, 30, 31], [*inner, 40], [*eight, 50], [*eight, 51, 52]]
    prompts.append([*b, 60])
    offsets = np.cumsum([0, *map(len, prompts)], dtype=np.int64)
    tree = build_prefix_tree(np.concatenate(prompts).astype(np.int32), offsets)
    groups = prefix_groups(tree)
    found = {
        (int(length), *sorted(tree.order[groups.group_of == group].tolist()))
        for group, length in enumerate(groups.prefix_len)
    }
    return saved_tokens(groups), found == {(0, 0), (1, 1, 2, 5), (8, 3, 4)}


def equal_groups(prefix_len: int) -> float:
    """Percentage of tokens saved where 16 requests each share a prefix."""
    tree = tree_of(shared_prefix_groups(640, prefix_len, 200, 16, 100, 0))
    return 100 * saved_tokens(prefix_groups(tree)) / tree.num_tokens


def saved_tokens(groups: PrefixGroups) -> int:
    """Each group computes its prefix once (BatchLLM, Eq. 2)."""
    return int(((groups.sizes - 1) * groups.prefix_len).sum())


def tree_of(job: Workload) -> PrefixTree:
    return build_prefix_tree(job.requests.tokens, job.requests.offsets)
