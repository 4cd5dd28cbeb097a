"""Answers of every kind of model under the plan, against transformers, in random jobs.

Jobs of random shapes and orders are open together, with online requests, aborts, pauses, wrong
estimates and little KV, so that requests are offloaded where the tier allows it. SGLang counts all
KV after every step. A wrong answer or a token of KV too many is a fault, and ends the case.
"""

from __future__ import annotations

import os

from report import Figure, print_table
from stress_runs import scenario
from tiny_checkpoints import ARGUMENTS

from .jobs import checkpoint

PAGES = ("--page-size=16",)
# Models and SGLang's arguments besides those that a model always has.
CASES: dict[str, tuple[tuple[str, ...], ...]] = {
    "demo": (("--enable-mixed-chunk",), PAGES),
    "deepseek_v3": (("--enable-mixed-chunk",), PAGES),
    "gpt_oss": (("--enable-mixed-chunk", "--swa-full-tokens-ratio=0.3"), PAGES),
    "gemma3_text": ((), PAGES),
    "qwen3_next": ((), ("--max-mamba-cache-size=9",)),
    "qwen3_5_text": ((),),
    "kimi_linear": ((),),
    "granitemoehybrid": ((), ("--enable-mixed-chunk",)),
}
COUNTS = ("lines", "aborted", "offloaded")
SCENARIOS, ROUNDS = "branch_points,random", 4


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part. A quick run has one case, and the same targets."""
    os.environ["SGLANG_MAMBA_CONV_DTYPE"] = "float32"  # as the weights
    figures, table = [], []
    for model_type in ["gpt_oss"] if quick else CASES:
        for arguments in CASES[model_type][: 1 if quick else None]:
            name = " ".join((model_type, *arguments))
            given = (*ARGUMENTS.get(model_type, ()), *arguments)
            model, rounds = checkpoint(model_type), 1 if quick else ROUNDS
            try:
                found = scenario(model, SCENARIOS, 2, rounds, *given)
            except AssertionError as fault:
                print(fault)
                figures.append(Figure(f"{name}: faults", 1, "", ("=", 0)))
                continue
            figures.append(Figure(f"{name}: faults", 0, "", ("=", 0)))
            branches, random = found["branch_points"], found["random"]
            computed = branches["computed"] / branches["least"]
            what = f"{name}: computed at branch points"
            figures.append(Figure(what, computed, "x the least", ("=", 1.0)))
            table.append([name, *(random.get(each, 0) for each in COUNTS)])
    columns = ["model", *COUNTS]
    print_table("Answers equal to those of transformers", columns, table)
    return figures
