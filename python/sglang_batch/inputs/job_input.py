"""The input of a job as the user names it: its sources, and how rows become requests."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, InputError
from . import tables, urls
from .compression import is_compressed, open_plain, undamaged
from .tables import TABLE_SUFFIXES, Row, rows_of_file, table_suffix
from .template import BEGIN, END, Template

DEFAULT_ENDPOINT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class JobInput:
    """The sources of a job, read one after the other, and the options that apply to all.

    Without a template, sources hold batch lines. Without an ``id_column``, the
    number of a row is its custom_id. ``max_requests`` are read at most, None for
    all.
    """

    sources: tuple[InputSource, ...]
    template: Template | None = None
    endpoint: str = DEFAULT_ENDPOINT
    id_column: str | None = None
    max_requests: int | None = None
    optimize_fields: bool = False

    @property
    def title(self) -> str:
        """The job's input in one phrase, for reports and messages."""
        first = self.sources[0].short_title
        more = len(self.sources) - 1
        return f"{first} and {more} more" if more else first

    @property
    def locations(self) -> set[str]:
        """Where the sources are: absolute paths and URLs."""
        return {source.location for source in self.sources}

    @property
    def plain_file(self) -> Path | None:
        """The input itself where it is one local file of batch lines, used as it is."""
        if len(self.sources) > 1 or self.template or self.max_requests is not None:
            return None
        return self.sources[0].plain_file

    @property
    def repeatable(self) -> bool:
        """Whether every source can be read again with the same result."""
        return all(source.repeatable for source in self.sources)

    def check(self) -> None:
        """Look for errors that show before anything is read.

        Raises InputError if a file is missing, unreadable or named twice,
        ConfigError if a name or an option cannot be used.
        """
        names = [source.name for source in self.sources]
        if names.count(STDIN) > 1:
            raise ConfigError("standard input (-) can be read only once.")
        twice = [source for source in self.sources if names.count(source.name) > 1]
        if twice and self.template is None:
            raise InputError(
                f"input {twice[0].title} is named twice; custom ids must be unique."
            )
        if self.id_column is not None and self.template is None:
            raise ConfigError("--id-column can be used only with --template.")
        if self.optimize_fields and self.template is None:
            raise ConfigError("--optimize-fields can be used only with --template.")
        if self.optimize_fields and self.template and self.template.block is None:
            raise ConfigError(
                "--optimize-fields has nothing to reorder: mark the lines of the template "
                f"that may change places with {BEGIN} and {END}."
            )
        for source in self.sources:
            source.check(has_template=self.template is not None)

    def row_options(self) -> dict[str, Any]:
        """The options that decide which requests rows become, as JSON values."""
        if self.template is None:
            return {}
        options: dict[str, Any] = {
            "--template": self.template.body,
            "--url": self.endpoint,
            "--id-column": self.id_column,
        }
        if self.optimize_fields:
            options["--optimize-fields"] = True
        return options

    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides which lines are staged, as JSON values."""
        return {
            "inputs": [source.identity() for source in self.sources],
            "rows": self.row_options(),
            "max_requests": self.max_requests,
        }


STDIN = "-"
_BOM = b"\xef\xbb\xbf"
_COPY_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20


class InputSource:
    """One input of a job: bytes with batch lines or a table, compressed or not.

    Its name, as the user wrote it, may hold secrets, unlike the titles. One that is
    not ``repeatable`` can be read only once.
    """

    repeatable = True

    def __init__(self, name: str) -> None:
        self.name = name
        # A file may have a name that is no UTF-8.
        self.title = name.encode(errors="backslashreplace").decode()
        self.short_title = self.title.rsplit("/", 1)[-1]

    @property
    def location(self) -> str:
        """Equal for two names of one file: the absolute path, or the name of a URL."""
        return urls.location(self.name)

    @property
    def plain_file(self) -> Path | None:
        """The local file itself where it holds uncompressed batch lines, else None."""
        return None

    def identity(self) -> list[Any]:
        """A JSON value that changes with the content behind the name.

        Local files count with size and modification time. Remote content is
        taken to be unchanged.
        """
        return [self.title]

    def check(self, *, has_template: bool) -> None:
        """Look for errors that show before anything is read.

        Raises InputError if a file is missing or cannot be read, ConfigError if
        the name cannot be used or the input needs a template.
        """

    def check_exists(self) -> None:
        """Ask for a remote dataset without fetching it. Raises InputError if it is gone."""

    def lines(self, scratch: Path) -> Generator[bytes]:
        """The batch lines, each with its newline, a very long one in pieces.

        Blank lines are kept. A temporary copy may be in ``scratch``. Raises
        InputError if the input is damaged, ConfigError if it is a table, which
        needs a template.
        """
        with self._reading(scratch) as path:
            if table_suffix(self.title, path) in TABLE_SUFFIXES:
                raise _needs_template(self.title, "a table")
            with open_plain(path) as file:
                piece = file.readline(_PIECE_BYTES).removeprefix(_BOM)
                last = b"\n"
                while piece:
                    yield piece
                    last, piece = piece, file.readline(_PIECE_BYTES)
                if not last.endswith(b"\n"):
                    yield b"\n"

    def rows(self, columns: Collection[str], scratch: Path) -> Generator[Row]:
        """The rows of a table, with at least these columns.

        Raises InputError if the input cannot be read as a table, or lacks a
        column.
        """
        with self._reading(scratch) as path:
            yield from rows_of_file(self.title, path, columns)

    @contextmanager
    def _reading(self, scratch: Path) -> Iterator[Path]:
        path = scratch
        try:
            with undamaged(self.title):
                path = self._fetched(scratch)
                yield path
        finally:
            if path.parent == scratch:
                path.unlink(missing_ok=True)

    def _fetched(self, scratch: Path) -> Path:
        """The content as a local file, in ``scratch`` if it is not one."""
        return Path(self.name)


class LocalFileSource(InputSource):
    """A regular file on this machine. It may still be missing."""

    @property
    def plain_file(self) -> Path | None:
        path = Path(self.name)
        is_plain = not is_compressed(path) and table_suffix(self.name, path) == ".jsonl"
        return path if is_plain else None

    def identity(self) -> list[Any]:
        return [self.title, *_file_stats(Path(self.name))]

    def check(self, *, has_template: bool) -> None:
        path = Path(self.name)
        if os.path.isdir(path):
            raise InputError(
                f"input {self.name} is a directory, but not a saved dataset; name its "
                "files."
            )
        if not os.path.isfile(path):
            raise InputError(f"input file {self.name} does not exist.")
        if not os.access(path, os.R_OK):
            raise InputError(
                f"input file {self.name} cannot be read: permission denied."
            )


class StreamSource(InputSource):
    """Standard input or a pipe, which can be read only once."""

    repeatable = False

    def __init__(self, name: str) -> None:
        super().__init__(name)
        if name == STDIN:
            self.title = self.short_title = "standard input"

    @property
    def location(self) -> str:
        return STDIN if self.name == STDIN else super().location

    def _fetched(self, scratch: Path) -> Path:
        path = scratch / "stream"
        stdin = nullcontext(sys.stdin.buffer)
        with (
            stdin if self.name == STDIN else open(self.name, "rb") as stream,
            open(path, "wb") as copy,
        ):
            shutil.copyfileobj(stream, copy, _COPY_BYTES)
        return path


class UrlSource(InputSource):
    """A file at a URL, fetched before it is read."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.title = urls.shown(name)
        self.short_title = self.title.rsplit("/", 1)[-1]

    def identity(self) -> list[Any]:
        return [self.title, urls.fingerprint(self.name)]

    def check(self, *, has_template: bool) -> None:
        urls.check_scheme(self.name)

    def _fetched(self, scratch: Path) -> Path:
        path = scratch / f"download{urls.file_suffix(self.name)}"
        urls.fetch(self.name, path)
        suffix = table_suffix(self.title, path)
        if suffix in tables.SEEKING and is_compressed(path):  # by the server, mostly
            plain = scratch / f"plain{suffix}"
            with open_plain(path) as packed, open(plain, "wb") as file:
                shutil.copyfileobj(packed, file, _COPY_BYTES)
            path.unlink()
            return plain
        return path


