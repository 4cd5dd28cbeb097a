"""The input of one batch: a copy in the batch's own directory, checked once."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from ..batch_api.jsonl import BatchFile, FileErrors, validate
from ..batch_api.lines import BodyCheck, LineRules
from ..errors import StoreError
from ..store.batch_store import BatchStore, Row
from ..store.files import atomic_write
from .access.key_table import find_allowance
from .access.keys import body_refusal


def check_input(
    store: BatchStore,
    row: Row,
    models: tuple[str, ...],
    max_requests: int | None,
) -> BatchFile | FileErrors:
    """Copy and validate the file that a batch names.

    Returns the file, ready to be read, or the errors for which the batch cannot
    run.
    """
    if not _copy_input(store, row):
        message = f"Cannot find file {row['input_file_id']}."
        return FileErrors.of("invalid_request", message, "file_id")
    rules = LineRules(
        endpoint=row["endpoint"],
        models=models,
        check_body=model_check(store, row["owner"], models),
    )
    found = validate(_input_path(store, row["id"]), rules)
    if (
        isinstance(found, BatchFile)
        and max_requests is not None
        and len(found) > max_requests
    ):
        with found.closing():
            message = (
                f"The input file has {len(found):,} requests. This server accepts "
                f"at most {max_requests:,} in a batch. Split it into several files."
            )
            return FileErrors.of("too_many_tasks", message)
    return found


def model_check(
    store: BatchStore, owner: str, served: tuple[str, ...]
) -> BodyCheck | None:
    """The check of a line's model for a client with a list of models, or None."""
    allowed = find_allowance(store.rows, owner).models
    if allowed is None:
        return None

    def check(url: str, body: bytes) -> list[tuple[str, str | None]]:
        why = body_refusal(allowed, served, url, body)
        return [] if why is None else [why]

    return check


def open_input(store: BatchStore, batch_id: str) -> BatchFile:
    """The input of a valid batch. Raises StoreError if its file has changed since."""
    # Nothing but the position of each line is needed again.
    rules = LineRules(require_model=False)
    found = validate(_input_path(store, batch_id), rules)
    if isinstance(found, BatchFile):
        return found
    raise StoreError(f"the input of {batch_id} changed on disk: {found.listed[0]}")


def errors_json(errors: FileErrors) -> str:
    """A batch's errors as its object shows them. ``total``, of all, is not OpenAI's."""
    data = [
        {"code": e.code, "line": e.line, "message": e.message, "param": e.param}
        for e in errors.listed
    ]
    return json.dumps({"object": "list", "data": data, "total": errors.total})


def _input_path(store: BatchStore, batch_id: str) -> Path:
    return store.work_dir(batch_id) / "input.jsonl"


def _copy_input(store: BatchStore, row: Row) -> bool:
    """Make a copy that outlives the client's file. False if that does not exist."""
    copy = _input_path(store, row["id"])
    copy.parent.mkdir(exist_ok=True)
    if copy.exists():
        return True
    # The id comes from a client: it is a path only if it names a file of the store.
    if store.get_file(row["input_file_id"], row["owner"]) is None:
        return False
    try:
        _link_or_copy(store.file_path(row["input_file_id"]), copy)
    except FileNotFoundError:
        return False
    return True


def _link_or_copy(source: Path, copy: Path) -> None:
    try:
        os.link(source, copy)
    except FileNotFoundError:
        raise
    except OSError:
        # A file system without hard links.
        with open(source, "rb") as given, atomic_write(copy) as file:
            shutil.copyfileobj(given, file, 1 << 20)
