"""The first thing to run: a real file through a real offline server, start to end.

Writes the demo model, launches ``python -m sglang.launch_server --offline-batch`` on
it, submits ``benchmark/data/demo_requests.jsonl`` with the official ``openai`` client,
follows the batch, prints some answers and what it came to. The last line is the
summary as JSON. The exit status is 0 only if every request was answered.

    python benchmark/demo.py [--input FILE] [--port N]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from demo_server import follow, launched
from openai import OpenAI
from openai.types import Batch

from sglang_batch.demo_model import write_demo_model
from sglang_batch.run.summary import Counts, Summary

DATA = Path(__file__).parent / "data" / "demo_requests.jsonl"
NUM_SHOWN = 3
MAX_SHOWN_CHARS = 60


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
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="sglang-batch-demo-") as scratch:
        model = Path(scratch) / "model"
        write_demo_model(model)
        with launched(
            model, "demo", Path(scratch), "--dtype", "float32", port=options.port
        ) as url:
            return run_batch(url, options.input)


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
    """A few answers with their requests. The model is random, and so are they."""
    questions = {
        line["custom_id"]: line["body"]["messages"][-1]["content"]
        for line in map(json.loads, path.read_text().splitlines())
    }
    assert batch.output_file_id is not None
    lines = api.files.content(batch.output_file_id).text.split("\n")
    for line in map(json.loads, lines[:NUM_SHOWN]):
        answer = line["response"]["body"]["choices"][0]["message"]["content"]
        question = questions[line["custom_id"]]
        print(f"\n{line['custom_id']}")
        print(f"  asked:    ...{question[-MAX_SHOWN_CHARS:]!r}")
        print(f"  answered: {answer[:MAX_SHOWN_CHARS]!r}")
    print()


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