class DatasetSource(InputSource):
    """A Hugging Face dataset: on the hub, or a directory of ``save_to_disk``."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.short_title = name

    def identity(self) -> list[Any]:
        return [self.name, *_file_stats(*tables.state_files(self.name))]

    def check(self, *, has_template: bool) -> None:
        tables.split_name(self.name)
        if not has_template:
            raise _needs_template(self.name, "a dataset")

    def check_exists(self) -> None:
        tables.check_exists(self.name)

    def lines(self, scratch: Path) -> Generator[bytes]:
        raise _needs_template(self.name, "a dataset")

    def rows(self, columns: Collection[str], scratch: Path) -> Generator[Row]:
        yield from tables.rows_of_dataset(self.name, columns)


def input_sources(names: Iterable[str]) -> tuple[InputSource, ...]:
    return tuple(_input_source(urls.as_path(name)) for name in names)


def _input_source(name: str) -> InputSource:
    if not name:
        raise ConfigError("an input has an empty name: name a file, or - for stdin.")
    if name.startswith(tables.PREFIX):
        return DatasetSource(name)
    if urls.is_url(name):
        return UrlSource(name)
    if name == STDIN or _is_pipe(name):
        return StreamSource(name)
    if tables.is_saved_dataset(Path(name)):
        return DatasetSource(name)
    return LocalFileSource(name)


def _is_pipe(name: str) -> bool:
    try:
        mode = os.stat(name).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)


def _needs_template(title: str, kind: str) -> ConfigError:
    return ConfigError(
        f"{title} is {kind}: say how a row becomes a request with --template (of `run` "
        "and `plan`), such as 'Answer in one word: {{question}}'. For a server there is "
        "sglang_batch.map_table(..., server=URL)."
    )


def _file_stats(*paths: Path) -> list[list[int]]:
    """Size in bytes and modification time in nanoseconds of the files that exist."""
    stats = [path.stat() for path in paths if path.exists()]
    return [[each.st_size, each.st_mtime_ns] for each in stats]
