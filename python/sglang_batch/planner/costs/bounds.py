"""Lower bounds of a job's makespan, which no schedule can beat.

The time of a step follows the overlap law from its compute and memory time. The law is
a norm, so the sum over steps is at least the law of the sums, with equality only if all
steps have the same density: the *law optimum*. Ideal overlap (the larger of the two
sums, BlendServe 2.4: T_o) and no overlap (their sum) are the two limits of the law.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..prefixes.prefix_tree import PrefixTree
from ..requests import Floats, Int32s
from .cost_model import CostModel, matrix_seconds
from .tree_work import attended

# Requests considered for the critical path: those with the longest outputs.
_CRITICAL = 32


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds of the makespan in seconds, with every shared prefix computed once.

    compute_s, memory_s: sums over the job, the latter with weight reads in ``min_steps`` steps.
    law_s: all steps of the same density.
    ideal_s: perfect overlap, the larger of the two sums.
    sum_s: no overlap.
    critical_path_s: the longest request alone.
    kv_area_s: reading the KV that must be held once per step, and the weights.
    min_steps: the KV held over all steps, over the capacity, or the decode steps of the longest
        output if they are more.
    """

    compute_s: float
    memory_s: float
    law_s: float
    ideal_s: float
    sum_s: float
    critical_path_s: float
    kv_area_s: float
    min_steps: int

    @property
    def tightest_s(self) -> float:
        """The largest bound that holds under the cost model's own law."""
        return max(self.law_s, self.critical_path_s, self.kv_area_s)


def lower_bounds(
    tree: PrefixTree,
    cost: CostModel,
    output_len: Int32s,
    kv_capacity_tokens: int,
    *,
    as_sglang: bool = True,
) -> Bounds:
    """Bounds for a job with true output lengths ``output_len``, int32 ``[n]``.

    Args:
        as_sglang: whether the first output token comes with the prompt. Those bounds hold for any
            engine. False: higher ones, of an engine that takes a step for each token.
    """
    exponent = max(cost.interference_exponent, cost.split_exponent)
    cost = replace(cost, interference_exponent=exponent)
    d = output_len[tree.order].astype(np.float64)
    if as_sglang:
        d = np.maximum(d - 1.0, 0.0)
    p = tree.input_len.astype(np.float64)
    compute = (tree.num_unique_tokens + d.sum()) * cost.token_time_s
    compute += attended(tree) * cost.attention_time_s
    # Token-steps of KV that the job must hold: private tokens while a request decodes, a
    # shared prefix for at least as many steps as the longest answer below it has tokens.
    own = tree.input_len - tree.depth[tree.leaf_parent]
    shared = (tree.own_len * tree.longest_below(d)).sum()
    held = float((own * d + d**2 / 2.0).sum() + shared)
    min_steps = max(int(np.ceil(held / kv_capacity_tokens)), int(d.max(initial=0.0)))
    read = held if cost.shared_kv_read_once else float((p * d + d * d / 2.0).sum())
    read += float((cost.more_reads(p) * d).sum())
    _, step_memory_s, step_other_s = _smallest_step(cost)
    weights = min_steps * step_memory_s
    memory = read * cost.kv_read_time_s
    # A product takes the longer of its arithmetic and its reads: a table has both already,
    # and ``token_time_s`` is the least of either.
    read_s = memory if cost.table is not None else memory + weights
    return Bounds(
        compute_s=float(compute),
        memory_s=float(memory + weights),
        law_s=float(cost.step_time_s(compute, read_s)),
        ideal_s=max(float(compute), float(read_s)),
        sum_s=float(compute + read_s),
        critical_path_s=_critical_path_s(cost, p, d),
        kv_area_s=float(
            held * cost.kv_read_time_s + weights + min_steps * step_other_s
        ),
        min_steps=min_steps,
    )


def _smallest_step(cost: CostModel) -> tuple[float, float, float]:
    """Compute, memory and other seconds of a step with one token, without its KV."""
    compute, memory, other = matrix_seconds(cost.step_table, 1.0, 1.0)
    # Measured machines may decode faster in steps with prompts.
    return (
        compute,
        memory,
        other + min(cost.extras.decode_s, cost.extras.mixed_decode_s),
    )


def _critical_path_s(cost: CostModel, input_len: Floats, output_len: Floats) -> float:
    """Seconds of the longest request alone: its prompt, then one step per decode."""
    longest, (step_s, memory_s, other_s) = 0.0, _smallest_step(cost)
    for i in np.argsort(-output_len, kind="stable")[:_CRITICAL]:
        p, d = input_len[i], output_len[i]
        held = p + np.arange(1.0, d + 1.0) + cost.more_reads(p)
        steps = cost.step_time_s(step_s, held * cost.kv_read_time_s + memory_s)
        steps = steps + other_s
        prompt = p * cost.token_time_s + p * p * cost.attention_time_s
        longest = max(longest, float(prompt + steps.sum()))
    return longest
