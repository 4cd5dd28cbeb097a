"""Rows of tables and of Hugging Face datasets.

Columnar files are read 512 rows at a time, so memory does not grow with the table.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ..batch_api.lines import loads_lenient
from ..errors import ConfigError, InputError
from .cells import cell_text
from .compression import is_compressed, open_plain, plain_name
from .local_input import format_hint
from .template import jinja_hint
from .urls import why_not_on_hub

Row = Mapping[str, Any]
ROWS_AT_A_TIME = 512
_MAGIC_SUFFIXES = {b"PAR1": ".parquet", b"ARRO": ".arrow"}


def table_suffix(name: str, path: Path) -> str:
    """The format of a table as a suffix, by its first bytes, its name, or ``.jsonl``."""
    with open(path, "rb") as file:
        if found := _MAGIC_SUFFIXES.get(file.read(4)):
            return found
    suffix = Path(plain_name(name)).suffix.lower()
    return suffix if suffix in _READERS else ".jsonl"


def rows_of_file(name: str, path: Path, columns: Collection[str]) -> Iterator[Row]:
    """Every row of a table, with at least these columns.

    Raises InputError if the file is not in the format of its name, or lacks a
    column.
    """
    suffix = table_suffix(name, path)
    if suffix in SEEKING and is_compressed(path):
        raise InputError(
            f"{name} must be decompressed first: reading it needs random access."
        )
    return _READERS[suffix](name, path, columns)


def check_columns(name: str, needed: Iterable[str], found: Collection[str]) -> None:
    """Raises InputError if a needed column was not found, or several have its name."""
    names = list(found)
    hint = _delimiter_hint(names)
    for column in needed:
        if column not in found:
            raise InputError(
                f"{name} has no column {column!r}; it has "
                f"{', '.join(map(repr, names)) or 'none'}{jinja_hint(column)}{hint}."
            )
        if (number := names.count(column)) > 1:
            raise InputError(
                f"{name} has {number} columns named {column!r}: rename all but one."
            )


def _delimiter_hint(names: Sequence[str]) -> str:
    if len(names) == 1 and re.search(r"[;|\t]", names[0]):
        return "; write commas between columns, or name it *.tsv if there are tabs"
    return ""


@contextmanager
def reading(name: str, how: str = "") -> Iterator[None]:
    """Turn errors of Arrow into InputError."""
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError, OverflowError, RuntimeError, KeyError) as error:
        # Arrow's own derive from these. So do a date out of range and a map's key twice.
        raise InputError(f"{name} cannot be read {how}: {error}") from None


def rows_of_batches(batches: Iterable[Any]) -> Iterator[Row]:
    for batch in batches:
        for start in range(0, batch.num_rows, ROWS_AT_A_TIME):
            part = batch.slice(start, ROWS_AT_A_TIME)
            for place, field in enumerate(part.schema):
                column = _readable(field, part.column(place))
                part = part.set_column(place, field.name, column)
            yield from part.to_pylist(maps_as_pydicts="strict")


def _readable(field: Any, column: Any) -> Any:
    """A column with 0.1 of 32 bits, not 0.10000000149011612, and pandas' periods as text."""
    frequency = getattr(field.type, "freq", None)  # where pandas has told Arrow of them
    found = field.metadata or {}
    if found.get(b"ARROW:extension:name") == b"pandas.period":
        frequency = json.loads(found[b"ARROW:extension:metadata"])["freq"]
    if frequency is not None:
        import pandas
        import pyarrow

        period = partial(pandas.Period, freq=frequency)
        numbers = getattr(column, "storage", column).to_pylist()
        texts = [n if n is None else str(period(ordinal=n)) for n in numbers]
        return pyarrow.array(texts, "string")
    is_float = str(field.type) == "float"
    return column.cast("string").cast("float64") if is_float else column


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
                    hint = _delimiter_hint(header) or (
                        "; put a value with commas in quotes"
                    )
                    raise InputError(
                        f"{name}, line {reader.line_num}: {len(values)} values for "
                        f"{len(header)} columns{hint}."
                    )
        except csv.Error as error:
            raise InputError(
                f"{name}, line {reader.line_num}: {error}; look for a quote that has no "
                "end, or is not written twice within a value."
            ) from None
        except UnicodeDecodeError as error:
            raise InputError(
                f"{name} is not UTF-8: {error}; save it as such."
            ) from None
        finally:
            text.detach()


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
                raise InputError(
                    f"{name}, line {number}: this is not a JSON object. {_hint(path)}"
                )
            check_columns(f"{name}, line {number},", columns, row)
            yield row


