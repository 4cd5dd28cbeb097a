"""Answer the rows of a Daft data frame: as one stream, and batch by batch.

python examples/daft_frame.py [--url http://localhost:30000]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from typing import Any

try:
    import daft
except ModuleNotFoundError:
    raise SystemExit("error: this example needs a package: pip install daft") from None

import pyarrow as pa
from demo import server

from sglang_batch import AnswerColumns, StreamAnswer, stream

TEMPLATE = {
    "messages": [{"role": "user", "content": "{{question}}"}],
    "max_tokens": 8,
    "temperature": 0,
}
BATCH_ROWS = 1000


def frame_of(answers: Iterator[StreamAnswer]) -> daft.DataFrame:
    """A data frame of rows with their answers."""
    tables = []
    while part := list(islice(answers, BATCH_ROWS)):
        found = [answer.row | {"answer": answer.text} for answer in part]
        tables.append(pa.Table.from_pylist(found))
    return daft.from_arrow(tables)


@daft.cls
class Answers:
    """A batch function. With model_path=... it loads a model of its own."""

    def __init__(self, **where: Any) -> None:
        self._answered = AnswerColumns(TEMPLATE, **where)

    @daft.method.batch(return_dtype=daft.DataType.string(), batch_size=32)
    def of(self, question: daft.Series) -> list[str | None]:
        answers: list[str | None] = self._answered({"question": question.to_pylist()})[
            "answer"
        ]
        return answers


def main(url: str) -> None:
    questions = [f"What is {i} + {i}?" for i in range(64)]
    frame = daft.from_pydict({"question": questions})

    # One plan over the whole frame.
    whole = frame_of(stream(frame.iter_rows(), template=TEMPLATE, server=url))

    # A plan for each batch.
    batches = frame.with_column("answer", Answers(server=url).of(daft.col("question")))
    by_question = {row["question"]: row["answer"] for row in whole.iter_rows()}
    same = sum(by_question[row["question"]] == row["answer"] for row in batches)
    print(f"{same} of {len(questions)} answers are the same both ways")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", help="of an offline server")
    options = parser.parse_args()
    with server(options.url) as url:
        main(url)
