"""Named jobs of frontend programs: their log, and the keys by which a program is known.

Each record of the log is one JSON line. It is written when its program ends, and from then
on survives the end of this process; from the next commit, about a second later, also a power
failure. :mod:`sglang_batch.store.files` has how records are written and recovered.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import inspect
import json
import math
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import platformdirs

from ..errors import ConfigError, StoreError, StoreWriteError
from ..request import json_line
from ..store.files import AppendLog, FileLock

COMMIT_EVERY_S = 1.0


class ProgramRecord(msgspec.Struct):
    """One finished program.

    key: see :func:`program_keys`. program: its name. version: digest of its code.
    ok: whether it succeeded.
    result: JSON, see :mod:`.program_runner`.
    """

    key: str
    program: str
    version: str
    ok: bool
    result: msgspec.Raw


class _RecordEntry(NamedTuple):
    """The parts of a record that are kept in memory, and its place in the file."""

    offset: int
    length: int
    ok: bool
    program: tuple[str, str]


_decoder = msgspec.json.Decoder(ProgramRecord)


class ProgramLog:
    """The records of one job. Any thread may call any method.

    Raises:
        StoreError: a record of the file is damaged.
        StoreWriteError: the disk failed to store a record.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._sync_error = ""
        self._entries: dict[str, _RecordEntry] = {}
        self._programs: dict[tuple[str, str], tuple[str, str]] = {}
        self._log = AppendLog(path, self._read, _refuse)
        self._synced_at = time.monotonic()

    def outcome(self, key: str) -> bool | None:
        """Whether a program succeeded. None: it is not in the log."""
        entry = self._entries.get(key)
        return None if entry is None else entry.ok

    def versions(self, program: str) -> dict[str, int]:
        """Number of programs of this name in the log, by version."""
        with self._lock:
            counts = Counter(entry.program for entry in self._entries.values())
        return {version: n for (name, version), n in counts.items() if name == program}

    def result(self, key: str) -> bytes:
        """The result of a program in the log, as JSON."""
        entry = self._entries[key]
        data = self._log.read(entry.offset, entry.length)
        try:
            return bytes(_decoder.decode(data).result)
        except (ValueError, msgspec.DecodeError):
            raise _unreadable(self._log.path, entry.offset) from None

    def put(self, record: ProgramRecord) -> None:
        """Append a record, which replaces an earlier one with the same key. Does nothing after
        close(): only an abandoned program can end that late.
        """
        if self._sync_error:
            raise StoreWriteError(self._sync_error)
        data = json_line(record)
        with self._lock:
            if self._log.closed:
                return
            offset = self._log.append(data)
            self._account(record, offset, len(data))

    def commit_sometimes(self) -> None:
        """Commit, unless the last commit was less than a second ago."""
        if time.monotonic() - self._synced_at >= COMMIT_EVERY_S:
            self.commit()

    def commit(self) -> None:
        """Make all records put so far survive a power failure. If the disk fails, put() and
        close() raise from then on: the operating system reports lost data only once.
        """
        with self._sync_lock:
            try:
                self._log.commit()
            except StoreWriteError as error:
                self._sync_error = str(error)
            self._synced_at = time.monotonic()

    def close(self) -> None:
        self.commit()
        with self._sync_lock, self._lock:
            try:
                self._log.close()
            except StoreWriteError as error:
                self._sync_error = str(error)
        if self._sync_error:
            raise StoreWriteError(self._sync_error)

    def _account(self, record: ProgramRecord, offset: int, length: int) -> None:
        program = (record.program, record.version)
        # One tuple for all records of a program, of which there may be very many.
        program = self._programs.setdefault(program, program)
        self._entries[record.key] = _RecordEntry(offset, length, record.ok, program)

    def _read(self, offset: int, data: bytes) -> bool:
        try:
            record = _decoder.decode(data)
        except (ValueError, msgspec.DecodeError):
            return False
        self._account(record, offset, len(data))
        return True


def _refuse(log: AppendLog, offset: int, data: bytes) -> None:
    raise _unreadable(log.path, offset)


