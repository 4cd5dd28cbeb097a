"""Rows of Parquet, Arrow, CSV, TSV and JSON lines files.

Columnar files are read 512 rows at a time, so memory does not grow with the table.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..batch_api.lines import loads_lenient
from ..errors import InputError
from .compression import is_compressed, open_plain, plain_name

Row = Mapping[str, Any]
ROWS_AT_A_TIME = 512
_MAGIC_SUFFIXES = {b"PAR1": ".parquet", b"ARRO": ".arrow"}


def table_suffix(name: str, path: Path) -> str:
    """The format of a table as a suffix: ``.parquet``, ``.csv``, ...

    Taken from the file's first bytes, else from its name. ``.jsonl`` is the default.
    """
    with open(path, "rb") as file:
        if found := _MAGIC_SUFFIXES.get(file.read(4)):
            return found
    suffix = Path(plain_name(name)).suffix.lower()
    return suffix if suffix in _READERS else ".jsonl"


def rows_of_file(name: str, path: Path, columns: Collection[str]) -> Iterator[Row]:
    """Every row of a table, with at least these columns.

    Args:
        name: title of the file, for messages; its suffix selects the format.
        path: the file.
        columns: the columns needed.

    Raises:
        InputError: the file is not in this format, or lacks a column.
    """
    suffix = table_suffix(name, path)
    if suffix in _SEEKING and is_compressed(path):
        raise InputError(
            f"{name} must be decompressed first: reading it needs random access."
        )
    return _READERS[suffix](name, path, columns)


def check_columns(name: str, needed: Iterable[str], found: Collection[str]) -> None:
    """Raises InputError if a needed column was not found."""
    missing = [column for column in needed if column not in found]
    if missing:
        raise InputError(
            f"{name} has no column {missing[0]!r}; it has "
            f"{', '.join(map(repr, found)) or 'none'}."
        )


@contextmanager
def reading(name: str, how: str = "") -> Iterator[None]:
    """Turn errors of Arrow into InputError."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError, OverflowError, RuntimeError) as error:
        # Arrow's own errors derive from these. A date out of range is one too.
        raise InputError(f"{name} cannot be read {how}: {error}") from None


def rows_of_batches(batches: Iterable[Any]) -> Iterator[Row]:
    """The rows of Arrow tables or record batches."""
    for batch in batches:
        for start in range(0, batch.num_rows, ROWS_AT_A_TIME):
            part = batch.slice(start, ROWS_AT_A_TIME)
            yield from part.to_pylist(maps_as_pydicts="strict")


def _parquet_rows(name: str, path: Path, columns: Collection[str]) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile

    with reading(name, "as Parquet"), ParquetFile(path) as file:
        check_columns(name, columns, file.schema_arrow.names)
        batches = file.iter_batches(ROWS_AT_A_TIME, columns=sorted(columns))
        yield from rows_of_batches(batches)


def _arrow_rows(name: str, path: Path, columns: Collection[str]) -> Iterator[Row]:
    import pyarrow

    with reading(name, "as Arrow"), pyarrow.memory_map(str(path)) as source:
        batches = _arrow_batches(pyarrow, source)
        schema = next(batches)
        check_columns(name, columns, schema.names)
        keep = [schema.names.index(column) for column in sorted(columns)]
        yield from rows_of_batches(batch.select(keep) for batch in batches)


def _arrow_batches(pyarrow: Any, source: Any) -> Iterator[Any]:
    """The schema, then the record batches of an Arrow file or stream."""
    if source.read(4) == b"ARRO":
        file = pyarrow.ipc.open_file(source)
        yield file.schema
        for i in range(file.num_record_batches):
            yield file.get_batch(i)
        return
    source.seek(0)
    stream = pyarrow.ipc.open_stream(source)
    yield stream.schema
    yield from stream


def _csv_rows(
    name: str, path: Path, columns: Collection[str], delimiter: str = ","
) -> Iterator[Row]:
    """Rows of strings: CSV cannot tell numbers from text (``007``, ``1e5``)."""
    csv.field_size_limit(sys.maxsize)
    with open_plain(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
            check_columns(name, columns, header)
            for values in reader:
                if len(values) == len(header):
                    yield dict(zip(header, values, strict=True))
                elif values:
                    raise InputError(
                        f"{name}, line {reader.line_num}: {len(values)} values for "
                        f"{len(header)} columns."
                    )
        except csv.Error as error:
            raise InputError(f"{name}, line {reader.line_num}: {error}") from None
        except UnicodeDecodeError as error:
            raise InputError(f"{name} is not UTF-8: {error}") from None
        finally:
            text.detach()


def _tsv_rows(name: str, path: Path, columns: Collection[str]) -> Iterator[Row]:
    return _csv_rows(name, path, columns, "\t")


def _json_rows(name: str, path: Path, columns: Collection[str]) -> Iterator[Row]:
    with open_plain(path) as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not line.strip():
                continue
            try:
                row = loads_lenient(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise InputError(f"{name}, line {number}: this is not a JSON object.")
            check_columns(f"{name}, line {number},", columns, row)
            yield row


_READERS: dict[str, Callable[[str, Path, Collection[str]], Iterator[Row]]] = {
    ".parquet": _parquet_rows,
    ".pq": _parquet_rows,
    ".arrow": _arrow_rows,
    ".feather": _arrow_rows,
    ".ipc": _arrow_rows,
    ".csv": _csv_rows,
    ".tsv": _tsv_rows,
    ".jsonl": _json_rows,
}
_SEEKING = {".parquet", ".pq", ".arrow", ".feather", ".ipc"}
# Files of these formats cannot hold batch lines.
TABLE_SUFFIXES = frozenset(_READERS) - {".jsonl"}
