"""Hugging Face datasets: ``hf-dataset:NAME[:CONFIG[:SPLIT]]``, by name or by directory."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError, InputError
from .tables import ROWS_AT_A_TIME, Row, check_columns, reading, rows_of_batches

PREFIX = "hf-dataset:"
# Written by `Dataset.save_to_disk` and `DatasetDict.save_to_disk`.
_STATE_FILES = ("state.json", "dataset_dict.json")
_HUB_TIMEOUT_S = 10.0


def is_dataset_name(name: str) -> bool:
    """Whether a name begins with ``hf-dataset:``."""
    return name.startswith(PREFIX)


def is_saved_dataset(path: Path) -> bool:
    """Whether a directory was written by ``save_to_disk``."""
    return any((path / name).is_file() for name in _STATE_FILES)


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
    import httpx
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if constants.HF_HUB_OFFLINE:
        return  # it may be in the cache
    try:
        HfApi().dataset_info(path, timeout=_HUB_TIMEOUT_S)
    except HFValidationError:
        raise InputError(
            f"{name}: there is no directory {path}, and it cannot be the name of a "
            "dataset on the Hugging Face hub (owner/name)."
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        if 400 <= status < 500 and status != 429:
            raise InputError(
                f"{name}: the Hugging Face hub has no such dataset, or does not show it "
                f"without a key (status {status}). Check the name, or set HF_TOKEN."
            ) from None
    except httpx.TransportError as error:
        if not _is_cached(path):
            raise InputError(
                f"{name}: there is no such directory, and the Hugging Face hub cannot "
                f"be reached: {error}."
            ) from None


def _is_cached(path: str) -> bool:
    """Whether an earlier download of a dataset is on this machine."""
    from datasets.config import HF_DATASETS_CACHE

    return (Path(HF_DATASETS_CACHE) / path.replace("/", "___")).exists()


def rows_of_dataset(name: str, columns: Collection[str]) -> Iterator[Row]:
    """Every row of a dataset, read as a stream.

    Raises:
        ConfigError: the package is missing, or a split must be chosen.
        InputError: the dataset cannot be read, or lacks a column.
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
