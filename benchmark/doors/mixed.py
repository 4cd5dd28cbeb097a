"""Steps with prompts that also decode, with a line in 60 that wants log probabilities.

A list of prompts runs as it is, with a line in 60 that wants log probabilities (of the
output, the most likely tokens, chosen tokens, or the prompt), and with a line in 60 that
searches with two beams. Tokens and log probabilities are compared with stock SGLang's. In
another list a line in four wants log probabilities of its prompt, which SGLang then takes
from the cache only up to there: the plan has to say so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import mixed_engine
import numpy as np
from report import Figure, print_table

from sglang_batch.planner.prefixes.prefix_tree import build_prefix_tree
from sglang_batch.run.demo_model import write_demo_model
from sglang_batch.store.token_spool import TokenSpool

SEED = 1
TIMEOUT_S = 1200
PERIOD = 60
POLICIES = ("dfs", "dual-scan")
ARGUMENTS = (
    "--dtype=float32",
    "--mem-fraction-static=0.3",
    "--max-total-tokens=16000",
    "--max-running-requests=32",
    "--chunked-prefill-size=192",
    "--enable-mixed-chunk",
    "--log-level=error",
)
# Which log probabilities the lines want, in turn. The first line has to have token ids, or
# SGLang takes the list of all lines for that of one.
KINDS: tuple[dict[str, Any], ...] = (
    {"token_ids_logprob": [65, 66]},
    {},
    {"top_logprobs_num": 3},
    {"logprob_start_len": 0, "top_logprobs_num": 2},
    {"logprob_start_len": 15},
)
Call = dict[str, Any]


def measure(quick: bool) -> list[Figure]:
    lines = 120 if quick else 600
    plain = blend(lines)
    beams = [dict(params) for params in plain["sampling_params"]]
    for params in beams[::PERIOD]:
        params["beam_width"] = 2
    shared = groups(lines // 10)
    prompts = with_logprobs(shared, dict.fromkeys(range(0, lines, 4), 3))
    calls = {
        "plain": plain,
        "logprobs": with_logprobs(
            plain, {i: i // PERIOD for i in range(0, lines, PERIOD)}
        ),
        "beams": plain | {"sampling_params": beams},
        "prompts": prompts,
    }
    figures = []
    with tempfile.TemporaryDirectory(prefix="sglang-batch-bench-") as scratch:
        model = Path(scratch) / "model"
        write_demo_model(model)
        # Stock ends when beams find no row left, and may take another of two equal beams.
        compared = {name: call for name, call in calls.items() if name != "beams"}
        stock = _run(Path(scratch) / "stock", model, compared)
        for policy in POLICIES[:1] if quick else POLICIES:
            ours = _run(Path(scratch) / policy, model, calls, policy)
            figures += _figures(policy, ours, stock)
        figures += _sharing(prompts, ours["prompts"], Path(scratch))
    if quick:
        return [replace(figure, target=None) for figure in figures]
    return figures


# Lists --------------------------------------------------------------------------------


def blend(lines: int) -> Call:
    """Long prompts with short answers among short prompts with long answers."""
    rng = np.random.default_rng([SEED, 1])
    prompts, lengths = [], []
    for i in range(lines):
        prompt, output = ((120, 240), (4, 12)) if i % 2 else ((20, 60), (24, 72))
        prompts.append(rng.integers(0, 256, int(rng.integers(*prompt))).tolist())
        lengths.append(int(rng.integers(*output)))
    return _call(prompts, lengths)


def groups(num_groups: int) -> Call:
    """Groups of ten lines with one prefix, in random order."""
    rng = np.random.default_rng([SEED, 2])
    prompts = []
    for _ in range(num_groups):
        prefix = rng.integers(0, 256, 96).tolist()
        prompts += [prefix + rng.integers(0, 256, 16).tolist() for _ in range(10)]
    rng.shuffle(prompts)
    return _call(prompts, [8] * len(prompts))


def _call(prompts: list[list[int]], lengths: list[int]) -> Call:
    exactly = {"temperature": 0, "ignore_eos": True}
    return {
        "input_ids": prompts,
        "sampling_params": [exactly | {"max_new_tokens": most} for most in lengths],
    }


def with_logprobs(call: Call, kinds: dict[int, int]) -> Call:
    """The same list, with the kind of log probabilities that some of its lines want."""
    wishes = [
        {"return_logprob": True} | KINDS[kinds[i] % len(KINDS)] if i in kinds else {}
        for i in range(len(call["input_ids"]))
    ]
    defaults = {
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
    }
    return call | {
        name: [wish.get(name, default) for wish in wishes]
        for name, default in defaults.items()
        if any(name in wish for wish in wishes)
    }


# Engines ------------------------------------------------------------------------------


def _run(
    scratch: Path, model: Path, calls: dict[str, Call], policy: str | None = None
) -> dict[str, Any]:
    """The lists on one engine: stock SGLang, or ours by a policy."""
    scratch.mkdir()
    arguments = [f"--model-path={model}", *ARGUMENTS]
    if policy is not None:
        steps = str(scratch / mixed_engine.STEPS_FILE)
        # Costs that are learned would run prompts alone where that pays, as on a CPU.
        settings = {"policy": policy, "step_log": steps, "learn_costs": False}
        config = json.dumps(settings)
        arguments += ["--offline-batch", f"--offline-batch-config={config}"]
    task = {"arguments": arguments, "calls": calls}
    (scratch / mixed_engine.TASK_FILE).write_text(json.dumps(task))
    subprocess.run(
        [sys.executable, mixed_engine.__file__, str(scratch)],
        check=True,
        timeout=TIMEOUT_S,
    )
    found: dict[str, Any] = json.loads((scratch / mixed_engine.RESULT_FILE).read_text())
    return found


def _figures(policy: str, ours: dict[str, Any], stock: dict[str, Any]) -> list[Figure]:
    shares, rows = {}, []
    for name, of in ours.items():
        steps = np.array(of["steps"])
        prompts = steps[:, 0] > 0
        shares[name] = float((steps[prompts, 1] > 0).mean())
        rows.append(
            [name, str(len(steps)), str(int(prompts.sum())), f"{shares[name]:.1%}"]
        )
    print_table(policy, ["list", "steps", "with prompts", "these decode"], rows)
    figures = [
        Figure(
            f"{policy}, 1 in {PERIOD} with {name}: mixed steps over plain",
            shares[name] / shares["plain"],
            "",
            (">=", 0.9),
        )
        for name in ("logprobs", "beams")
    ]
    differing, most = _differences(ours, stock)
    return [
        *figures,
        Figure(f"{policy}: answers unlike stock's", differing, "", ("=", 0)),
        Figure(f"{policy}: most between log probabilities", most, "", ("<=", 1e-4)),
    ]


def _differences(ours: dict[str, Any], stock: dict[str, Any]) -> tuple[int, float]:
    """Answers with other tokens, and the largest difference of the numbers of others."""
    differing, most = 0, 0.0
    for name in stock:
        for mine, theirs in zip(
            ours[name]["answers"], stock[name]["answers"], strict=True
        ):
            if mine["output_ids"] != theirs["output_ids"]:
                differing += 1
                continue
            a, b = np.array(mine["logprobs"]), np.array(theirs["logprobs"])
            most = max(most, float(np.abs(a - b).max(initial=0.0)))
    return differing, most


def _sharing(call: Call, of: dict[str, Any], scratch: Path) -> list[Figure]:
    with TokenSpool(scratch / "tokens.i32") as spool:
        for prompt, wanted, start in zip(
            call["input_ids"],
            call["return_logprob"],
            call["logprob_start_len"],
            strict=True,
        ):
            spool.append(prompt, start if wanted else None)
        planned = int(build_prefix_tree(*spool.arrays()).lcp.sum())
    cached = sum(answer["cached_tokens"] for answer in of["answers"])
    return [
        Figure(
            "1 in 4 with logprobs of prompts: cached tokens over planned",
            cached / planned,
            "",
            (">=", 1.0),
            f"{cached} of {sum(map(len, call['input_ids']))}",
        )
    ]
