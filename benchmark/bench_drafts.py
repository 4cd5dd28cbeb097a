"""Drafts from siblings in the tail of a job, where few requests run, on a small real model.

    python benchmark/bench_drafts.py --model MODEL            both jobs
    python benchmark/bench_drafts.py --model MODEL --jobs questions --requests 16
    python benchmark/bench_drafts.py --model MODEL --jobs questions --draft-model DRAFTS

The model is that of `sglang-batch demo-model --real`. A job asks about documents of the demo:

samples: 64 samples of a prompt, each with its seed, at temperature 0.7. They need
    --enable-deterministic-inference, which multiplies row by row on a CPU and so is slow.
questions: the first 64 lines of the demo, up to six questions on each document, greedy.

Each runs without drafts, with drafts where few requests run, and as the costs of this machine
decide; the questions also with drafts in each step, as SGLang has them, and with those of
--draft-model (STANDALONE, WIDTH tokens), if it is given. The tail of a job are its steps without
prompts in which fewer requests decode than drafts are for. Seconds are those of one run.

The last line is one JSON document. The exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from peer_parts.jobs import DEMO_LINES
from report import Figure, add_save, finish, print_figures, print_table
from throughput_engine import Task, TaskResult, run_task

# Requests that run at a time, and those for which a step drafts.
RUNNING, FEW = 32, 8
WIDTH = 8
NGRAM = [
    "--speculative-algorithm=NGRAM",
    f"--speculative-num-draft-tokens={WIDTH}",
]
IN_EACH_STEP = "in each step"
# By name: the most requests for which steps draft. None: by the costs.
DRAFTS: dict[str, int | None] = {
    IN_EACH_STEP: RUNNING,
    f"where at most {FEW} run": FEW,
    "by the costs": None,
}
OF_A_MODEL = "of a draft model, in each step"
NO_DRAFTS = "none"


def samples(tokenizer: Any, number: int, tokens: int) -> tuple[list[Any], list[Any]]:
    prompt = _prompt(tokenizer, 0)
    params = {"temperature": 0.7, "max_new_tokens": tokens}
    return [prompt] * number, [{**params, "sampling_seed": n} for n in range(number)]


def questions(tokenizer: Any, number: int, tokens: int) -> tuple[list[Any], list[Any]]:
    prompts = [_prompt(tokenizer, line) for line in range(number)]
    return prompts, [{"temperature": 0, "max_new_tokens": tokens}] * number


JOBS = {"samples": samples, "questions": questions}


def _prompt(tokenizer: Any, line: int) -> list[int]:
    messages = json.loads(DEMO_LINES.read_text().splitlines()[line])["body"]["messages"]
    text = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def run(job: str, drafts: str, options: argparse.Namespace) -> TaskResult:
    """A job in a process of its own."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompts, params = JOBS[job](tokenizer, options.requests, options.tokens)
    config: dict[str, Any] = {"learn_costs": False}
    arguments = [
        f"--model-path={options.model}",
        "--dtype=float32",
        f"--max-running-requests={RUNNING}",
        f"--max-total-tokens={RUNNING * (max(map(len, prompts)) + options.tokens + 4 * WIDTH)}",
        "--sleep-on-idle",
    ]
    if job == "samples":
        arguments.append("--enable-deterministic-inference")
    if drafts == OF_A_MODEL:
        arguments += [
            "--speculative-algorithm=STANDALONE",
            f"--speculative-draft-model-path={options.draft_model}",
            f"--speculative-num-steps={WIDTH - 1}",
            "--speculative-eagle-topk=1",
            f"--speculative-num-draft-tokens={WIDTH}",
        ]
    elif drafts != NO_DRAFTS:
        arguments += NGRAM
        config["draft_requests"] = DRAFTS[drafts]
    arguments.append(f"--offline-batch-config={json.dumps(config)}")
    return run_task(
        Task(True, "dfs", arguments, prompts, params, threads=options.threads)
    )


def tail(done: TaskResult) -> Any:
    steps = done.steps
    few = (steps["decode_rows"] > 0) & (steps["decode_rows"] < FEW)
    return steps[few & (steps["prefill_tokens"] == 0)]


def measure(job: str, options: argparse.Namespace) -> list[Figure]:
    # Row by row, drafts in each step would take half an hour.
    names = [name for name in DRAFTS if job == "questions" or name != IN_EACH_STEP]
    if job == "questions" and options.draft_model:
        names.append(OF_A_MODEL)
    runs = {name: run(job, name, options) for name in (NO_DRAFTS, *names)}
    none, rows, figures = runs[NO_DRAFTS], [], []
    for name, done in runs.items():
        pairs = zip(done.output_ids, none.output_ids, strict=True)
        wrong = sum(a != b for a, b in pairs)
        last, least = tail(done), len(tail(none))
        rows.append(
            [name, len(done.steps), len(last), f"{done.seconds:.1f}",
             f"{float(np.sum(last['forward_s'])):.1f}", wrong]
        )  # fmt: skip
        if name == NO_DRAFTS:
            continue
        figures.append(
            Figure(f"{name}: answers unlike those without drafts", wrong, "", ("=", 0))
        )
        target = None if DRAFTS.get(name) is None else ("<=", 0.75)
        note = f"{len(last)} of {least}"
        figures.append(
            Figure(f"{name}: steps of the tail", len(last) / least, "", target, note)
        )
    lengths = sorted(map(len, none.output_ids))
    print_table(
        f"{job}: {options.requests} requests, {RUNNING} at a time, answers of {lengths[0]} "
        f"to {lengths[-1]} tokens, drafts of {WIDTH}",
        ["drafts", "steps", "of these in the tail", "seconds", "of the tail's forwards",
         "unlike answers"],
        rows,
    )  # fmt: skip
    print_figures(job, figures)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--draft-model", type=Path)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96, help="most of an answer")
    parser.add_argument("--threads", type=int, default=1)
    add_save(parser)
    options = parser.parse_args()
    figures = [figure for job in options.jobs for figure in measure(job, options)]
    missed = [figure.name for figure in figures if figure.met is False]
    document = {"figures": [each.as_json for each in figures], "missed": missed}
    finish(document, options.save)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
