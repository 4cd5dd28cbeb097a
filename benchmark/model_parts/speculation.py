"""Drafts from the answers so far: steps with and without, and answers.

The demo model on a CPU. Drafts come from the n-grams of all answers of the engine, so a prompt
that is sent again, or one whose answer resembles another's, is drafted well. A tiny random
model answers siblings unlike each other, so the second job sends each prompt several times.
"""

from __future__ import annotations

from dataclasses import replace

from report import Figure, print_table
from throughput_jobs import ThroughputJob, groups

from .engine import JobResult, run_jobs
from .jobs import checkpoint

ARGUMENTS = [
    "--mem-fraction-static=0.3",
    "--max-total-tokens=4000",
    "--max-running-requests=16",
    "--chunked-prefill-size=256",
]
NGRAM = [
    "--speculative-algorithm=NGRAM",
    "--speculative-num-draft-tokens=8",
    # In each step, whatever drafts cost here.
    '--offline-batch-config={"learn_costs": false, "draft_requests": 16}',
]


def jobs(quick: bool) -> list[ThroughputJob]:
    """Groups of siblings, and prompts that are sent six times each."""
    scale = 1 if quick else 3
    siblings = groups(2, 4 * scale, 80, 12, 96, 0, 16, seed=0, siblings=6)
    again = groups(2, 4 * scale, 80, 12, 96, 0, 16, seed=1, siblings=1)
    copies = 6
    return [
        replace(siblings, name=f"{len(siblings.prompts)} siblings"),
        replace(
            again,
            name=f"{len(again.prompts)} prompts, {copies} times each",
            prompts=again.prompts * copies,
            sampling_params=again.sampling_params * copies,
        ),
    ]


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part. A quick run has fewer prompts, and the same targets."""
    model = checkpoint("demo")
    without = run_jobs(jobs(quick), model, ours=True, arguments=ARGUMENTS)
    drafted = run_jobs(jobs(quick), model, ours=True, arguments=[*ARGUMENTS, *NGRAM])
    figures, rows = [], []
    for job, one, other in zip(jobs(quick), drafted, without, strict=True):
        pairs = zip(one.output_ids, other.output_ids, strict=True)
        wrong = sum(a != b for a, b in pairs)
        rows.append([job.name, other.steps, one.steps, f"{_accepted(one):.2f}"])
        figures += [
            Figure(
                f"{job.name}: answers unlike those without drafts", wrong, "", ("=", 0)
            ),
            Figure(
                f"{job.name}: steps, of those without drafts",
                one.steps / other.steps,
                "",
                ("<=", 1.0),
                f"{one.steps} of {other.steps}",
            ),
            Figure(f"{job.name}: tokens per draft", _accepted(one), "", (">=", 1.0)),
            Figure(f"{job.name}: retractions", one.retractions, "", ("=", 0)),
        ]
    print_table(
        "Drafts of 8 tokens",
        ["job", "steps without drafts", "with drafts", "tokens per draft"],
        rows,
    )
    return figures


def _accepted(result: JobResult) -> float:
    """Mean tokens of an answer per draft. An answer's first token has none."""
    decoded = sum(len(answer) - 1 for answer in result.output_ids)
    return decoded / result.verified
