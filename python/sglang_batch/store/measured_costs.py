"""Values measured on this machine, in files of the user's data directory.

``timed_steps.json`` holds the last steps of each kind for each model, device and way to run
them; costs are fitted when they are read, so a better fit needs no new measurement.
``row_shares.json`` holds one entry for each device, attention backend, shape of the KV and
number of devices. A file that cannot be read is never an error: nothing is known then.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import platformdirs

from ..errors import StoreWriteError
from .files import atomic_write

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
        lost: the facts that are missing without the file, and how to get them, for the warning.
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


STEPS_FILE = "timed_steps.json"
_STEPS_LOST = "Plans use datasheets until `sglang-batch calibrate` or a run has timed steps again."
# Entries that are kept, the latest of them.
MOST_ENTRIES = 64


class TimedStepsKey(msgspec.Struct, frozen=True, kw_only=True):
    """What timed steps hold for.

    device: the driver's name, or ``cpu`` with its number of threads.
    model: a digest of the model's size and operators, with the bits of weights and KV.
    attention_backend: SGLang's name of the backend that decodes.
    parallelism: TP, attention ranks and expert parallelism, in words.
    mixed: whether steps mix prompts and decodes.
    """

    device: str
    model: str
    attention_backend: str
    parallelism: str
    mixed: bool


class TimedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of one engine.

    samples: the fields of :class:`~...planner.costs.step_costs.StepSample` of each.
    measured_at: date and time in UTC, ISO 8601.
    """

    key: TimedStepsKey
    samples: list[list[float]]
    measured_at: str


class _StepsFile(msgspec.Struct):
    version: int
    engines: list[TimedSteps]


def timed_steps_path() -> Path:
    """The file."""
    return data_path(STEPS_FILE)


def kept_steps(key: TimedStepsKey, path: Path | None = None) -> TimedSteps | None:
    """The steps of such an engine, if there are any."""
    document = read_document(path or timed_steps_path(), _StepsFile, _STEPS_LOST)
    entries = [] if document is None else document.engines
    return next((entry for entry in entries if entry.key == key), None)


def newest_steps(
    device: str, model: str, parallelism: str, path: Path | None = None
) -> TimedSteps | None:
    """The last steps of such an engine, whatever its attention and its mixing."""
    document = read_document(path or timed_steps_path(), _StepsFile, _STEPS_LOST)
    entries = [] if document is None else document.engines
    wanted = (device, model, parallelism)
    return next(
        (
            entry
            for entry in reversed(entries)
            if (entry.key.device, entry.key.model, entry.key.parallelism) == wanted
        ),
        None,
    )


def keep_steps(entry: TimedSteps, path: Path | None = None) -> Path:
    """Write an engine's steps, in place of earlier ones with its key.

    Returns:
        The file.

    Raises:
        StoreWriteError: it cannot be written.
    """
    path = path or timed_steps_path()
    document = read_document(path, _StepsFile, _STEPS_LOST)
    others = [] if document is None else document.engines
    kept = [each for each in others if each.key != entry.key][-MOST_ENTRIES + 1 :]
    write_document(
        path, _StepsFile(VERSION, [*kept, entry]), replaces=document is not None
    )
    return path


ROW_SHARES_FILE = "row_shares.json"
UNMEASURED = (
    "row_share unmeasured: planning with 0; `sglang-batch calibrate` measures it"
)

_ROW_SHARES_LOST = (
    "No row_share is known until `sglang-batch calibrate` writes a new one."
)


class RowShareKey(msgspec.Struct, frozen=True, kw_only=True):
    """What a measured value holds for.

    device: the driver's name, or ``cpu``.
    attention_backend: SGLang's name of the backend that decodes.
    kv_heads: heads of the KV in all, 1 for latent attention. None if they are not known.
    head_dim: width of a head. None if it is not known.
    dtype: of the KV.
    page_size: tokens in a page of KV.
    tp: number of devices that share the model.
    """

    device: str
    attention_backend: str
    kv_heads: int | None
    head_dim: int | None
    dtype: str
    page_size: int
    tp: int

    def __str__(self) -> str:
        heads = "?" if self.kv_heads is None else self.kv_heads
        width = "?" if self.head_dim is None else self.head_dim
        return (
            f"{self.device}, attention {self.attention_backend}, KV of {heads} heads of "
            f"{width} in {self.dtype}, pages of {self.page_size}, TP {self.tp}"
        )


class MeasuredStep(msgspec.Struct, frozen=True):
    """Tokens of KV in all rows and in the longest, and seconds of the step."""

    total: float
    longest: float
    seconds: float


class KeptRowShare(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement.

    row_share: w for the planner, 0 or more.
    finding: what it is: ``measured``, ``at most`` or ``at least`` a bound.
    least, most: the values that fit the points as well. None: no limit.
    weights_s, kv_read_s: the fitted seconds of a step without KV, and per token of KV.
    noise: standard deviation of the relative residuals.
    measured_at: date and time in UTC, ISO 8601.
    versions: of the packages that ran, by name.
    points: the measurements.
    """

    key: RowShareKey
    row_share: Annotated[float, msgspec.Meta(ge=0)]
    finding: str
    least: float
    most: float | None
    weights_s: float
    kv_read_s: float
    noise: float
    measured_at: str
    versions: dict[str, str]
    points: list[MeasuredStep]


class _File(msgspec.Struct):
    version: int
    row_shares: list[KeptRowShare]


def row_share_path() -> Path:
    """The file, in ``$XDG_DATA_HOME/sglang-batch`` or where this system has it."""
    return data_path(ROW_SHARES_FILE)


def kept_row_shares(path: Path | None = None) -> list[KeptRowShare]:
    """All entries, oldest first. Empty, with a warning, if the file is unusable."""
    document = read_document(path or row_share_path(), _File, _ROW_SHARES_LOST)
    return [] if document is None else document.row_shares


def kept_row_share(
    key: RowShareKey, entries: Iterable[KeptRowShare] | None = None
) -> KeptRowShare | None:
    """The measurement for a key, if there is one."""
    found = kept_row_shares() if entries is None else entries
    return next((entry for entry in found if entry.key == key), None)


def keep_row_share(entry: KeptRowShare, path: Path | None = None) -> Path:
    """Write a measurement, in place of an earlier one with its key.

    Returns:
        The file.

    Raises:
        StoreWriteError: it cannot be written.
    """
    path = path or row_share_path()
    entries = kept_row_shares(path)
    kept = [each for each in entries if each.key != entry.key]
    write_document(path, _File(VERSION, [*kept, entry]), replaces=bool(entries))
    return path
