"""SGLang's log of a run: everything that its processes print, in a file.

The file descriptors of standard output and standard error are pointed at the file, so
that output of libraries and of child processes ends up there too.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

from ..errors import (
    ConfigError,
    EngineError,
    ExitStatus,
    SGLangBatchError,
    StoreWriteError,
)

# A line that ends a traceback, such as "torch.OutOfMemoryError: ...".
_EXCEPTION = re.compile(
    r"^(?:[\w.]+\.)?(?P<name>\w*(?:Error|Exception|Refused|Interrupt|Timeout|Expired))"
    r"(?:: (?P<text>.*))?$"
)
# SGLang's words for a process that fails with an exception, before its traceback, and
# for one that is gone.
_FATAL = re.compile(r"\w+ hit an exception: ")
_GONE = re.compile(
    r"(?:Subprocess \S+ .*crashed with exit code |"
    r"scheduler died during initialization \(exit code: )(?P<code>-?\d+)"
)
_PERCENT = re.compile(r"\b\d{1,3}%")
# SGLang's words for "see above", which are not the reason.
_NO_REASON = ("Initialization failed", "Received sigquit", "SIGQUIT received")
# Errors of the machine or the network, in an exception of any type.
_OF_THE_MACHINE = re.compile(
    r"out of memory|OutOfMemory|MemoryError|can't allocate memory|CUDA error|NCCL|"
    r"No space left|Disk quota|ConnectionError|Timeout|Too many open files|"
    r"address already in use"
)
# Errors of the options or the model: the start fails again. Any other may succeed.
_OF_THE_OPTIONS = re.compile(
    r"^(?:ValueError|TypeError|KeyError|AttributeError|AssertionError|"
    r"NotImplementedError|ImportError|ModuleNotFoundError|FileNotFoundError|"
    r"NotADirectoryError|JSONDecodeError|ValidationError|SafetensorError|ConfigError|"
    r"RepositoryNotFoundError|GatedRepoError|RevisionNotFoundError)\b|"
    r"not supported|unsupported|size mismatch|does not appear to have|"
    r"not a valid model|Not enough memory",
    re.IGNORECASE,
)
# What SGLang is doing, by a word of its last line.
_ACTIVITIES = (
    ("loading shards", "loading the weights"),
    ("Load weight", "loading the weights"),
    ("KV Cache is allocated", "allocating the KV cache"),
    ("Memory pool", "allocating the KV cache"),
    ("Capture", "capturing CUDA graphs"),
    ("Capturing", "capturing CUDA graphs"),
    ("max_total_num_tokens", "warming up"),
)
_TAIL_BYTES = 1 << 16


class EngineLog:
    """The file, which receives this process's output in a ``with`` block.

    Attributes:
        path: of the file. A resumed job appends to it.
        terminal: standard error, as it is outside the block.
    """

    terminal: TextIOWrapper

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin = 0

    def __enter__(self) -> EngineLog:
        _flush()
        try:
            log = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise StoreWriteError(f"cannot write {self.path}: {error}") from None
        self._saved = [os.dup(1), os.dup(2)]
        self.terminal = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
        self._begin = os.fstat(log).st_size
        _redirect(log)
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            _flush()
        except OSError:  # the disk is full: the rest must not reach the terminal
            _redirect(os.open(os.devnull, os.O_WRONLY))
            _flush()
        for stream, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, stream)
            os.close(saved)
        self.terminal.close()

    def activity(self) -> str:
        """What SGLang is doing, as far as the log tells; empty if it does not."""
        for line in reversed(self._lines(4096)):
            for word, activity in _ACTIVITIES:
                if word in line:
                    percent = _PERCENT.findall(line)
                    return f"{activity}, {percent[-1]}" if percent else activity
        return ""

    def failure(
        self, error: BaseException | None, *, started: bool, resumes: str = ""
    ) -> ConfigError | EngineError:
        """The error of an engine that failed, with SGLang's exception if there was one.

        Args:
            resumes: a sentence for an EngineError, after which the same command may succeed.
        """
        lines = self._lines(_TAIL_BYTES)
        said = "" if error is None else " ".join(str(error).split())
        codes = [int(m["code"]) for m in map(_GONE.search, [*lines, said]) if m]
        ends = f"{resumes}Engine's log: {self.path}"
        if -signal.SIGKILL in codes:
            return EngineError(
                "the system killed a process of SGLang (SIGKILL), most likely for memory: "
                f"lower --max-total-tokens or --max-running-requests. {ends}"
            )
        reason = _reason(lines) or _described(error, said) or _last_exception(lines)
        again = _OF_THE_OPTIONS.search(reason) and not _OF_THE_MACHINE.search(reason)
        if again and not started:
            return ConfigError(
                "the engine cannot start with this model and these options: "
                f"{reason} Engine's log: {self.path}"
            )
        reason = reason or said or "no reason is known"
        return EngineError(f"the engine died: {reason}. {ends}")

    def _lines(self, num_bytes: int) -> list[str]:
        with open(self.path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._begin, size - num_bytes))
            return re.split(r"[\r\n]+", file.read().decode(errors="replace"))


def end_process(
    say: Callable[[str], None], failure: SGLangBatchError | None, interrupted: str
) -> NoReturn:
    """End this process, which SGLang is about to end, and its children.

    Args:
        failure: the reason. None: a signal, which reached all processes, as it does under
            Slurm; ``interrupted`` is said then.
    """
    from ..srt.engine import in_process

    if failure is None:
        status = ExitStatus.INTERRUPTED
    elif isinstance(failure, ConfigError):
        status = ExitStatus.BAD_INPUT
    else:
        status = ExitStatus.FAILED
    say(interrupted if failure is None else f"error: {failure}")
    in_process.kill_children()
    os._exit(status)


def _reason(lines: list[str]) -> str:
    """Why the first process of SGLang that failed did: later failures follow from it."""
    for number, line in enumerate(lines):
        if _FATAL.search(line):
            return next(_exceptions(lines[number:]), "")
    for number, line in enumerate(lines):
        gone = _GONE.search(line)
        if gone is not None:
            code = int(gone["code"])
            # Ended by a signal, whatever it printed before.
            before = _last_exception(lines[:number]) if code > 0 else ""
            return before or f"a process of SGLang ended with {_ending(code)}"
    return ""


def _described(error: BaseException | None, said: str) -> str:
    if error is None or any(word in said for word in _NO_REASON):
        return ""
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _last_exception(lines: list[str]) -> str:
    return next(iter(list(_exceptions(lines))[-1:]), "")


def _exceptions(lines: list[str]) -> Iterator[str]:
    """The last line of each traceback."""
    for number, line in enumerate(lines):
        found = _EXCEPTION.match(line)
        if found is None or any(word in line for word in _NO_REASON):
            continue
        text = found["text"] or ""
        if text.endswith(":") and number + 1 < len(lines):
            text = f"{text} {lines[number + 1].strip()}"
        yield f"{found['name']}: {text}" if text else found["name"]


def _ending(code: int) -> str:
    with suppress(ValueError):
        return f"{signal.Signals(-code).name} (exit code {code})"
    return f"exit code {code}"


def _redirect(file: int) -> None:
    """Have both streams write to a file, which is closed otherwise."""
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
