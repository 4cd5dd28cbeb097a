"""Rollouts: engine steps for 64 prompts of 16 samples, against single requests to SGLang.

Answers have heavy-tailed lengths that no engine knows beforehand. Those to one prompt are
alike: a prompt has a mean length, and in each step of the training run its answers are drawn
anew around it. SGLang gets a request for each sample, all at once, under several settings, of
which the best counts. With ``k`` of 16 its driver aborts the siblings itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import rollout_engine
from report import Figure

from sglang_batch.run.demo_model import write_demo_model

PROMPTS, SAMPLES, K = 64, 16, 12
STEPS = 3
PROMPT_LEN = 120
SEED = 0
TIMEOUT_S = 3600
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "mem_fraction_static": 0.3,
    "max_total_tokens": 24_000,
    "max_running_requests": 128,
    "log_level": "warning",
}
# What users of rollouts set.
STOCK: dict[str, dict[str, Any]] = {
    "default": {},
    "lpm, conservativeness 0.3": {
        "schedule_policy": "lpm", "schedule_conservativeness": 0.3,
    },
    "fcfs, conservativeness 0.3, mixed": {
        "schedule_conservativeness": 0.3, "enable_mixed_chunk": True,
    },
}  # fmt: skip
OURS = {
    "offline_batch": True,
    # Steps are counted, so prompts join steps that decode, as SGLang's best setting has it. On a
    # CPU such a step takes several times as long: processor time is that of the default.
    "offline_batch_config": json.dumps({"mixed_chunk": True, "learn_costs": False}),
}


def measure(quick: bool) -> list[Figure]:
    """All samples, and the first 12 of 16 of each group."""
    num_prompts = 8 if quick else PROMPTS
    steps = training_steps(num_prompts)
    last = steps[-1]
    settings = list(STOCK.items())[-1:] if quick else list(STOCK.items())
    ks = (SAMPLES, K)
    with tempfile.TemporaryDirectory(prefix="bench-savings-") as scratch:
        place = Path(scratch)
        write_demo_model(place / "model")
        # The last step of training by an engine that knows nothing, and after the others.
        ours = run(
            place,
            [
                {**step, "k": k, "run": f"{k} {run}", "name": f"{k}-{run}-{nth}"}
                for k in ks
                for run, of in (("unlearnt", [last]), ("learnt", steps))
                for nth, step in enumerate(of)
            ],
            OURS,
        )
        timed = run(
            place,
            [
                {**step, "k": k, "run": f"{k}", "name": f"{k}-{nth}"}
                for k in ks
                for nth, step in enumerate(steps)
            ],
            {"offline_batch": True},
        )
        stock = {
            name: run(
                place,
                [{**last, "k": k, "run": "", "name": str(k)} for k in ks],
                arguments,
            )
            for name, arguments in settings
        }
    figures = []
    for at, k in enumerate(ks):
        unlearnt, *_, learnt = ours[at * (1 + STEPS) : (at + 1) * (1 + STEPS)]
        figures += compared(
            f"{num_prompts} prompts, {k} of {SAMPLES}",
            unlearnt,
            learnt,
            {name: found[at] for name, found in stock.items()},
            timed[(at + 1) * STEPS - 1],
            longest(last["lengths"], k),
        )
    if quick:
        return [replace(figure, target=None) for figure in figures]
    return figures


def longest(lengths: list[list[int]], k: int) -> int:
    """The longest answer that a step of training waits for: none can take fewer steps."""
    return max(sorted(each)[k - 1] for each in lengths)


def training_steps(num_prompts: int) -> list[dict[str, Any]]:
    """Steps over the same prompts, with answers drawn anew."""
    rng = np.random.default_rng(SEED)
    prompts = [
        [*b"Solve this: ", *rng.integers(32, 127, PROMPT_LEN - 12).tolist()]
        for _ in range(num_prompts)
    ]
    mean = 60 * rng.lognormal(0.0, 0.8, num_prompts)
    steps = []
    for step in range(STEPS):
        drawn = mean[:, None] * rng.lognormal(0.0, 0.5, (num_prompts, SAMPLES))
        lengths = np.clip(drawn, 4, rollout_engine.MAX_NEW_TOKENS - 1).astype(int)
        steps.append(
            {"name": str(step), "prompts": prompts, "lengths": lengths.tolist()}
        )
    return steps


def compared(
    name: str,
    unlearnt: dict[str, Any],
    learnt: dict[str, Any],
    stock: dict[str, dict[str, Any]],
    timed: dict[str, Any],
    fewest: int,
) -> list[Figure]:
    best = min(stock, key=lambda setting: stock[setting]["steps"])
    theirs = stock[best]
    every = ", ".join(f"{setting} {each['steps']}" for setting, each in stock.items())
    fastest = min(each["cpu_s"] for each in stock.values())
    rows = ENGINE["max_running_requests"]
    bound = max(fewest, learnt["tokens"] // rows)
    return [
        Figure(
            f"{name}: engine steps, lengths learnt, of SGLang's fewest",
            learnt["steps"] / theirs["steps"], target=("<=", 0.75),
            note=f"{learnt['steps']}; SGLang: {every}; at least {bound}",
        ),
        Figure(
            "  the same, nothing learnt", unlearnt["steps"] / theirs["steps"],
            note=f"{unlearnt['steps']}",
        ),
        Figure(
            "  lengths learnt, of nothing learnt", learnt["steps"] / unlearnt["steps"],
            target=("<=", 0.98),
        ),
        Figure(
            "  scheduler's processor time, of SGLang's least",
            timed["cpu_s"] / fastest,
            note=f"{timed['cpu_s']:.1f} s in {timed['steps']} steps against "
            f"{fastest:.1f} s",
        ),
        Figure(
            "  tokens computed and in no answer, beyond the step under way",
            max(map(lost_tokens, (unlearnt, learnt))), target=("=", 0),
            note=f"{learnt['aborted']} samples aborted, {unlearnt['aborted']} before",
        ),
    ]  # fmt: skip


def lost_tokens(found: dict[str, Any]) -> int:
    """Tokens that were computed and are in no answer.

    A row of a decode step is a token. The first token of a sample is the prompt's, and the
    last row of each is one under way when the sample ends.
    """
    return max(0, int(found["decode_rows"] - found["tokens"]))


def run(
    place: Path, steps: list[dict[str, Any]], arguments: dict[str, Any]
) -> list[dict[str, Any]]:
    """Run steps of training in an engine of its own."""
    task = {
        "model": str(place / "model"),
        "steps": steps,
        "arguments": {**ENGINE, **arguments},
    }
    (place / rollout_engine.TASK_FILE).write_text(json.dumps(task))
    print(arguments, file=sys.stderr, flush=True)
    subprocess.run(
        [sys.executable, rollout_engine.__file__, str(place)],
        check=True,
        timeout=TIMEOUT_S,
    )
    results: list[dict[str, Any]] = json.loads(
        (place / rollout_engine.RESULT_FILE).read_text()
    )
    return results