def _unreadable(path: Path, offset: int) -> StoreError:
    return StoreError(
        f"{path}: the record at byte {offset} cannot be read; the file was changed by "
        "something else. Remove it to start the job again."
    )


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


class ProgramJob:
    """A named job of programs, which a later run can resume.

    Args:
        name: letters, digits, ``.``, ``_`` and ``-``.
        directory: of the job's log. None: ``sglang-batch/programs`` in the user's data
            directory.
        retry_failed: whether failed programs run again.

    Raises:
        ConfigError: the name cannot be a file name.
    """

    def __init__(
        self, name: str, directory: str | Path | None = None, retry_failed: bool = True
    ) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f"job={name!r} must be a name of letters, digits, '.', '_' and '-', "
                "such as night-1."
            )
        self.name = name
        self.directory = (
            platformdirs.user_data_path("sglang-batch") / "programs"
            if directory is None
            else Path(directory)
        )
        self.retry_failed = retry_failed
        self._mutex = threading.Lock()
        self._file_lock = FileLock(self.directory / f"{name}.lock")
        self._log: ProgramLog | None = None
        self._holders = 0

    @contextmanager
    def open(self) -> Iterator[ProgramLog]:
        """The job's log, shared by all blocks of this process that have it open. Raises
        StoreError if another process runs the job, or its log cannot be used.
        """
        with self._mutex:
            if self._log is None:
                self._log = self._open()
            log = self._log
            self._holders += 1
        try:
            yield log
        finally:
            with self._mutex:
                self._holders -= 1
                if not self._holders:
                    self._log = None
                    try:
                        log.close()
                    finally:
                        self._file_lock.release()

    def _open(self) -> ProgramLog:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            holder = self._file_lock.acquire(f"pid {os.getpid()}")
            if holder is not None:
                raise StoreError(
                    f"job {self.name!r} in {self.directory} is being run by {holder}; "
                    "wait until that ends, or give this run another job name."
                )
            return ProgramLog(self.directory / f"{self.name}.jsonl")
        except BaseException as error:
            self._file_lock.release()
            if isinstance(error, OSError):
                raise StoreError(
                    f"{error.filename or self.directory}: {error.strerror}; job_dir= "
                    "names another directory."
                ) from error
            raise


# Arguments and results are written as JSON without loss. Types that JSON lacks, such as tuples
# and bytes, become objects with one key that begins with ``$``, such as ``{"$tuple": [1, 2]}``.


def to_plain(value: Any, other: Callable[[Any], Any]) -> Any:
    """A value with the types of JSON.

    Args:
        value: None, a bool, number, string, bytes, list, tuple or dict, also nested.
        other: rewrites a value of any other type, or raises.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is list:
        return [to_plain(item, other) for item in value]
    if kind is tuple:
        return {"$tuple": [to_plain(item, other) for item in value]}
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: to_plain(item, other) for key, item in value.items()}
        pairs = [[key, item] for key, item in value.items()]
        return {"$dict": to_plain(pairs, other)}
    if isinstance(value, np.generic):
        return to_plain(value.item(), other)
    return other(value)


def from_plain(plain: Any) -> Any:
    """The value that was passed to :func:`to_plain`."""
    if isinstance(plain, list):
        return [from_plain(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1:
        ((name, content),) = plain.items()
        if name == "$float":
            return float(content)
        if name == "$bytes":
            return base64.b64decode(content)
        if name == "$tuple":
            return tuple(from_plain(content))
        if name == "$dict":
            return {from_plain(key): from_plain(item) for key, item in content}
    return {key: from_plain(item) for key, item in plain.items()}


# Two programs have the same key if they have the same code, arguments, sampling parameters
# and model. Code is compared compiled, so layout and comments do not matter. It includes
# the functions of the same module that it calls, and the strings and numbers that it reads
# from outside. Lists and dicts outside are left out, since programs may change them.

_CONSTANTS = (str, bytes, int, float, bool)


@dataclasses.dataclass(frozen=True)
class ProgramKeys:
    """The keys of the programs of one ``run_batch``.

    name: qualified name of the function. version: digest of its code.
    keys: one per program, in the order of the arguments, all different: the same arguments
        given twice differ in a number at the end.
    """

    name: str
    version: str
    keys: list[str]


def program_keys(
    program: Any,
    batch_arguments: Sequence[dict[str, Any]],
    sampling_params: Any,
    model: list[str],
) -> ProgramKeys:
    """Compute the keys of the programs of one ``run_batch``.

    Args:
        program: a ``sgl.function``.
        batch_arguments: of each program, by name.
        sampling_params: the dataclass of defaults made by ``run_batch``.
        model: identifies the model, such as by its path and chat template.

    Raises:
        ConfigError: an argument has a type that cannot be compared between runs.
    """
    code = _ProgramCode()
    code.read(program.func)
    version = _digest(code.parts)
    name = program.func.__qualname__
    parameters = dataclasses.asdict(sampling_params)
    speculated = getattr(program, "num_api_spec_tokens", None)
    common = [name, version, code.constants, parameters, speculated, model]
    start = _digest(to_plain(common, repr))
    defaults = _defaults(program.func)
    occurrences: Counter[str] = Counter()
    keys = []
    for number, arguments in enumerate(batch_arguments):
        given = {**defaults, **arguments, **program.bind_arguments}
        digest = _digest([start, _plain_arguments(given, number)])
        keys.append(f"{digest}-{occurrences[digest]}")
        occurrences[digest] += 1
    return ProgramKeys(name, version, keys)


def _digest(plain: Any) -> str:
    """Digest of a JSON value: 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]


