"""The first thing to run: a real file through a real offline server, start to end.

Writes a small real model, launches ``sglang-batch serve`` on
it, submits lines of ``benchmark/data/demo_requests.jsonl`` with the official ``openai``
client, follows the batch, prints some answers and the totals. The last line is the
summary as JSON. The exit status is 0 only if every request was answered.

Where the package with the real model is not installed, or with ``--random``, the model is
a random one, which answers noise but takes a second for all 240 lines.

    python benchmark/demo.py [--random] [--input FILE] [--lines N] [--port N]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from demo_server import follow, launched
from openai import OpenAI
from openai.types import Batch

from sglang_batch.run.demo_model import REAL_MODEL, write_demo_model, write_real_model
from sglang_batch.run.summary import Counts, Summary

DATA = Path(__file__).parent / "data" / "demo_requests.jsonl"
# As many as a laptop's CPU answers with the real model in a minute.
REAL_LINES = 48
NUM_SHOWN = 6
MAX_SHOWN_CHARS = 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--input",
        type=Path,
        default=DATA,
        help="batch input file (default: the demo's)",
    )
    parser.add_argument(
        "--port", type=int, help="port of the server (default: a free one)"
    )
    parser.add_argument(
        "--random",
        action="store_true",
        help="a random model, whose answers are noise, and all lines",
    )
    parser.add_argument(
        "--lines",
        type=int,
        help=f"first lines of the input to run (default: {REAL_LINES}, or all if the "
        "model is random)",
    )
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="sglang-batch-demo-") as scratch:
        model = Path(scratch) / "model"
        is_real = not options.random and wrote_real_model(model)
        if not is_real:
            write_demo_model(model)
        path = first_lines(
            options.input, options.lines or (REAL_LINES if is_real else None), scratch
        )
        with launched(
            model,
            "demo",
            Path(scratch),
            *("--dtype", "float32"),
            port=options.port,
            threads=os.cpu_count() if is_real else 1,
        ) as url:
            return run_batch(url, path)


def wrote_real_model(folder: Path) -> bool:
    """Whether there is a model that answers. If not, says why."""
    try:
        write_real_model(folder)
    except ModuleNotFoundError as error:
        print(f"The demo runs a random model, whose answers are noise: {error}.")
        return False
    print(f"The demo runs {REAL_MODEL}, in float32 on the CPU.", flush=True)
    return True


def first_lines(path: Path, number: int | None, scratch: str) -> Path:
    """A file with so many lines of another, or that one itself."""
    if number is None:
        return path
    lines = path.read_bytes().split(b"\n")[:number]
    part = Path(scratch) / path.name
    part.write_bytes(b"\n".join(lines))
    return part


def run_batch(url: str, path: Path) -> int:
    api = OpenAI(base_url=f"{url}/v1", api_key="none")
    with path.open("rb") as content:
        file = api.files.create(file=content, purpose="batch")
    print(f"uploaded {path.name} as {file.id}", flush=True)
    started = time.monotonic()
    batch = api.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
    )
    batch = follow(api, batch.id)
    seconds = time.monotonic() - started
    if batch.status != "completed":
        print(f"the batch ended as {batch.status}: {batch.errors}", file=sys.stderr)
        return 1
    show_answers(api, batch, path)
    summary = summarize(batch, seconds)
    print(summary.as_table())
    print(summary.as_json())
    expected = sum(1 for line in path.read_bytes().split(b"\n") if line.strip())
    return 0 if summary.completed == expected and not summary.failed else 1


def show_answers(api: OpenAI, batch: Batch, path: Path) -> None:
    """A few answers with their requests."""
    questions = {
        line["custom_id"]: line["body"]["messages"][-1]["content"]
        for line in map(json.loads, path.read_bytes().splitlines())
    }
    assert batch.output_file_id is not None
    lines = api.files.content(batch.output_file_id).content.split(b"\n")
    for line in map(json.loads, lines[:NUM_SHOWN]):
        answer = line["response"]["body"]["choices"][0]["message"]["content"]
        question = questions[line["custom_id"]]
        print(f"\n{line['custom_id']}")
        print(f"  asked:    {shown(question)}")
        print(f"  answered: {shown(answer)}")
    print()


def shown(text: str) -> str:
    """A text in one line: its first words, and the last ones of a long one."""
    text = " ".join(text.split())
    half = MAX_SHOWN_CHARS // 2
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:half]} ... {text[-half:]}"


def summarize(batch: Batch, seconds: float) -> Summary:
    assert batch.request_counts is not None and batch.usage is not None
    usage = batch.usage
    counts = Counts(
        completed=batch.request_counts.completed,
        failed=batch.request_counts.failed,
        prompt_tokens=usage.input_tokens,
        cached_tokens=usage.input_tokens_details.cached_tokens,
        output_tokens=usage.output_tokens,
    )
    optimal = getattr(usage.input_tokens_details, "optimal_cached_share", None)
    return Summary.of_counts(counts, seconds, optimal)


if __name__ == "__main__":
    sys.exit(main())
