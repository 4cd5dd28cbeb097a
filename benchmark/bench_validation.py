"""How fast an input file is checked, and in how much memory.

    python benchmark/bench_validation.py                  a million short chat lines
    python benchmark/bench_validation.py --lines 10000    fewer

One process checks one file, twice: under the rules of a batch of one endpoint and
model, and under those with which ``sglang-batch run`` looks before it loads SGLang.
Seconds are of the processor, so that other work on the machine does not count.

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

from sglang_batch.batch_api.jsonl import BatchFile, LineRules, validate

MODEL = "demo"
CHAT = "/v1/chat/completions"
LINES_PER_S = 200_000
# Positions, line numbers and digests: 40 bytes a line, and a sorted copy of digests.
BYTES_PER_LINE = 80
RULES = {
    "of one endpoint and model": LineRules(endpoint=CHAT, models=(MODEL,)),
    "of a run, before SGLang": LineRules(require_model=False),
}


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
    assert isinstance(result, BatchFile), result[:3]
    with result.closing():
        assert len(result) == num_lines
    return num_lines / seconds


def peak_bytes() -> int:
    """The most memory this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lines", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--quick", action="store_true", help="20,000 lines, no targets")
    parser.add_argument("--save", action="store_true", help="keep the JSON in results/")
    options = parser.parse_args()
    if options.quick and options.save:
        parser.error("--save is for figures of the full sizes; leave out --quick.")
    num_lines = 20_000 if options.quick else options.lines
    figures = []
    with TemporaryDirectory(prefix="sglang-batch-") as directory:
        path = Path(directory) / "lines.jsonl"
        write_lines(path, num_lines)
        before = peak_bytes()
        for name, rules in RULES.items():
            rate = lines_per_second(path, rules, num_lines)
            target = None if options.quick else (">=", float(LINES_PER_S))
            figures.append(Figure(f"rules {name}", rate, "lines/s", target))
        grown = (peak_bytes() - before) / num_lines
        beside = f"file: {path.stat().st_size / num_lines:.0f} B a line"
    target = None if options.quick else ("<=", float(BYTES_PER_LINE))
    figures.append(Figure("peak memory, grown by", grown, "B a line", target, beside))
    print_figures(f"Checking {num_lines:,} lines on one core", figures)
    missed = [figure.name for figure in figures if figure.met is False]
    save = RESULTS / "validation.json" if options.save else None
    document = {"figures": [figure.as_json for figure in figures], "missed": missed}
    finish({"lines": num_lines, "peak_bytes": peak_bytes(), **document}, save)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