def _defaults(function: FunctionType) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    empty = inspect.Parameter.empty
    return {p.name: p.default for p in parameters if p.default is not empty}


def _plain_arguments(arguments: dict[str, Any], number: int) -> dict[str, Any]:
    plain = {}
    for name, value in arguments.items():
        try:
            plain[name] = to_plain(value, _content)
        except TypeError as error:
            raise ConfigError(
                f"argument {name!r} of program number {number} has a {error}, which a "
                "job cannot compare between runs. Pass strings, numbers, lists, dicts, "
                "bytes, arrays or images, or run without job=."
            ) from None
    return plain


def _content(value: Any) -> Any:
    """JSON that identifies an argument without a JSON type: a digest or a string."""
    if isinstance(value, PurePath):
        return {"$path": str(value)}
    if isinstance(value, bytearray | memoryview):
        return to_plain(bytes(value), _content)
    shape: list[Any]
    # An image can be an argument only if its library was imported.
    library = sys.modules.get("PIL.Image")
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        shape = [str(value.dtype), list(value.shape)]
    elif library is not None and isinstance(value, library.Image):
        shape = [value.mode, list(value.size)]
    else:
        kind = type(value)
        raise TypeError(f"{kind.__module__}.{kind.__qualname__}")
    return {"$sha256": [*shape, hashlib.sha256(value.tobytes()).hexdigest()]}


class _ProgramCode:
    """The compiled code of a program and of the functions that it calls: a description of
    each, and the constants that they read from outside, by function and name.
    """

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.constants: dict[str, Any] = {}
        self._seen: set[int] = set()

    def read(self, function: FunctionType) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        self.parts.append(_describe(function.__code__))
        for name, value in _outside(function):
            # A program refers to another one as an object with a func.
            called = inspect.getattr_static(value, "func", value)
            if isinstance(called, FunctionType):
                if called.__module__ == function.__module__:
                    self.read(called)
            elif _is_constant(value):
                self.constants[f"{function.__qualname__}: {name}"] = value


def _outside(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Names that a function reads from its module and its closure, with values."""
    for name in sorted(_names(function.__code__)):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # not bound yet


def _is_constant(value: Any) -> bool:
    if type(value) is tuple:
        return all(_is_constant(item) for item in value)
    return type(value) in _CONSTANTS


def _names(code: CodeType) -> set[str]:
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def _describe(code: CodeType) -> list[Any]:
    constants = [
        _describe(constant)
        if isinstance(constant, CodeType)
        # Sets are ordered differently in each process.
        else sorted(map(repr, constant))
        if isinstance(constant, frozenset)
        else repr(constant)
        for constant in code.co_consts
    ]
    return [code.co_code.hex(), list(code.co_names), constants]
