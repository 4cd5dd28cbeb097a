"""Answers cut by stop rules: tokens, seconds, and what is lost.

Grammars make the demo model, whose weights are random, write a JSON object and then go on, or
repeat a phrase, as models do that were not told when to stop. Each job runs with ``sglang-batch
run``, with rules and without. A job whose answers no rule cuts shows what rules cost, and one
without any shows that they cost nothing there.

Seconds are those of the summary, without the start of the engine, the least of several runs of
each kind in turn.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import Figure

from sglang_batch.demo_model import write_demo_model
from sglang_batch.stop_rules.answer_text import AnswerText
from sglang_batch.stop_rules.answer_watch import AnswerWatch
from sglang_batch.stop_rules.rule_settings import StopRules

LINES, RUNS = 2_000, 3
# Most tokens of an answer. Each of the demo model's is a byte.
MOST = 200
URL = "/v1/completions"
ENGINE = ("--dtype=float32", "--max-total-tokens=40000", "--max-running-requests=128")
OBJECT = r'\{"n": \[[0-9]{3}, [0-9]{2}\], "ok": (true|false)\}'
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
    figures = []
    with tempfile.TemporaryDirectory(prefix="bench-savings-") as scratch:
        place = Path(scratch)
        write_demo_model(place / "model")
        for kind, (grammar, rules) in KINDS.items():
            figures += cut_job(place, kind, grammar, rules, num_lines // 4)
        figures += plain_job(place, num_lines, num_runs)
        figures += rule_times(place / "model")
    return figures


def cut_job(
    place: Path, kind: str, grammar: str, rules: dict[str, Any], num_lines: int
) -> list[Figure]:
    """A job of which every answer is cut."""
    fields = {"regex": grammar}
    whole, full = run(place, num_lines, fields, None)
    cut, short = run(place, num_lines, fields, rules)
    beginnings = sum(full[i].startswith(short[i]) for i in full)
    complete = sum(is_complete(kind, text) for text in short.values())
    print(f"{kind}: {whole['seconds']} s, {cut['seconds']} s", file=sys.stderr)
    return [
        Figure(
            f"{kind}: output tokens, of those without the rule",
            cut["output_tokens"] / whole["output_tokens"], target=("<=", 0.6),
            note=f"{cut['output_tokens']:,} of {whole['output_tokens']:,}",
        ),
        Figure("  seconds, of those without it", cut["seconds"] / whole["seconds"]),
        Figure(
            "  answers cut that are complete, and begin the answer without the rule",
            min(cut[f"cut_{kind}"], beginnings, complete) / num_lines, target=("=", 1),
        ),
    ]  # fmt: skip


def is_complete(kind: str, text: str) -> bool:
    """Whether an answer has all that it is wanted for, and nothing behind it."""
    if kind == "json":
        return isinstance(json.loads(text), dict)
    if kind == "regex":
        return text.endswith("END\n")
    return text[12:].startswith("and so on, " * 4)


def plain_job(place: Path, num_lines: int, num_runs: int) -> list[Figure]:
    """A job of plain answers, with rules that cut none, and without rules."""
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    texts = {}
    for nth in range(num_runs):
        for ruled in (False, True) if nth % 2 == 0 else (True, False):
            fields = {"ignore_eos": True, "max_tokens": 64}
            summary, texts[ruled] = run(
                place, num_lines, fields, IDLE if ruled else None
            )
            found[ruled].append(summary)
            print(f"plain, rules {ruled}: {summary['seconds']} s", file=sys.stderr)
    plain, ruled_s = (min(x["seconds"] for x in found[key]) for key in (False, True))
    tokens = found[False][0]["output_tokens"]
    return [
        Figure(
            "nothing cut: answers with rules that differ from those without",
            sum(texts[False][i] != texts[True][i] for i in texts[False]),
            target=("=", 0), note=f"{num_lines:,} lines",
        ),
        Figure(
            "  seconds with all three rules, of those without rules", ruled_s / plain,
            note=f"{ruled_s} s against {plain} s for {tokens:,} tokens",
        ),
    ]  # fmt: skip


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


def run(
    place: Path, num_lines: int, fields: dict[str, Any], rules: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run a job of lines with these fields. Returns its summary and its texts."""
    source, output = place / "in.jsonl", place / "out.jsonl"
    source.write_bytes(b"".join(line(i, fields) for i in range(num_lines)))
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
    texts = {}
    for result in map(json.loads, output.read_text().splitlines()):
        choice = result["response"]["body"]["choices"][0]
        texts[result["custom_id"]] = choice["text"]
    return json.loads(done.stdout.splitlines()[-1]), texts


def line(number: int, fields: dict[str, Any]) -> bytes:
    body = {"model": "demo", "prompt": f"Question {number}: why?", "max_tokens": MOST}
    body |= {"temperature": 0, **fields}
    entry = {"custom_id": f"line-{number}", "method": "POST", "url": URL, "body": body}
    return json.dumps(entry).encode() + b"\n"
