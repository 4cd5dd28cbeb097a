"""Answers cut by stop rules: tokens, seconds, and losses.

Grammars make the demo model, whose weights are random, write a JSON object and more text after it, or
repeat a phrase, as models do that were not told when to stop. Each job runs with ``sglang-batch
run``, with rules and without. A job whose answers no rule cuts shows what rules cost.

Seconds are those of the summary, without the start of the engine, the least of several runs of
each kind in turn.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from report import Figure

from sglang_batch.batch_api.stop_rules import AnswerText, AnswerWatch, StopRules
from sglang_batch.run.demo_model import write_demo_model

LINES, RUNS = 2_000, 3
# Most tokens of an answer. Each of the demo model's is a byte.
MOST = 200
URL = "/v1/completions"
ENGINE = ("--dtype=float32", "--max-total-tokens=40000", "--max-running-requests=128")
OBJECT = r'\{"n": \[[1-9][0-9]{2}, [1-9][0-9]\], "ok": (true|false)\}'
# By kind: what every answer is, and the rule that cuts it.
KINDS = {
    "json": (OBJECT + r"\n\nNote: [a-z ]{300}", {"json": True}),
    "regex": (r"[a-f]{20}\nEND\n[a-f]{300}", {"regex": "END\n"}),
    "repetition": (r"[0-9]{12}(and so on, ){40}", {"repetition": True}),
}
# Rules that find nothing in plain answers.
IDLE = {"json": True, "regex": "END\n", "repetition": True}
TOKENS = 20_000


def measure(quick: bool) -> list[Figure]:
    """Jobs with and without rules."""
    scale = 20 if quick else 1
    num_lines, num_runs = LINES // scale, 1 if quick else RUNS
    with tempfile.TemporaryDirectory(prefix="bench-savings-") as scratch:
        place = Path(scratch)
        write_demo_model(place / "model")
        return [
            *cut_job(place, num_lines),
            *plain_job(place, num_lines, num_runs),
            *rule_times(place / "model"),
            time_without_rules(),
        ]


def cut_job(place: Path, num_lines: int) -> list[Figure]:
    """A job of which every answer is cut, a third of the lines by each rule."""
    kinds = [list(KINDS)[i % len(KINDS)] for i in range(num_lines)]
    lines = [{"regex": KINDS[kind][0]} for kind in kinds]
    ruled = [
        {**fields, "stop_rules": KINDS[kind][1]}
        for kind, fields in zip(kinds, lines, strict=True)
    ]
    whole, full = run(place, lines)
    cut, short = run(place, ruled)
    print(f"cut: {whole['seconds']} s, {cut['seconds']} s", file=sys.stderr)
    figures = []
    for kind in KINDS:
        numbers = [i for i, each in enumerate(kinds) if each == kind]
        before, after = (sum(x[i].tokens for i in numbers) for x in (full, short))
        good = sum(
            full[i].text.startswith(short[i].text) and is_complete(kind, short[i].text)
            for i in numbers
        )
        figures += [
            Figure(
                f"{kind}: output tokens, of those without the rule", after / before,
                target=("<=", 0.6), note=f"{after:,} of {before:,}",
            ),
            Figure(
                "  share of answers that are cut, complete, and the beginning of those "
                "without the rule",
                min(good, cut[f"cut_{kind}"]) / len(numbers), target=("=", 1),
            ),
        ]  # fmt: skip
    figures.append(
        Figure(
            "all three: seconds, of those without rules",
            cut["seconds"] / whole["seconds"],
            note=f"{cut['seconds']} s against {whole['seconds']} s",
        )
    )
    return figures


def is_complete(kind: str, text: str) -> bool:
    """Whether an answer has all that it is wanted for, and nothing behind it."""
    if kind == "json":
        return isinstance(json.loads(text), dict)
    if kind == "regex":
        return text.endswith("END\n")
    return text[12:].startswith("and so on, " * 4)


def plain_job(place: Path, num_lines: int, num_runs: int) -> list[Figure]:
    """A job of plain answers, with rules that cut none, and without rules."""
    lines = uncut_lines(place, num_lines)
    found: dict[bool, list[float]] = {False: [], True: []}
    answers = {}
    for nth in range(num_runs):
        for ruled in (False, True) if nth % 2 == 0 else (True, False):
            summary, answers[ruled] = run(place, lines, IDLE if ruled else None)
            found[ruled].append(summary["seconds"])
            print(f"plain, rules {ruled}: {summary['seconds']} s", file=sys.stderr)
    plain, checked = min(found[False]), min(found[True])
    return [
        Figure(
            "nothing cut: answers with rules that differ from those without",
            sum(a != b for a, b in zip(answers[False], answers[True], strict=True)),
            target=("=", 0), note=f"{num_lines:,} lines of 64 tokens",
        ),
        Figure(
            "  seconds with all three rules, of those without rules", checked / plain,
            note=f"{checked} s against {plain} s",
        ),
    ]  # fmt: skip


def uncut_lines(place: Path, num_lines: int) -> list[dict[str, Any]]:
    """Lines whose answers no rule cuts. Some answers of the model begin with a number, which
    is a JSON value."""
    fields: dict[str, Any] = {"ignore_eos": True, "max_tokens": 64}
    tried = [{**fields, "prompt": f"Question {i}?"} for i in range(num_lines * 5 // 4)]
    _, answers = run(place, tried, IDLE)
    whole = [
        line for line, answer in zip(tried, answers, strict=True) if answer.tokens == 64
    ]
    if len(whole) < num_lines:
        raise RuntimeError(f"rules cut all but {len(whole)} of {len(tried)} answers")
    return whole[:num_lines]


def rule_times(model: Path) -> list[Figure]:
    """Processor time of each rule for a token, text included, where it cuts nothing."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = json.dumps([f"The quick brown fox, number {i * 7919}" for i in range(999)])
    ids = list(text.encode())[:TOKENS]
    figures = []
    for name, rules in {**{k: {k: v} for k, v in IDLE.items()}, "all": IDLE}.items():
        seconds = []
        for _ in range(3):
            watch = AnswerWatch(
                StopRules.parse(rules),
                AnswerText(tokenizer, ids[:5], skip_special_tokens=True)
                if name != "repetition"
                else None,
            )
            begun = time.process_time()
            assert not any(watch.feed(token) for token in ids)
            seconds.append(time.process_time() - begun)
        micros = min(seconds) / len(ids) * 1e6
        figures.append(
            Figure(f"{name}: processor time for a token", micros, "µs", ("<=", 5.0))
        )
    return figures


