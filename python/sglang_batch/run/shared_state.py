"""A job's state at a URL, kept like its directory."""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from ..errors import ConfigError, InputError, StoreError
from ..fleet.head_state import CRASHES
from ..inputs import urls
from ..store.files import atomic_write, epoch_after

# Most bytes of a part, compressed and not. A head writes far smaller ones.
MAX_PART_BYTES = 1 << 29
# Most bytes of each other file.
MAX_FILE_BYTES = 1 << 26
# Parts read at once: stores answer many requests at a time. What is larger is read alone.
_READ_AT_ONCE, _READ_AT_ONCE_BYTES = 16, 1 << 26
# A part is expanded so many bytes at a time, which are 16 MiB at most, as is the window.
_READ_BYTES, _MAX_WINDOW_BYTES = 1 << 9, 1 << 24
_HEADS, _PARTS = "heads", "parts"
_SUFFIX = ".jsonl.zst"
# What heads name their claims and parts: epoch, head and number. Other files are not theirs.
_NAMES = {
    _HEADS: re.compile(r"(\d{1,18})-([0-9a-f]{8})()\.json"),
    _PARTS: re.compile(r"(\d{1,18})-([0-9a-f]{8})-(\d{6,9})\.jsonl\.zst"),
}
# Epochs are below: a name has 18 digits at most.
_END_OF_EPOCHS = 10**18
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "abfs", "az", "hf"}
_RAISE = object()


logger = logging.getLogger(__name__)


class TakenOver(StoreError):
    """A later head runs the job."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A head says that it runs the job.

    epoch: higher than that of all claims that it knew.
    head: its name. Later heads have later names.
    host: its machine.
    parts: names of the parts of earlier heads, in their order.
    """

    epoch: int
    head: str
    host: str
    parts: tuple[str, ...] = ()


