"""Values measured on this machine, in files of the user's data directory.

``timed_steps.json`` holds the last steps of each kind for each model, device and way to run
them; costs are fitted when they are read, so a better fit needs no new measurement.
``row_shares.json`` holds one entry for each device, attention backend, shape of the KV and
number of devices. A file that cannot be read is never an error: nothing is known then.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import platformdirs

from ..errors import StoreWriteError
from .files import atomic_write

logger = logging.getLogger(__name__)

VERSION = 1
Entry = TypeVar("Entry", "TimedSteps", "KeptRowShare")
# Steps are kept of the latest of so many engines.
MOST_ENTRIES = 64
STEPS_FILE = "timed_steps.json"
UNMEASURED = (
    "row_share unmeasured: planning with 0; `sglang-batch calibrate` measures it"
)


class TimedStepsKey(msgspec.Struct, frozen=True, kw_only=True):
    """What timed steps hold for.

    The device is the driver's name, or ``cpu`` with its number of threads,
    ``model`` a digest of its size and operators, with the bits of weights and KV.
    Some engines have mixed steps of prompts and decodes.
    """

    device: str
    model: str
    attention_backend: str
    parallelism: str
    mixed: bool


class TimedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of one engine, as fields of ``StepSample``, timed at an ISO time in UTC."""

    key: TimedStepsKey
    samples: list[list[float]]
    measured_at: str


class RowShareKey(msgspec.Struct, frozen=True, kw_only=True):
    """What a measured value holds for.

    The device is the driver's name or ``cpu``, ``attention_backend`` SGLang's name
    of the backend that decodes. ``kv_heads`` are the heads of the KV in all, 1 for
    latent attention, ``tp`` the devices that share the model.
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

    ``row_share`` is w for the planner, a bound if the ``finding`` is ``at most`` or
    ``at least``. Values from ``least`` to ``most`` fit as well. ``weights_s`` and
    ``kv_read_s`` are the fitted seconds of a step without KV and per token of KV,
    ``noise`` the standard deviation of the relative residuals.
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


class _Version(msgspec.Struct):
    version: int


@dataclass(eq=False)
class _MeasuredFile(Generic[Entry]):
    """A file with an entry for each key in its ``field``, oldest first, ``most`` of them.

    Warnings say which facts are ``lost`` without it, and how to get them.
    """

    name: str
    field: str
    kind: type[Entry]
    lost: str
    most: int | None = None

    def __post_init__(self) -> None:
        entries = GenericAlias(list, (self.kind,))
        fields = [("version", int), (self.field, entries)]
        self._document: Any = msgspec.defstruct("_Document", fields)

    def path(self) -> Path:
        """The file in ``$XDG_DATA_HOME/sglang-batch`` or where this system has it."""
        return platformdirs.user_data_path("sglang-batch") / self.name

    def entries(self, path: Path | None = None) -> list[Entry]:
        """All entries. Empty, with a warning, if the file is unusable."""
        return self._read(path or self.path()) or []

    def of(self, key: object, path: Path | None = None) -> Entry | None:
        return next((each for each in self.entries(path) if each.key == key), None)

    def keep(self, entry: Entry, path: Path | None = None) -> Path:
        """Write an entry, in place of an earlier one with its key, and return the file.

        One that cannot be used gets the ending ``.unusable``. Raises
        StoreWriteError.
        """
        path = path or self.path()
        before = self._read(path)
        kept = [each for each in before or () if each.key != entry.key] + [entry]
        document = self._document(VERSION, kept[-self.most :] if self.most else kept)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if before is None and path.exists():
                path.replace(path.with_name(f"{path.name}.unusable"))
            with atomic_write(path) as file:
                file.write(msgspec.json.format(msgspec.json.encode(document), indent=1))
        except OSError as error:
            raise StoreWriteError(f"cannot write {path}: {error}") from None
        return path

    def _read(self, path: Path) -> list[Entry] | None:
        try:
            data = path.read_bytes()
            version = msgspec.json.decode(data, type=_Version).version
            if version == VERSION:
                document = msgspec.json.decode(data, type=self._document)
                found: list[Entry] = getattr(document, self.field)
                return found
            reason = f"its version is {version}, not {VERSION}"
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            reason = str(error)
        logger.warning("%s cannot be used: %s. %s", path, reason, self.lost)
        return None


_STEPS = _MeasuredFile(
    STEPS_FILE,
    "engines",
    TimedSteps,
    "Plans use datasheets until `sglang-batch calibrate` or a run has timed steps again.",
    MOST_ENTRIES,
)
timed_steps_path, kept_steps, keep_steps = _STEPS.path, _STEPS.of, _STEPS.keep


def newest_steps(device: str, model: str, parallelism: str) -> TimedSteps | None:
    """The last steps of such an engine, whatever its attention and its mixing."""
    wanted = (device, model, parallelism)
    for entry in reversed(_STEPS.entries()):
        if (entry.key.device, entry.key.model, entry.key.parallelism) == wanted:
            return entry
    return None


_ROW_SHARES = _MeasuredFile(
    "row_shares.json",
    "row_shares",
    KeptRowShare,
    "No row_share is known until `sglang-batch calibrate` writes a new one.",
)
row_share_path, keep_row_share = _ROW_SHARES.path, _ROW_SHARES.keep
kept_row_shares, kept_row_share = _ROW_SHARES.entries, _ROW_SHARES.of
