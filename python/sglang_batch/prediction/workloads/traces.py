"""Readers of published length traces: random token ids, with the prefix structure kept.

Three formats, recognised by the first line:

- csv with ``ContextTokens,GeneratedTokens`` (Azure LLM 2023; NanoFlow's traces),
- csv with ``num_prefill_tokens,num_decode_tokens`` (Vidur),
- JSON lines with ``input_length``, ``output_length`` and ``hash_ids``, one id per
  512 prompt tokens (Mooncake): equal ids become equal tokens.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

import numpy as np

from ...errors import ConfigError, InputError
from ...planner.requests import UNKNOWN, Int64s, PlanRequests, sums_before
from .mix import Workload, seeds_of
from .sources import random_tokens

CONTEXT_LEN = 131_072
"""Most tokens of a request, input and output together, as with Llama 3.1."""

BLOCK_LEN = 512
"""Prompt tokens per hash id of a Mooncake trace."""

CSV_COLUMNS = (
    ("ContextTokens", "GeneratedTokens"),
    ("num_prefill_tokens", "num_decode_tokens"),
)

Row = tuple[int, int, list[int]]
"""Input length, output length, and hash ids, which are empty without prefixes."""


def read_trace(
    path: str | Path,
    *,
    limit: int | None = None,
    max_input_len: int | None = None,
    seed: int = 0,
) -> Workload:
    """The requests of a trace in the order of the file, with unknown output lengths.

    Lengths of 0 become 1. ``max_new_tokens`` is the smallest power of two that no output of the
    trace exceeds, at least 4,096. The workload has the name of the file
    without suffix, on which token ids depend, and on ``seed``.

    Args:
        limit: most requests to read, from the beginning of the file.
        max_input_len: most tokens of a prompt, whose end is cut off.
            None: prompt and output together have at most ``CONTEXT_LEN`` tokens.

    Raises:
        ConfigError: ``limit`` or ``max_input_len`` is not positive.
        InputError: the file cannot be read, has an unknown format or a bad line.
    """
    for name, value in (("limit", limit), ("max_input_len", max_input_len)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} must be 1 or more.")
    path = Path(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            rows = list(islice(_rows(lines, path), limit))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as a text file: {error}.") from error
    if not rows:
        raise InputError(f"{path} holds no requests.")
    output_len = np.array([row[1] for row in rows], dtype=np.int64)
    output_len = np.clip(output_len, 1, CONTEXT_LEN - 1)
    longest = CONTEXT_LEN - output_len if max_input_len is None else max_input_len
    input_len = np.array([row[0] for row in rows], dtype=np.int64)
    input_len = np.minimum(np.maximum(input_len, 1), longest)
    cap = max(4096, 1 << (int(output_len.max()) - 1).bit_length())
    lengths, keys = _runs(input_len, [row[2] for row in rows])
    requests = PlanRequests(
        random_tokens(lengths, keys, seeds_of(seed, path.stem)),
        sums_before(input_len),
        np.full(len(rows), cap, dtype=np.int32),
        np.full(len(rows), UNKNOWN, dtype=np.int32),
    )
    return Workload(requests, output_len.astype(np.int32), path.stem)


def _rows(lines: Iterable[str], path: Path) -> Iterator[Row]:
    numbered = ((n, line) for n, line in enumerate(lines, 1) if line.strip())
    number, first = next(numbered, (1, ""))
    if first.lstrip().startswith("{"):
        for at, line in chain([(number, first)], numbered):
            yield _json_row(line, f"{path}, line {at}")
        return
    header = [name.strip() for name in next(csv.reader([first]), [])]
    for columns in CSV_COLUMNS:
        if set(columns) <= set(header):
            places = {name: header.index(name) for name in columns}
            for at, line in numbered:
                cells = dict(enumerate(next(csv.reader([line]))))
                input_len, output_len = (
                    _cell(cells.get(place, ""), name, f"{path}, line {at}")
                    for name, place in places.items()
                )
                yield input_len, output_len, []
            return
    raise InputError(
        f"{path}, line {number}: not a known trace. It must be a csv file with columns"
        f" {' or '.join(','.join(columns) for columns in CSV_COLUMNS)}, or JSON lines"
        " with input_length, output_length and hash_ids."
    )


def _cell(cell: str, name: str, where: str) -> int:
    try:
        return _length(int(cell), cell, name, where)
    except ValueError:
        return _length(None, cell, name, where)


def _json_row(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}.") from error
    if not isinstance(row, dict):
        raise InputError(f"{where}: not a JSON object.")
    input_len, output_len = (
        _length(row.get(name), row.get(name), name, where)
        for name in ("input_length", "output_length")
    )
    ids = row.get("hash_ids")
    num_blocks = -(-input_len // BLOCK_LEN)
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise InputError(f"{where}: hash_ids must be a list of integers.")
    if len(ids) != num_blocks:
        raise InputError(
            f"{where}: {len(ids)} hash_ids for input_length={input_len};"
            f" {num_blocks} blocks of {BLOCK_LEN} tokens are needed."
        )
    return input_len, output_len, ids


def _length(value: object, shown: object, name: str, where: str) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise InputError(
            f"{where}: {name} is {shown!r}; it must be a number of tokens, 0 or more."
        )
    return value


def _runs(input_len: Int64s, hash_ids: list[list[int]]) -> tuple[Int64s, Int64s]:
    """Lengths and keys of the runs of tokens that the prompts consist of."""
    blocks: dict[int, int] = {}
    lengths: list[int] = []
    keys: list[int] = []
    for i, (length, ids) in enumerate(zip(input_len.tolist(), hash_ids, strict=True)):
        if not ids:  # no prefix structure: one run, with a key that no block has
            lengths.append(length)
            keys.append(-1 - i)
        # Number all blocks, including those cut off: cutting changes no token.
        numbers = [blocks.setdefault(block, len(blocks)) for block in ids]
        for number, begin in zip(numbers, range(0, length, BLOCK_LEN), strict=False):
            lengths.append(min(BLOCK_LEN, length - begin))
            keys.append(number)
    return np.array(lengths, dtype=np.int64), np.array(keys, dtype=np.int64)