class StateUrl:
    """The state of a job at ``url``, which is a directory of any scheme of fsspec.

    Every method raises :class:`StoreError` if the store does not answer, or refuses.

    Raises ConfigError if the scheme is unknown, is HTTP, or its package is missing.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        if url.startswith(("http://", "https://")):
            raise ConfigError(
                f"--state {urls.shown(url)}: files cannot be listed over HTTP; use a URL "
                "such as s3://bucket/job, or a directory."
            )
        self._files, root = urls.filesystem(url)
        self._root = str(root).rstrip("/")
        from fsspec.implementations.local import LocalFileSystem

        self._is_local = isinstance(self._files, LocalFileSystem)
        self._told: set[str] = set()

    def __str__(self) -> str:
        return urls.named(self.url)

    def check(self) -> None:
        """Write and remove a file.

        Raises ConfigError if that failed.
        """
        name = f"probe-{secrets.token_hex(4)}"
        try:
            # A store without folders would make a bucket that is misspelt.
            if urls.scheme_of(self.url) not in _WITHOUT_FOLDERS:
                for folder in (_HEADS, _PARTS):
                    self._call(self._files.makedirs, self._at(folder), exist_ok=True)
            self.put(name, b"")
            self._call(self._files.rm_file, self._at(name))
        except StoreError as error:
            raise ConfigError(f"--state: {error}") from None

    def claim(self, last: Claim | None, parts: tuple[str, ...]) -> Claim:
        """Run the job from here on, in place of the head of ``last``."""
        epoch = epoch_after(0 if last is None else last.epoch)
        if epoch >= _END_OF_EPOCHS:
            raise StoreError(
                f"{self}/{_HEADS}/{last.head if last else ''}.json is from a clock that "
                "cannot be right; remove it, and the job resumes from the head before."
            )
        head = f"{epoch:015d}-{secrets.token_hex(4)}"
        claim = Claim(epoch=epoch, head=head, host=socket.gethostname(), parts=parts)
        self.put(f"{_HEADS}/{head}.json", msgspec.json.encode(claim))
        return claim

    def last_claim(self) -> Claim | None:
        """The claim in force: the last one. A file that is none counts for nothing."""
        for name in reversed(self._names(_HEADS)):
            if (claim := self._claim_of(name)) is not None:
                return claim
        return None

    def _claim_of(self, name: str) -> Claim | None:
        """What a file of claims says, None if it is no claim, or not yet."""
        data = self.get(f"{_HEADS}/{name}")
        try:
            claim = msgspec.json.decode(data or b"", type=Claim)
        except (msgspec.DecodeError, RecursionError):
            claim = None
        if claim is not None and (f"{claim.head}.json", claim.epoch) == (
            name,
            _order(_HEADS, name)[0],
        ):
            return claim
        if name not in self._told:
            self._told.add(name)
            logger.warning("%s/%s/%s is no claim, and not read", self, _HEADS, name)
        return None

    def check_in_force(self, claim: Claim) -> None:
        """Raises :class:`TakenOver` if a later head runs the job."""
        if self._names(_HEADS)[-1:] == [f"{claim.head}.json"]:
            return
        found = self.last_claim()
        if found is not None and found.head == claim.head:
            return
        by = "" if found is None else f" on {found.host}"
        raise TakenOver(
            f"another run{by} has taken over the job of --state {self}; this one ends."
        )

    def parts(self, claim: Claim) -> tuple[str, ...]:
        """The names of all parts that count, in their order."""
        names = self._names(_PARTS)
        listed = set(claim.parts)
        return tuple(x for x in names if x in listed or x.startswith(f"{claim.head}-"))

    def put_part(self, claim: Claim, number: int, records: bytes) -> None:
        """Write a part of a head. A number may be written again with the same records."""
        data = zstandard.ZstdCompressor(write_checksum=True).compress(records)
        self.put(f"{_PARTS}/{claim.head}-{number:06d}{_SUFFIX}", data)

    def records(self, parts: tuple[str, ...]) -> Iterator[bytes]:
        """The records of these parts.

        Raises StoreError if a part is missing or damaged.
        """
        for first in range(0, len(parts), _READ_AT_ONCE):
            names = parts[first : first + _READ_AT_ONCE]
            # One by one: a call for many takes their names for patterns.
            with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
                first_bytes = repeat(_READ_AT_ONCE_BYTES)
                found = list(pool.map(self._part, names, first_bytes))
            found.reverse()
            for name in names:
                data = found.pop()
                if len(data) > _READ_AT_ONCE_BYTES:
                    data = self._part(name, MAX_PART_BYTES)
                try:
                    yield from _expanded(data)
                except (zstandard.ZstdError, ValueError) as error:
                    raise StoreError(
                        f"{self}/{_PARTS}/{name} is damaged ({error}); remove it, and its "
                        "lines run again."
                    ) from None

    def _part(self, name: str, most: int) -> bytes:
        """A part as it is, or the first ``most + 1`` bytes if it has more."""
        path = self._at(f"{_PARTS}/{name}")
        data: bytes = self._call(self._files.cat_file, path, end=most + 1)
        return data

    def remove_parts(self, claim: Claim | None = None) -> None:
        """Remove all parts. Some may stay: they do no harm.

        Args:
            claim: remove them only while this one is in force.

        Raises TakenOver if it is not.
        """
        names = self._names(_PARTS)  # not those that a later head writes from here on
        if claim is not None:
            self.check_in_force(claim)

        def remove(name: str) -> None:
            with suppress(StoreError):
                self._call(self._files.rm_file, self._at(f"{_PARTS}/{name}"))

        with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
            list(pool.map(remove, names))

    def put(self, name: str, data: bytes) -> None:
        """Write a small file, all of it or nothing."""
        path = self._at(name)
        if not self._is_local:
            self._call(self._files.pipe_file, path, data)
            return
        try:
            with atomic_write(Path(path)) as file:
                file.write(data)
        except OSError as error:
            raise self._error(error) from error

    def get(self, name: str) -> bytes | None:
        """The content of a small file, None if there is none, or one that is too large."""
        end = MAX_FILE_BYTES + 1
        found: bytes | None = self._call(
            self._files.cat_file, self._at(name), end=end, missing=None
        )
        return None if found is None or len(found) == end else found

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _names(self, folder: str) -> list[str]:
        """The names of the claims or parts in a folder, from the earliest head on."""
        self._files.invalidate_cache()
        paths = self._call(self._files.ls, self._at(folder), detail=False, missing=[])
        names = (str(path).rstrip("/").rpartition("/")[2] for path in paths)
        own = (name for name in names if _NAMES[folder].fullmatch(name))
        return sorted(own, key=lambda name: _order(folder, name))

    def _call(
        self,
        function: Callable[..., Any],
        *args: Any,
        missing: Any = _RAISE,
        **kwargs: Any,
    ) -> Any:
        """Call the store. ``missing`` is the answer if there is no such file."""
        try:
            return function(*args, **kwargs)
        except Exception as error:  # each scheme has errors of its own
            if isinstance(error, FileNotFoundError) and missing is not _RAISE:
                return missing
            raise self._error(error) from error

    def _error(self, error: Exception) -> StoreError:
        return StoreError(f"{self} cannot be used: {type(error).__name__}: {error}")


def _order(folder: str, name: str) -> tuple[int, str, int]:
    """What names of claims or parts are sorted by. A later epoch may have more digits."""
    found = _NAMES[folder].fullmatch(name)
    assert found is not None, name
    epoch, head, number = found.groups()
    return int(epoch), head, int(number or 0)


def _expanded(data: bytes) -> Iterator[bytes]:
    """The records of a part, in pieces. ValueError, ZstdError: it is damaged, or too large."""
    if len(data) > MAX_PART_BYTES:
        raise ValueError(f"it has more than {MAX_PART_BYTES} bytes")
    size = zstandard.get_frame_parameters(data).content_size
    if size > MAX_PART_BYTES:  # so is the size of a part that does not say it
        raise ValueError(
            f"it expands to {size} bytes, and a part has at most {MAX_PART_BYTES}"
        )
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    # Not a reader, which takes the end of the data for the end of the frame.
    frame = decompressor.decompressobj()
    for begin in range(0, len(data), _READ_BYTES):
        piece = frame.decompress(data[begin : begin + _READ_BYTES])
        size -= len(piece)
        yield piece
        if frame.eof:
            break
    if not frame.eof or size:
        raise ValueError("its end is missing")


# Keeps the directory of a job and its state at a URL alike.

# Most bytes of the log in one part, before compression.
PART_BYTES = 1 << 26
RECORD, RESULTS = "job.json", "results.jsonl"
# How far the directory and the URL are alike.
PLACE = "state.json"
_COPIED = (RECORD, CRASHES)


class _Place(msgspec.Struct, kw_only=True):
    """What :data:`PLACE` has.

    head: that this directory was last of.
    parts: that it has written.
    shared: bytes of the log that are in parts.
    """

    head: str
    parts: int = 0
    shared: int = 0


class SharedState:
    """The state of a job in ``directory``, and at a URL."""

    def __init__(self, state: StateUrl, directory: Path) -> None:
        self._state = state
        self._directory = directory
        self._log_path = directory / RESULTS
        self._copied: dict[str, bytes] = {}
        self._claim: Claim | None = None
        # The parts that :meth:`restore` has read, of this head.
        self._restored: tuple[str, tuple[str, ...]] | None = None
        self._lock = threading.Lock()

    @property
    def epoch(self) -> int:
        """Of this head, after :meth:`claim`."""
        assert self._claim is not None, "claim() comes first"
        return self._claim.epoch

    def restore(self) -> None:
        """Bring the directory to where the job is, if another one ran it last.

        Raises:
            InputError: the directory has another job.
            StoreError: the state cannot be read.
        """
        last = self._state.last_claim()
        place = self._place()
        if last is None or (place is not None and place.head == last.head):
            return
        record = self._state.get(RECORD)
        if not record:  # it ended before it began
            return
        there = self._fields(record, f"{self._state}/{RECORD}")
        self._check_same_job(there)
        complete = there.get("complete")
        parts = () if complete else self._state.parts(last)
        with atomic_write(self._log_path) as log:
            for records in self._state.records(parts):
                log.write(records)
            size = log.tell()
            # A later result of a line that has one is ignored.
            if self._log_path.exists():
                with open(self._log_path, "rb") as own:
                    shutil.copyfileobj(own, log)
        for name in _COPIED:
            content = record if name == RECORD else self._state.get(name)
            if content is None:
                (self._directory / name).unlink(missing_ok=True)
                continue
            with atomic_write(self._directory / name) as file:
                file.write(content)
        self._keep(_Place(head=last.head, shared=size))
        self._restored = last.head, tuple(parts)

    def claim(self, *, afresh: bool) -> None:
        """Run the job from here on. A head elsewhere ends as soon as it notices.

        Args:
            afresh: leave out all results so far.
        """
        last = self._state.last_claim()
        place = self._place()
        known = last is not None and place is not None and place.head == last.head
        parts: tuple[str, ...] = ()
        if last is not None and known:
            # A part that came since is not in this directory: its lines run again.
            restored = self._restored
            known_parts = restored[1] if restored and restored[0] == last.head else None
            parts = self._state.parts(last) if known_parts is None else known_parts
        if afresh:
            self._state.put(RECORD, b"")
        if afresh or not known:
            place, parts = None, ()
        self._claim = self._state.claim(last, parts)
        shared = 0 if place is None else place.shared
        self._keep(_Place(head=self._claim.head, shared=shared))
        self._copied.clear()

    def share(self) -> None:
        """Write new results to the URL. The log must be committed.

        Raises:
            TakenOver: another head runs the job.
            StoreError: the URL cannot be written.
        """
        with self._lock:
            assert self._claim is not None, "claim() comes first"
            for name in _COPIED:
                content = self._own(name)
                if content and content != self._copied.get(name):
                    self._state.check_in_force(self._claim)
                    self._state.put(name, content)
                    self._copied[name] = content
            place = self._place()
            assert place is not None
            while records := self._unshared(place.shared):
                self._state.put_part(self._claim, place.parts + 1, records)
                place.parts += 1
                place.shared += len(records)
                self._keep(place)
            self._state.check_in_force(self._claim)

    def finish(self) -> None:
        """The job is complete and its output is in place: no result is needed any more.

        Raises TakenOver if another head runs the job.
        """
        if self._claim is None:  # it was complete before
            last, place = self._state.last_claim(), self._place()
            if last is None or self._state.get(RECORD) == self._own(RECORD):
                return
            if place is None or place.head != last.head:
                return  # of another head, which may run
            self._claim = last
        self.share()
        self._state.remove_parts(self._claim)

    def _unshared(self, begin: int) -> bytes:
        """Whole records of the log from ``begin``, as many as one part may have."""
        if not self._log_path.exists():
            return b""
        with open(self._log_path, "rb") as log:
            log.seek(begin)
            found = log.read(PART_BYTES)
            end = found.rfind(b"\n") + 1
            return found[:end] if end or not found else found + log.readline()

    def _fields(self, record: bytes, path: object) -> dict[str, Any]:
        """The fields of a record of a job, which is at ``path``."""
        try:
            return msgspec.json.decode(record, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise StoreError(
                f"{path} is no record of a job ({error}); name another URL, or pass "
                "--overwrite to run all lines again."
            ) from None

    def _check_same_job(self, other: dict[str, Any]) -> None:
        here = self._own(RECORD)
        if not here:
            return
        own = self._fields(here, self._directory / RECORD)
        for name in ("input_sha256", "model", "served_model"):
            if own.get(name) != other.get(name):
                raise InputError(
                    f"{self._directory} is not the job of --state {self._state}: "
                    f"{name} is {own.get(name)!r} here and {other.get(name)!r} there. "
                    "Name another output or another URL, or pass --overwrite."
                )

    def _own(self, name: str) -> bytes:
        """The content of a file of the directory, empty if there is none."""
        path = self._directory / name
        return path.read_bytes() if path.exists() else b""

    def _place(self) -> _Place | None:
        found = self._own(PLACE)
        try:
            return msgspec.json.decode(found, type=_Place) if found else None
        except msgspec.DecodeError as error:
            raise StoreError(
                f"{self._directory / PLACE} cannot be read ({error}); remove it, and the "
                "job resumes from --state."
            ) from None

    def _keep(self, place: _Place) -> None:
        with atomic_write(self._directory / PLACE) as file:
            file.write(msgspec.json.encode(place))