def _hint(path: Path) -> str:
    found = None if is_compressed(path) else format_hint(path)
    return found or (
        "Tables other than JSON lines are known by the end of their name, such as "
        f"{', '.join(sorted(TABLE_SUFFIXES))}."
    )


def columns_of_file(name: str, path: Path) -> list[str]:
    """The columns of a table. Raises InputError if it cannot be read."""
    suffix = table_suffix(name, path)
    if suffix in SEEKING:
        return list(table_of_file(name, path, rows=False).column_names)
    rows = rows_of_file(name, path, ())
    if suffix == ".jsonl":
        return list(dict.fromkeys(key for row in rows for key in row))
    next(rows, None)  # a file that is no table has its error there
    with open_plain(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        return next(csv.reader(text, delimiter="\t" if suffix == ".tsv" else ","), [])


def whole_rows(name: str, path: Path) -> Iterator[Row]:
    """Every row of a table with all that it has. Raises InputError if it cannot be read."""
    columns = columns_of_file(name, path) if table_suffix(name, path) in SEEKING else ()
    yield from rows_of_file(name, path, columns)


def table_of_file(name: str, path: Path, *, rows: bool = True) -> Any:
    """All of a table, or its columns alone, as a ``pyarrow.Table``. That of CSV is text.

    Raises InputError if it cannot be read.
    """
    import pyarrow
    from pyarrow.parquet import ParquetFile

    suffix = table_suffix(name, path)
    if suffix not in SEEKING:
        found, names = list(whole_rows(name, path)), columns_of_file(name, path)
        return arrow_columns({each: [row.get(each) for row in found] for each in names})
    with reading(name, "as a table"):
        if suffix in (".parquet", ".pq"):
            with ParquetFile(path) as file:
                return file.read() if rows else file.schema_arrow.empty_table()
        with pyarrow.memory_map(str(path)) as source:
            batches = _arrow_batches(pyarrow, source)
            schema = next(batches)
            return pyarrow.Table.from_batches(batches if rows else [], schema)


def arrow_columns(columns: Mapping[str, Sequence[Any]], as_text: bool = False) -> Any:
    """Columns as a ``pyarrow.Table``, of text where values have no type in common, or are
    objects: Parquet cannot hold an empty one. With ``as_text``, all are.
    """
    import pyarrow

    def typed(values: Sequence[Any]) -> Any:
        try:
            found = pyarrow.array(values)
            kind = getattr(found.type, "value_type", found.type)
            is_nested, is_null = pyarrow.types.is_nested, pyarrow.types.is_null
            if not (as_text or is_nested(kind) or is_null(kind)):
                return found
        except (pyarrow.ArrowException, TypeError, ValueError, OverflowError):
            pass
        texts = [None if each is None else cell_text(each) for each in values]
        clean = [each and each.encode(errors="replace").decode() for each in texts]
        return pyarrow.array(clean, pyarrow.string())

    return pyarrow.table({name: typed(values) for name, values in columns.items()})


_READERS: dict[str, Callable[[str, Path, Collection[str]], Iterator[Row]]] = {
    ".parquet": _parquet_rows,
    ".pq": _parquet_rows,
    ".arrow": _arrow_rows,
    ".feather": _arrow_rows,
    ".ipc": _arrow_rows,
    ".csv": _csv_rows,
    ".tsv": partial(_csv_rows, delimiter="\t"),
    ".jsonl": _json_rows,
}
SEEKING = {".parquet", ".pq", ".arrow", ".feather", ".ipc"}
# Files of these formats cannot hold batch lines.
TABLE_SUFFIXES = frozenset(_READERS) - {".jsonl"}


# Hugging Face datasets: ``hf-dataset:NAME[:CONFIG[:SPLIT]]``, by name or by directory.

PREFIX = "hf-dataset:"
# Written by `Dataset.save_to_disk` and `DatasetDict.save_to_disk`.
_STATE_FILES = ("state.json", "dataset_dict.json")
_HUB_TIMEOUT_S = 10.0


def is_saved_dataset(path: Path) -> bool:
    return any(os.path.isfile(path / name) for name in _STATE_FILES)


def state_files(name: str) -> list[Path]:
    """The files that ``save_to_disk`` rewrites, if the dataset is on this machine."""
    directory = Path(name.removeprefix(PREFIX).split(":")[0])
    return [directory / file for file in _STATE_FILES]


def split_name(name: str) -> tuple[str, str | None, str | None]:
    """Split ``hf-dataset:NAME:CONFIG:SPLIT`` into (name or directory, config, split).

    Raises:
        ConfigError: the name has another form.
    """
    path, *rest = name.removeprefix(PREFIX).split(":")
    if not path or len(rest) > 2:
        raise ConfigError(
            f"{name!r} must be {PREFIX}NAME, {PREFIX}NAME:CONFIG or "
            f"{PREFIX}NAME:CONFIG:SPLIT; CONFIG may be empty."
        )
    config, split = [*(part or None for part in rest), None, None][:2]
    return path, config, split


def check_exists(name: str) -> None:
    """Look for a dataset here or on the hub, with one call and without its data.

    Raises:
        ConfigError: the name has a wrong form.
        InputError: there is no such dataset, or no answer about it.
    """
    path, _, _ = split_name(name)
    if Path(path).expanduser().exists():
        return
    from datasets.config import HF_DATASETS_CACHE
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return  # it may be in the cache
    reason = why_not_on_hub(partial(HfApi().dataset_info, path, timeout=_HUB_TIMEOUT_S))
    cached = Path(HF_DATASETS_CACHE) / path.replace("/", "___")
    if reason is not None and not cached.exists():
        raise InputError(f"{name}: there is no directory {path}, and {reason}.")


def rows_of_dataset(name: str, columns: Collection[str]) -> Iterator[Row]:
    """Every row of a dataset, read as a stream.

    Raises ConfigError if the package is missing or a split must be chosen,
    InputError if it cannot be read or lacks a column.
    """
    dataset = _opened(name)
    found = dataset.column_names
    if found is None:  # some streams have no names before their first row
        found = list(next(iter(dataset), {}))
    check_columns(name, columns, found)
    batches = dataset.select_columns(sorted(columns)).with_format("arrow")
    with reading(name, "as a dataset"):
        yield from rows_of_batches(batches.iter(batch_size=ROWS_AT_A_TIME))


def _opened(name: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{name} needs a package: pip install datasets") from None
    path, config, split = split_name(name)
    try:
        if is_saved_dataset(Path(path)):
            if config is not None:
                raise ConfigError(f"{name}: a saved dataset has no configurations.")
            found = datasets.load_from_disk(path)
        else:
            found = datasets.load_dataset(path, config, streaming=True)
    except ConfigError:
        raise
    except Exception as error:  # the hub's client raises errors of many types
        raise InputError(f"{name} cannot be opened: {error}") from None
    return _chosen(name, found, split)


def _chosen(name: str, found: Any, split: str | None) -> Any:
    """The named split, or the only one."""
    if not isinstance(found, dict):
        if split not in (None, str(found.split)):
            raise ConfigError(f"{name}: the saved dataset has no splits to choose.")
        return found
    if split is None and len(found) == 1:
        return next(iter(found.values()))
    if split not in found:
        raise ConfigError(
            f"{name} must name one of its splits: {', '.join(found)} "
            f"({PREFIX}NAME:CONFIG:SPLIT)."
        )
    return found[split]
