"""The exceptions of this package, and the exit statuses of its commands.

::

    SGLangBatchError
    ├── ConfigError           a setting is invalid
    │   └── UnknownOption     a command has no such option
    ├── InputError            an input file or a request is invalid
    ├── StoreError            state on disk cannot be read or used
    │   └── StoreWriteError   it cannot be written: disk full or no permission
    ├── EngineError           SGLang did not behave as we rely on
    │   └── UnsupportedSGLang the SGLang release is not the supported one
    ├── ServerError           a batch server does not answer, or fails
    └── ApiError              an HTTP answer: status and OpenAI error body

A bad *line* of a batch raises no exception, but becomes data: see
:class:`sglang_batch.request.RequestOutput` and
:class:`sglang_batch.batch_api.lines.LineError`.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from typing import NoReturn


class ExitStatus(IntEnum):
    """Exit statuses of the commands.

    OK: the command did its work, and every line has an answer.
    FAILED: the engine, the disk or the server failed. The same command may succeed.
    BAD_INPUT: the input, the model or an option cannot be used. The same command fails
        again.
    FAILED_LINES: the job is complete, and some lines were answered with an error.
    INTERRUPTED: Ctrl-C or SIGTERM.
    """

    OK = 0
    FAILED = 1
    BAD_INPUT = 2
    FAILED_LINES = 3
    INTERRUPTED = 130


class SGLangBatchError(Exception):
    """Base of all errors raised by this package."""


class ConfigError(SGLangBatchError, ValueError):
    """An invalid setting. The message names it and valid alternatives."""


class UnknownOption(ConfigError):
    """Arguments that a command does not have.

    arguments: as they were given.
    known: the options that they may be meant to be.
    """

    def __init__(
        self, message: str, arguments: Sequence[str], known: Iterable[str]
    ) -> None:
        super().__init__(message)
        self.arguments, self.known = arguments, list(known)


class InputError(SGLangBatchError, ValueError):
    """An invalid input. The message names the file, line and reason."""


class StoreError(SGLangBatchError):
    """State on disk that cannot be read or used. The message names the path."""


class StoreWriteError(StoreError):
    """A failed write. It may succeed later, once the disk has space."""


class EngineError(SGLangBatchError, RuntimeError):
    """SGLang did not behave as this package relies on."""


class UnsupportedSGLang(EngineError):
    """The installed SGLang is not the release that this package extends."""


class ServerError(SGLangBatchError):
    """A batch server does not answer, or answers with an error of the server."""


@dataclass(eq=False)
class ApiError(SGLangBatchError):
    """An HTTP error answer in OpenAI's shape.

    ``retry=False`` becomes the header ``x-should-retry: false``, which keeps the
    official clients from repeating a call that cannot succeed.

    kind: the body's ``type``. None takes it from the status.
    headers: further headers of the answer.
    """

    status_code: int
    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    kind: str | None = None
    retry: bool | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.message)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that names the closest known name, empty if none is close."""
    # Options are many, and alike by their dashes.
    cutoff = 0.75 if name.startswith("-") else 0.6
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {close[0]!r}?" if close else ""


def refuse(reason: object, status: ExitStatus = ExitStatus.BAD_INPUT) -> NoReturn:
    """End a command of SGLang that cannot work, with one sentence."""
    print(f"error: {reason}", file=sys.stderr)
    raise SystemExit(status)
