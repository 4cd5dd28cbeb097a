"""Time and memory of checking an input file.

    python benchmark/bench_validation.py                  a million short chat lines
    python benchmark/bench_validation.py --lines 10000    fewer

One process checks one file twice: by the rules of a batch of one endpoint and model, and
by the rules of ``sglang-batch run``, which checks each body by SGLang's request classes
as well. Seconds are processor time,
so that other work on the machine does not count.

The last line is one JSON document. The exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from report import RESULTS, Figure, finish, print_figures

from sglang_batch.batch_api.jsonl import BatchFile, validate
from sglang_batch.batch_api.lines import LineRules
from sglang_batch.srt.engine.checks.body_checks import body_errors

MODEL = "demo"
CHAT = "/v1/chat/completions"
# Positions, line numbers and digests: 40 bytes a line, and a sorted copy of digests.
BYTES_PER_LINE = 80
RULES = {
    "of one endpoint and model": LineRules(endpoint=CHAT, models=(MODEL,)),
    "of a run, with bodies": LineRules(require_model=False, check_body=body_errors),
}
# Lines per second of one core that each must reach.
TARGETS = dict(zip(RULES, (200_000.0, 10_000.0), strict=True))


def write_lines(path: Path, num_lines: int) -> None:
    """Short questions, each a line of some 180 bytes."""
    with open(path, "w") as file:
        for i in range(num_lines):
            messages = [{"role": "user", "content": f"How much is {i} times {i}?"}]
            body = {"model": MODEL, "messages": messages, "max_tokens": 64}
            line = {
                "custom_id": f"request-{i}",
                "method": "POST",
                "url": CHAT,
                "body": body,
            }
            file.write(json.dumps(line) + "\n")


def lines_per_second(path: Path, rules: LineRules, num_lines: int) -> float:
    """Lines checked in a second of one core."""
    started = time.process_time()
    result = validate(path, rules)
    seconds = time.process_time() - started
    assert isinstance(result, BatchFile), result.listed[:3]
    with result.closing():
        assert len(result) == num_lines
    return num_lines / seconds


def peak_bytes() -> int:
    """The most memory this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--lines", type=int, default=1_000_000, metavar="N",
        help="lines of the file (default: 1,000,000)",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="20,000 lines, without targets"
    )
    parser.add_argument(
        "--save", action="store_true", help="write the JSON to results/"
    )
    options = parser.parse_args()
    if options.quick and options.save:
        parser.error("--save is for figures of the full sizes; leave out --quick.")
    num_lines = 20_000 if options.quick else options.lines
    figures = []
    with TemporaryDirectory(prefix="sglang-batch-") as directory:
        path = Path(directory) / "lines.jsonl"
        write_lines(path, num_lines)
        body_errors(CHAT, b"{}")  # loads the request classes
        before = peak_bytes()
        for name, rules in RULES.items():
            rate = lines_per_second(path, rules, num_lines)
            target = None if options.quick else (">=", TARGETS[name])
            figures.append(Figure(f"rules {name}", rate, "lines/s", target))
        grown = (peak_bytes() - before) / num_lines
        note = f"file: {path.stat().st_size / num_lines:.0f} B a line"
    target = None if options.quick else ("<=", float(BYTES_PER_LINE))
    figures.append(Figure("peak memory, grown by", grown, "B a line", target, note))
    print_figures(f"Checking {num_lines:,} lines on one core", figures)
    missed = [figure.name for figure in figures if figure.met is False]
    save = RESULTS / "validation.json" if options.save else None
    document = {"figures": [figure.as_json for figure in figures], "missed": missed}
    finish({"lines": num_lines, "peak_bytes": peak_bytes(), **document}, save)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
