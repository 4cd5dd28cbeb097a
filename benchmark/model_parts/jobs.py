"""Small jobs of prompts that share prefixes, on one tiny checkpoint, ours and stock."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import Figure, print_table
from throughput_jobs import ThroughputJob, groups, tree_of, two_levels

from sglang_batch.run.demo_model import write_demo_model

from .engine import JobResult, run_jobs

sys.path.append(str(Path(__file__).parents[2] / "test" / "helpers"))

from tiny_checkpoints import ARGUMENTS, write_checkpoint

# For all jobs: less than each of them needs at once.
ENGINE = [
    "--mem-fraction-static=0.3",
    "--max-total-tokens=2600",
    "--max-running-requests=16",
    "--chunked-prefill-size=256",
]
LEAST_SHARE = 0.99
MOST_COMPUTED = 1.05


def one_long_prefix(num_prompts: int) -> ThroughputJob:
    """Prompts of 370 tokens, of which 369 are shared."""
    rng = np.random.default_rng(369)
    prefix = rng.integers(0, 256, 369).tolist()
    prompts = [[*prefix, number % 256] for number in range(num_prompts)]
    params = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    return ThroughputJob(
        f"{num_prompts} x 370, 369 shared",
        prompts,
        [params] * num_prompts,
        kv_tokens=0,
        max_running=16,
    )


def jobs(quick: bool) -> list[ThroughputJob]:
    """Jobs 1, 2 and 4 of the throughput benchmark, small, and one long prefix.

    The KV that they name is not used.
    """
    scale = 1 if quick else 2
    return [
        one_long_prefix(50 * scale),
        groups(1, 6 * scale, 160, 24, 8, 0, 16, seed=0, siblings=6),
        groups(2, 6 * scale, 80, 12, 24, 0, 16, seed=0, siblings=6),
        two_levels(0, 2, 3 * scale),
    ]


def most_cached(job: ThroughputJob) -> int:
    """Prompt tokens that need not be computed. Of each request at least one is."""
    tree = tree_of(job.prompts)
    lengths = np.array([len(prompt) for prompt in job.prompts])[tree.order]
    shared = np.minimum(np.maximum(tree.lcp, 0), lengths - 1)
    return int(shared.sum())


@dataclass(frozen=True, slots=True)
class Compared:
    """One job on both engines.

    share: of the prompt tokens that could be cached, those that were.
    computed: prompt tokens computed, over those that had to be.
    retractions: requests whose prompt was computed again, which is not counted there.
    wrong: answers that are not those of ``transformers``.
    """

    name: str
    share: float
    computed: float
    retractions: int
    wrong: int

    @property
    def row(self) -> list[Any]:
        share, computed = f"{self.share:.4f}", f"{self.computed:.3f}"
        return [self.name, share, computed, self.retractions, self.wrong]


def run_all(model_type: str, quick: bool, *, ours: bool) -> list[Compared]:
    """Run the jobs on one engine."""
    model, name = checkpoint(model_type), "ours" if ours else "stock"
    arguments = [*ENGINE, *ARGUMENTS.get(model_type, ())]
    done = run_jobs(jobs(quick), model, ours=ours, arguments=arguments)
    found = []
    for job, result in zip(jobs(quick), done, strict=True):
        possible = most_cached(job)
        computed = job.num_prompt_tokens - result.cached_tokens
        found.append(
            Compared(
                f"{job.name}, {name}",
                result.cached_tokens / possible,
                computed / (job.num_prompt_tokens - possible),
                result.retractions,
                _num_wrong(job, model, result),
            )
        )
    return found


@cache
def checkpoint(model_type: str) -> Path:
    """A tiny checkpoint, as long as this process lives. ``demo`` is the demo model."""
    folder = Path(tempfile.mkdtemp(prefix="sglang-batch-model-"))
    demo = folder / "demo"
    write_demo_model(demo)
    if model_type == "demo":
        return demo
    return write_checkpoint(model_type, folder / model_type, demo)


def _num_wrong(job: ThroughputJob, path: Path, done: JobResult) -> int:
    """Answers with a token that is not the most likely one after those before it."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    wrong = 0
    for prompt, answer in zip(job.prompts, done.output_ids, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0]
        best = logits[len(prompt) - 1 : -1].argmax(1).tolist()
        wrong += best != answer
    return wrong


def figures_of(model_type: str, quick: bool) -> list[Figure]:
    """The figures of all jobs on one model."""
    stock = run_all(model_type, quick, ours=False)
    ours = run_all(model_type, quick, ours=True)
    columns = ["job", "cached share", "computed", "retracted", "wrong"]
    rows = [each.row for pair in zip(stock, ours, strict=True) for each in pair]
    print_table(model_type, columns, rows)
    figures = []
    for one, other in zip(ours, stock, strict=True):
        name = f"{model_type}, {one.name}"
        figures += [
            Figure(
                f"{name}: cached share of possible",
                one.share,
                target=(">=", LEAST_SHARE),
                note=f"stock {other.share:.3f}",
            ),
            Figure(
                f"{name}: prompt tokens computed",
                one.computed,
                "x those that must be",
                ("<=", MOST_COMPUTED),
                f"stock {other.computed:.2f}",
            ),
            Figure(f"{name}: answers unlike transformers", one.wrong, "", ("=", 0)),
            Figure(f"{name}: retractions", one.retractions, "", ("=", 0)),
        ]
    return figures
