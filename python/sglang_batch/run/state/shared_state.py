"""Keeps the directory of a job and its state at a URL alike."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import msgspec

from ...errors import InputError, StoreError
from ...fleet.head_state import CRASHES
from ...store.files import atomic_write
from .state_url import Claim, StateUrl

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
        self._place_path = directory / PLACE
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
        """Write what is new to the URL. The log must be committed.

        Raises:
            TakenOver: another head runs the job.
            StoreError: the URL cannot be written.
        """
        with self._lock:
            self._share()

    def finish(self) -> None:
        """The job is complete and its output is in place: no result is needed any more.

        Raises:
            TakenOver: another head runs the job.
        """
        if self._claim is None:  # it was complete before
            last, place = self._state.last_claim(), self._place()
            if last is None or self._state.get(RECORD) == self._record():
                return
            if place is None or place.head != last.head:
                return  # of another head, which may run
            self._claim = last
        self.share()
        self._state.remove_parts(self._claim)

    def _share(self) -> None:
        assert self._claim is not None, "claim() comes first"
        for name in _COPIED:
            path = self._directory / name
            content = path.read_bytes() if path.exists() else b""
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
        here = self._record()
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

    def _record(self) -> bytes:
        path = self._directory / RECORD
        return path.read_bytes() if path.exists() else b""

    def _place(self) -> _Place | None:
        if not self._place_path.exists():
            return None
        try:
            return msgspec.json.decode(self._place_path.read_bytes(), type=_Place)
        except msgspec.DecodeError as error:
            raise StoreError(
                f"{self._place_path} cannot be read ({error}); remove it, and the job "
                "resumes from --state."
            ) from None

    def _keep(self, place: _Place) -> None:
        with atomic_write(self._place_path) as file:
            file.write(msgspec.json.encode(place))
