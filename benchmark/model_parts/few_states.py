"""Fewer states than branch points on a path: cached share of the best choice for them.

The best choice is computed exactly (``kept_states.py``), for the states that are
left beside the two of one running request. The engine may run more at once.
"""

from __future__ import annotations

import numpy as np
from report import Figure, print_table
from throughput_jobs import ThroughputJob, tree_of
from tiny_checkpoints import ARGUMENTS

from .engine import run_jobs
from .jobs import ENGINE, checkpoint
from .kept_states import choose_states

MODEL = "qwen3_next"
NUM_STATES = (8, 12)
LEAST_SHARE = 0.99


def chains(num_chains: int, levels: int = 8) -> ThroughputJob:
    """Prompts that branch off at each of eight levels of a long prompt, 3 at a time."""
    rng = np.random.default_rng(8)
    prompts = []
    for _ in range(num_chains):
        prefix: list[int] = []
        for _ in range(levels):
            prefix = [
                *prefix,
                *rng.integers(5, 250, int(rng.integers(10, 60))).tolist(),
            ]
            prompts += [prefix + rng.integers(5, 250, 6).tolist() for _ in range(3)]
    params = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    shuffled = [prompts[i] for i in rng.permutation(len(prompts))]
    return ThroughputJob(
        f"{num_chains} prompts with {levels} branch points",
        shuffled,
        [params] * len(shuffled),
        kv_tokens=0,
        max_running=16,
    )


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part."""
    job = chains(2 if quick else 6)
    tree = tree_of(job.prompts)
    table, figures = [], []
    for states in NUM_STATES:
        size = f"--max-mamba-cache-size={states}"
        (done,) = run_jobs(
            [job],
            checkpoint(MODEL),
            ours=True,
            arguments=[*ENGINE, *ARGUMENTS[MODEL], size],
        )
        # One state is left for a prompt that is put into the cache.
        best = choose_states(tree, states - 1 - 2).saved_tokens
        all_kept = choose_states(tree, tree.num_nodes).saved_tokens
        table.append([states, done.cached_tokens, best, all_kept, done.retractions])
        figures.append(
            Figure(
                f"{job.name}, {states} states: cached share of the best choice",
                done.cached_tokens / best,
                target=(">=", LEAST_SHARE),
            )
        )
    columns = ["states", "cached tokens", "best choice", "with all states", "retracted"]
    print_table(f"{MODEL}, {job.name}", columns, table)
    return figures