def time_without_rules() -> Figure:
    """What a request without rules pays: once, when it arrives. Its tokens pay nothing."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_batch.srt.scheduler.answer_ends import watch_request

    req: Any = SimpleNamespace(sampling_params=SamplingParams(), update_finish_state=1)
    begun = time.process_time()
    for _ in range(TOKENS):
        watch_request(req, None, req, print)
    seconds = time.process_time() - begun
    assert req.update_finish_state == 1
    return Figure(
        "no rules: processor time for a request",
        seconds / TOKENS * 1e6,
        "µs",
        ("<=", 2),
    )


class Answer(NamedTuple):
    """An answer's text and its number of tokens."""

    text: str
    tokens: int


def run(
    place: Path, lines: Sequence[dict[str, Any]], rules: dict[str, Any] | None = None
) -> tuple[dict[str, Any], list[Answer]]:
    """Run a job of lines with these fields. Returns its summary and its answers."""
    source, output = place / "in.jsonl", place / "out.jsonl"
    source.write_bytes(b"".join(line(i, fields) for i, fields in enumerate(lines)))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sglang_batch", "run", "--overwrite"),
            *("-i", str(source), "-o", str(output)),
            *([] if rules is None else [f"--stop-rules={json.dumps(rules)}"]),
            *(f"--model-path={place / 'model'}", "--served-model-name=demo", *ENGINE),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    answers = []
    for result in map(json.loads, output.read_bytes().splitlines()):
        body = result["response"]["body"]
        tokens = body["usage"]["completion_tokens"]
        answers.append(Answer(body["choices"][0]["text"], tokens))
    return json.loads(done.stdout.splitlines()[-1]), answers


def line(number: int, fields: dict[str, Any]) -> bytes:
    body = {"model": "demo", "prompt": f"Question {number}: why?", "max_tokens": MOST}
    body |= {"temperature": 0, **fields}
    entry = {"custom_id": f"line-{number}", "method": "POST", "url": URL, "body": body}
    return json.dumps(entry).encode() + b"\n"
