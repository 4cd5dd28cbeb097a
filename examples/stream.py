"""Answer rows as they come, each answer as soon as it is finished.

python examples/stream.py [--url http://localhost:30000]

Without a URL, a tiny model is loaded in processes of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from demo import ENGINE_OPTIONS, model

from sglang_batch import stream

TEMPLATE = {
    "messages": [{"role": "user", "content": "What is {{thing}}?"}],
    "max_tokens": 8,
}


def rows() -> Iterator[dict[str, str]]:
    """Rows from anywhere: a cursor, a queue, a file. There may be no end of them."""
    for thing in ("a batch", "a wave", "a window"):
        yield {"thing": thing}


def print_answers(**where: Any) -> None:
    for answer in stream(rows(), template=TEMPLATE, ordered=True, **where):
        said = answer.text if answer.ok else answer.error
        print(f"{answer.row['thing']}: {said!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", help="of an offline server")
    options = parser.parse_args()
    if options.url is not None:
        print_answers(server=options.url)
    else:
        with model() as path:
            print_answers(model_path=path, **ENGINE_OPTIONS)
