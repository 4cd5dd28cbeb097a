"""Steps that engines timed, in a file of the user's data directory.

``timed_steps.json`` there holds the last steps of each kind for each model, device and way to
run them. Costs are fitted to them when they are read, so that a better fit needs no new
measurement.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from .kept_entries import VERSION, data_path, read_document, write_document

NAME = "timed_steps.json"
_LOST = "Plans use datasheets until `sglang-batch calibrate` or a run has timed steps again."
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
    return data_path(NAME)


def kept_steps(key: TimedStepsKey, path: Path | None = None) -> TimedSteps | None:
    """The steps of such an engine, if there are any."""
    document = read_document(path or timed_steps_path(), _StepsFile, _LOST)
    entries = [] if document is None else document.engines
    return next((entry for entry in entries if entry.key == key), None)


def newest_steps(
    device: str, model: str, parallelism: str, path: Path | None = None
) -> TimedSteps | None:
    """The last steps of such an engine, whatever its attention and its mixing."""
    document = read_document(path or timed_steps_path(), _StepsFile, _LOST)
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
    document = read_document(path, _StepsFile, _LOST)
    others = [] if document is None else document.engines
    kept = [each for each in others if each.key != entry.key][-MOST_ENTRIES + 1 :]
    write_document(
        path, _StepsFile(VERSION, [*kept, entry]), replaces=document is not None
    )
    return path
