"""Hugging Face datasets: ``hf-dataset:NAME[:CONFIG[:SPLIT]]``, by name or by directory."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError, InputError
from .tables import ROWS_AT_A_TIME, Row, check_columns, reading, rows_of_batches

PREFIX = "hf-dataset:"
# What `Dataset.save_to_disk` and `DatasetDict.save_to_disk` leave.
_SAVED = ("state.json", "dataset_dict.json")


def is_saved_dataset(path: Path) -> bool:
    """Whether a directory was written by ``save_to_disk``."""
    return any((path / name).is_file() for name in _SAVED)


def split_name(name: str) -> tuple[str, str | None, str | None]:
    """(name or directory, config, split) of what follows ``hf-dataset:``.

    Raises:
        ConfigError: it has another shape.
    """
    path, *rest = name.removeprefix(PREFIX).split(":")
    if not path or len(rest) > 2:
        raise ConfigError(
            f"{name!r} must be {PREFIX}NAME, {PREFIX}NAME:CONFIG or "
            f"{PREFIX}NAME:CONFIG:SPLIT; CONFIG may be empty."
        )
    config, split = [*(part or None for part in rest), None, None][:2]
    return path, config, split


def rows_of_dataset(name: str, columns: Collection[str]) -> Iterator[Row]:
    """Every row of a dataset, read as a stream.

    Raises:
        ConfigError: the package is missing, or a split must be chosen.
        InputError: the dataset cannot be read, or lacks a column.
    """
    dataset = _opened(name)
    found = dataset.column_names
    if found is None:  # a stream may tell them only with its first row
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
    except Exception as error:  # the hub's client has errors of many kinds
        raise InputError(f"{name} cannot be opened: {error}") from None
    return _chosen(name, found, split)


def _chosen(name: str, found: Any, split: str | None) -> Any:
    """The split asked for, or the only one."""
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
