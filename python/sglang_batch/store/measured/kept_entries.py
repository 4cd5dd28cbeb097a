"""Files of measured values in the user's data directory: a version, and a list of entries.

A file that cannot be read is never an error: it only means that nothing is known.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TypeVar

import msgspec
import platformdirs

from ...errors import StoreWriteError
from ..files import atomic_write

logger = logging.getLogger(__name__)

VERSION = 1
Document = TypeVar("Document")


class _Version(msgspec.Struct):
    version: int


def data_path(name: str) -> Path:
    """A file in ``$XDG_DATA_HOME/sglang-batch`` or where this system has it."""
    return platformdirs.user_data_path("sglang-batch") / name


def read_document(path: Path, kind: type[Document], lost: str) -> Document | None:
    """A file's contents, or None, with a warning if it is unusable.

    Args:
        lost: what is not known without the file, and how to get it, for the warning.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(path, str(error), lost)
        return None
    try:
        version = msgspec.json.decode(data, type=_Version).version
        if version != VERSION:
            _warn(path, f"its version is {version}, not {VERSION}", lost)
            return None
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        _warn(path, str(error), lost)
        return None


def write_document(path: Path, document: object, *, replaces: bool) -> None:
    """Write a file whole or not at all.

    Args:
        replaces: whether ``document`` has the entries of the file that is there. One that
            cannot be used gets the ending ``.unusable`` otherwise.

    Raises:
        StoreWriteError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not replaces and path.exists():
            path.replace(path.with_name(f"{path.name}.unusable"))
        with atomic_write(path) as file:
            file.write(msgspec.json.format(msgspec.json.encode(document), indent=1))
    except OSError as error:
        raise StoreWriteError(f"cannot write {path}: {error}") from None


def _warn(path: Path, reason: str, lost: str) -> None:
    logger.warning("%s cannot be used: %s. %s", path, reason, lost)
