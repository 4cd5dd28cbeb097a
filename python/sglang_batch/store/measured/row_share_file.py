"""The measured ``row_share`` of each device, in a file of the user's data directory.

``row_shares.json`` there holds one entry for each device, attention backend, shape of the
KV and number of devices. A file that cannot be read is never an error: it only means that
nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from .kept_entries import VERSION, data_path, read_document, write_document

NAME = "row_shares.json"
UNMEASURED = (
    "row_share unmeasured: planning with 0; `sglang-batch calibrate` measures it"
)

_LOST = "No row_share is known until `sglang-batch calibrate` writes a new one."


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
    points: what was measured.
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
    return data_path(NAME)


def kept_row_shares(path: Path | None = None) -> list[KeptRowShare]:
    """All entries, oldest first. Empty, with a warning, if the file is unusable."""
    document = read_document(path or row_share_path(), _File, _LOST)
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
