"""A job's state at a URL: who runs the job, and its results in parts.

::

    job.json, crashes.json    copies of those in the directory of the job
    heads/<head>.json         a claim: this head runs the job, with these parts of earlier ones
    parts/<head>-<n>.jsonl.zst  results, in the records of the job's log. Never changed

The claim with the last name is in force. What counts are the parts that it lists and those of its
head: a part that an earlier head writes later is in no list, and is not read. So two heads
never both count, though object stores know no locks. A head looks for later claims after each
part that it writes, and ends if there is one.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import zstandard

from ...errors import ConfigError, StoreError
from ...inputs import urls
from ...store.epochs import epoch_after
from ...store.files import atomic_write

# Parts read at once: stores answer many requests at a time.
_READ_AT_ONCE = 32
_HEADS, _PARTS = "heads", "parts"
_SUFFIX = ".jsonl.zst"
_WITHOUT_FOLDERS = {"s3", "s3a", "gs", "gcs", "abfs", "az", "hf"}
_RAISE = object()


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

    Raises:
        ConfigError: the scheme is unknown, is HTTP, or its package is missing.
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

    def __str__(self) -> str:
        return urls.shown(self.url) if urls.is_url(self.url) else self.url

    def check(self) -> None:
        """Write and remove a file.

        Raises:
            ConfigError: that failed.
        """
        name = f"probe-{secrets.token_hex(4)}"
        try:
            # A store without folders would make a bucket that is misspelt.
            if urlsplit(self.url).scheme not in _WITHOUT_FOLDERS:
                for folder in (_HEADS, _PARTS):
                    self._call(self._files.makedirs, self._at(folder), exist_ok=True)
            self.put(name, b"")
            self._call(self._files.rm_file, self._at(name))
        except StoreError as error:
            raise ConfigError(f"--state: {error}") from None

    def claim(self, last: Claim | None, parts: tuple[str, ...]) -> Claim:
        """Run the job from here on, in place of the head of ``last``."""
        epoch = epoch_after(0 if last is None else last.epoch)
        head = f"{epoch:015d}-{secrets.token_hex(4)}"
        claim = Claim(epoch=epoch, head=head, host=socket.gethostname(), parts=parts)
        self.put(f"{_HEADS}/{head}.json", msgspec.json.encode(claim))
        return claim

    def last_claim(self) -> Claim | None:
        """The claim in force."""
        names = self._names(_HEADS)
        if not names:
            return None
        data = self.get(f"{_HEADS}/{names[-1]}")
        try:
            return msgspec.json.decode(data or b"", type=Claim)
        except msgspec.DecodeError as error:
            raise StoreError(
                f"{self}/{_HEADS}/{names[-1]} cannot be read ({error}); remove it, and the "
                "job resumes from the head before."
            ) from None

    def check_in_force(self, claim: Claim) -> None:
        """Raises :class:`TakenOver` if a later head runs the job."""
        last = self._names(_HEADS)[-1:]
        if last == [f"{claim.head}.json"]:
            return
        found = self.last_claim()
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

        Raises:
            StoreError: a part is missing or damaged.
        """
        for first in range(0, len(parts), _READ_AT_ONCE):
            names = parts[first : first + _READ_AT_ONCE]
            paths = [self._at(f"{_PARTS}/{name}") for name in names]
            for path, data in self._call(self._files.cat, paths).items():
                try:
                    yield zstandard.ZstdDecompressor().decompress(data)
                except zstandard.ZstdError as error:
                    raise StoreError(
                        f"{path} is damaged ({error}); remove it, and its lines run again."
                    ) from None

    def remove_parts(self) -> None:
        """Remove all parts. Some may stay: they do no harm."""
        with suppress(StoreError):
            self._call(self._files.rm, self._at(_PARTS), recursive=True)

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
        """The content of a file, None if there is none."""
        found: bytes | None = self._call(
            self._files.cat_file, self._at(name), missing=None
        )
        return found

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _names(self, folder: str) -> list[str]:
        """The names of the files in a folder, sorted."""
        self._files.invalidate_cache()
        paths = self._call(self._files.ls, self._at(folder), detail=False, missing=[])
        names = (str(path).rstrip("/").rpartition("/")[2] for path in paths)
        return sorted(name for name in names if name[:1].isdigit())

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
