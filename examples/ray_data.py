"""Answer the rows of a Ray Data dataset: as one stream, and block by block.

python examples/ray_data.py [--url http://localhost:30000]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from typing import Any

try:
    import ray
except ModuleNotFoundError:
    raise SystemExit(
        "error: this example needs a package: pip install 'sglang-batch[ray]'"
    ) from None

import pyarrow as pa
from demo import server

from sglang_batch import AnswerColumns, StreamAnswer, stream

TEMPLATE = {
    "messages": [{"role": "user", "content": "{{question}}"}],
    "max_tokens": 8,
    "temperature": 0,
}
BLOCK_ROWS = 1000


def dataset_of(answers: Iterator[StreamAnswer]) -> ray.data.Dataset:
    """A dataset of rows with their answers. Its blocks are in Ray's object store."""
    blocks = []
    while part := list(islice(answers, BLOCK_ROWS)):
        found = [answer.row | {"answer": answer.text} for answer in part]
        blocks.append(ray.put(pa.Table.from_pylist(found)))
    return ray.data.from_arrow_refs(blocks)


def main(url: str) -> None:
    questions = [{"question": f"What is {i} + {i}?"} for i in range(64)]
    dataset = ray.data.from_items(questions)

    # One plan over all blocks.
    whole = dataset_of(stream(dataset.iter_rows(), template=TEMPLATE, server=url))

    # A plan for each block. To load a model in the actor, give model_path=... instead of
    # server=..., and num_gpus=1 to map_batches.
    blocks = dataset.map_batches(
        AnswerColumns,
        fn_constructor_kwargs={"template": TEMPLATE, "server": url},
        batch_format="pyarrow",
        batch_size=32,
        compute=ray.data.ActorPoolStrategy(size=1),
    )
    by_question = {row["question"]: row["answer"] for row in whole.take_all()}
    rows: list[dict[str, Any]] = blocks.take_all()
    same = sum(by_question[row["question"]] == row["answer"] for row in rows)
    print(f"{same} of {len(questions)} answers are the same both ways")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", help="of an offline server")
    options = parser.parse_args()
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    with server(options.url) as url:
        main(url)
