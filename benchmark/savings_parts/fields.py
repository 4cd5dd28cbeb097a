"""Tables whose fields are listed in the best order for each row.

Five tables of installed packages, as prompts with the fields in the template's order, in the
order of ``--optimize-fields``, and in that of greedy group recursion, the published way.
Prompt tokens computed are those of the planner's prefix tree: each prefix once. Tokens are
bytes, as the demo model has them. Then small tables against the least that any orders
reach, and a large one for the time it takes.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from report import Figure

from sglang_batch.inputs.field_sample import FieldSample
from sglang_batch.inputs.job_input import JobInput, input_sources
from sglang_batch.inputs.staging import Staging
from sglang_batch.inputs.template import Template
from sglang_batch.planner.fields.field_orders import field_orders
from sglang_batch.planner.fields.field_table import (
    FieldTable,
    prefix_weight,
    text_table,
)
from sglang_batch.planner.fields.value_splits import MOST_OPTIMAL_ROWS, best_costs
from sglang_batch.planner.prefixes.prefix_tree import build_prefix_tree

from .field_tables import Rows, tables
from .greedy_groups import greedy_orders

ROWS = 25_000
SMALL_TABLES = 200
# Rows and fields of the large table.
LARGE = 100_000, 20
SEED = 0
BEFORE, AFTER = "Read this record and answer in one word.\n", "\nAnswer:"


def measure(quick: bool) -> list[Figure]:
    """Prompt tokens computed, off, on and greedy, and the time to find the orders."""
    scale = 25 if quick else 1
    figures, ratios = [], []
    for name, make in tables(ROWS // scale).items():
        found, ratio = _table(name, make())
        figures += found
        ratios.append(ratio)
    figures.append(
        Figure(
            "tables with 1.5 times fewer prompt tokens computed",
            sum(ratio >= 1.5 for ratio in ratios), target=(">=", 3),
        )
    )  # fmt: skip
    return [*figures, *_small_tables(), _large(scale)]


def _table(name: str, rows: Rows) -> tuple[list[Figure], float]:
    """The figures of a table, and how many times fewer tokens are computed."""
    own, ordered = _staged(rows)
    off, on = _computed(own), _computed(ordered)
    greedy = _computed(_greedy(rows))
    followed = _computed(_sampled(rows))
    return [
        Figure(f"{name}, {len(rows):,} rows: prompt tokens", sum(map(len, own))),
        Figure("  computed, template's order", off),
        Figure("  computed, --optimize-fields", on, target=("<=", min(off, greedy))),
        Figure("  computed, greedy group recursion", greedy),
        Figure("  times fewer than in the template's order", off / on,
               note=f"greedy {off / greedy:.3f}"),
        Figure("  share of that saving with orders from every fourth row",
               (off - followed) / (off - on)),
    ], off / on  # fmt: skip


def _staged(rows: Rows) -> tuple[list[bytes], list[bytes]]:
    """The prompts of a table as ``run`` makes them, in the template's order and the best."""
    fields = "\n".join(f"{name}: {{{{{name}}}}}" for name in rows[0])
    prompt = f"{BEFORE}{{{{#fields}}}}{fields}{{{{/fields}}}}{AFTER}"
    with tempfile.TemporaryDirectory(prefix="bench-fields-") as scratch:
        place = Path(scratch)
        (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        inputs = JobInput(
            input_sources([str(place / "rows.jsonl")]),
            Template({"prompt": prompt}),
            endpoint="/v1/completions",
            optimize_fields=True,
        )
        staged = Staging(place, place / "own.jsonl").stage(inputs)
        return _prompts(place / "own.jsonl"), _prompts(staged.path)


def _prompts(path: Path) -> list[bytes]:
    with open(path, "rb") as file:
        return [json.loads(line)["body"]["prompt"].encode() for line in file]


def _greedy(rows: Rows) -> list[bytes]:
    texts = _texts(rows)
    table = _table_of([[text.encode() for text in row] for row in texts])
    return list(map(_prompt, texts, greedy_orders(table).tolist()))


def _sampled(rows: Rows) -> list[bytes]:
    """The prompts as if the table were too large for more than every fourth row."""
    texts = _texts(rows)
    escaped = [[json.dumps(text)[1:-1] for text in row] for row in texts]
    num_fields = len(texts[0])
    sample = FieldSample(num_fields, head=False, max_values=len(rows) * num_fields // 3)
    for row in escaped:
        sample.add("", row)
    order_of, _ = sample.orders()
    return [
        _prompt(row, order_of(number, "", fields))
        for number, (row, fields) in enumerate(zip(texts, escaped, strict=True))
    ]


def _texts(rows: Rows) -> list[list[str]]:
    return [[f"{name}: {value}" for name, value in row.items()] for row in rows]


def _prompt(texts: list[str], order: Sequence[int]) -> bytes:
    fields = "\n".join(texts[field] for field in order)
    return f"{BEFORE}{fields}{AFTER}".encode()


def _table_of(texts: list[list[bytes]]) -> FieldTable:
    numbers: list[dict[bytes, int]] = [{} for _ in texts[0]]
    values = [
        [
            known.setdefault(text, len(known))
            for known, text in zip(numbers, row, strict=True)
        ]
        for row in texts
    ]
    return text_table(np.array(values, np.int32), [list(known) for known in numbers])


def _computed(prompts: Iterable[bytes]) -> int:
    """Tokens of the planner's prefix tree, where tokens are bytes."""
    found = list(prompts)
    tokens = np.frombuffer(b"".join(found), np.uint8).astype(np.int32)
    offsets = np.cumsum([0, *map(len, found)])
    return build_prefix_tree(tokens, offsets).num_unique_tokens


def random_table(
    rng: np.random.Generator, rows: int, fields: int, counts: list[int]
) -> FieldTable:
    """Skewed values, about a third of the fields depending on another."""
    found: list[NDArray[np.int64]] = []
    for _ in range(fields):
        num = int(rng.choice(counts))
        if found and rng.random() < 0.35:
            other = found[rng.integers(len(found))]
            drawn = rng.integers(0, num, size=other.max() + 1)[other]
        else:
            drawn = (num * rng.random(rows) ** rng.choice([1, 3])).astype(np.int64)
        found.append(np.unique(drawn, return_inverse=True)[1])
    lens = [rng.integers(1, 60, each.max() + 1).astype(np.int32) for each in found]
    return FieldTable(np.stack(found, 1).astype(np.int32), lens)


def _small_tables() -> list[Figure]:
    """What the orders found cost, over the least that any orders cost."""
    figures = []
    for rows, exact, note, target in (
        (8, MOST_OPTIMAL_ROWS, "up to 8 rows", 0.02),
        (12, MOST_OPTIMAL_ROWS, "12 rows", 0.02),
        (12, 1, "12 rows, split as larger groups are", None),
    ):
        rng = np.random.default_rng(SEED)
        over, greedy = [], []
        for _ in range(SMALL_TABLES):
            num = int(rng.integers(2, 9)) if rows == 8 else rows
            table = random_table(
                rng, num, int(rng.integers(2, 7)), [*range(1, num + 1)]
            )
            least = int(best_costs(table.edges.edge, table.edges.lens)[0][-1])
            found = field_orders(table, exact_rows=exact)
            over.append(found.weight / least - 1)
            greedy.append(prefix_weight(table, greedy_orders(table)) / least - 1)
        figures.append(
            Figure(
                f"{SMALL_TABLES} random tables, {note}: mean over the least",
                float(np.mean(over)), target=None if target is None else ("<=", target),
                note=f"worst {max(over):.4f}; greedy {np.mean(greedy):.4f}, "
                f"worst {max(greedy):.4f}",
            )
        )  # fmt: skip
    return figures


def _large(scale: int) -> Figure:
    rows, fields = LARGE[0] // scale, LARGE[1]
    rng = np.random.default_rng(SEED)
    table = random_table(rng, rows, fields, [2, 10, 100, 1000, 10_000, rows])
    begun = time.process_time()
    found = field_orders(table)
    seconds = time.process_time() - begun
    begun = time.process_time()
    greedy = prefix_weight(table, greedy_orders(table))
    return Figure(
        f"{rows:,} rows x {fields} fields: seconds of one core", seconds,
        target=("<=", 15), note=f"{found.own_weight / found.weight:.3f} times less weight; "
        f"greedy {found.own_weight / greedy:.3f} in {time.process_time() - begun:.1f} s",
    )  # fmt: skip
