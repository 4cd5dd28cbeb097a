"""What ``-i`` can name: a file, ``-``, a URL, a Hugging Face dataset."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError, InputError
from . import datasets, remote
from .compression import is_compressed, plain_name
from .tables import TABLE_SUFFIXES, table_suffix
from .template import Template

STDIN = "-"
DEFAULT_URL = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class InputOptions:
    """The input of a job, as the user names it.

    names: files, ``-``, URLs and ``hf-dataset:...``; one job of all, in this order.
    template: makes a request's body of a table's row; None: inputs are batch lines.
    url: the endpoint that rows are for.
    id_column: the column that is the custom_id; None: the row's number.
    max_requests: only so many of the first requests.
    """

    names: tuple[str, ...]
    template: Template | None = field(default=None)
    url: str = DEFAULT_URL
    id_column: str | None = None
    max_requests: int | None = None

    @property
    def title(self) -> str:
        """What a report calls the job's input."""
        first = shown(self.names[0])
        first = first if is_dataset(first) else first.rsplit("/", 1)[-1]
        more = len(self.names) - 1
        return f"{first} and {more} more" if more else first


def is_dataset(name: str) -> bool:
    """Whether a name is of a Hugging Face dataset."""
    if name.startswith(datasets.PREFIX):
        return True
    return not remote.is_url(name) and datasets.is_saved_dataset(Path(name))


def is_stream(name: str) -> bool:
    """Whether a name can be read only once: standard input, a pipe."""
    if name == STDIN:
        return True
    if is_dataset(name) or remote.is_url(name):
        return False
    try:
        mode = os.stat(name).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)


def is_local_file(name: str) -> bool:
    """Whether a name is of a file that lies here already."""
    return not (is_stream(name) or is_dataset(name) or remote.is_url(name))


def shown(name: str) -> str:
    """A name as messages and records have it: without what may be secret."""
    if name == STDIN:
        return "standard input"
    return remote.shown(name) if remote.is_url(name) else name


def check(options: InputOptions) -> None:
    """Look for what is wrong with the names, before anything is read.

    Raises:
        InputError: a file does not exist.
        ConfigError: a name or an option cannot be used.
    """
    if options.names.count(STDIN) > 1:
        raise ConfigError("standard input (-) can be read only once.")
    twice = [name for name in options.names if options.names.count(name) > 1]
    if twice and options.template is None:
        raise InputError(
            f"input {shown(twice[0])} is named twice; custom ids must be unique."
        )
    if options.id_column is not None and options.template is None:
        raise ConfigError("--id-column has a use only with --template.")
    for name in options.names:
        if is_dataset(name):
            datasets.split_name(name)
            _needs_template(name, options, "a dataset")
        elif remote.is_url(name):
            remote.check_scheme(name)
        elif is_local_file(name):
            _check_file(name)


def check_kind(name: str, path: Path, options: InputOptions) -> None:
    """Raises ConfigError for a table without a template."""
    suffix = table_suffix(name, path)
    if suffix in TABLE_SUFFIXES:
        _needs_template(shown(name), options, "a table")


def _needs_template(name: str, options: InputOptions, what: str) -> None:
    if options.template is None:
        raise ConfigError(
            f"{name} is {what}: say what a request is made of with --template, such as "
            '\'{"messages": [{"role": "user", "content": "{{question}}"}]}\'.'
        )


def _check_file(name: str) -> None:
    path = Path(name)
    if path.is_dir():
        raise InputError(
            f"input {name} is a directory and no saved dataset; name its files."
        )
    if not path.is_file():
        raise InputError(f"input file {name} does not exist.")
    if not os.access(path, os.R_OK):
        raise InputError(f"input file {name} cannot be read: permission denied.")


def is_used_in_place(options: InputOptions) -> bool:
    """Whether the input is one local file of batch lines, which needs no copy."""
    if len(options.names) != 1 or options.template or options.max_requests is not None:
        return False
    name = options.names[0]
    if not is_local_file(name):
        return False
    path = Path(name)
    return not is_compressed(path) and table_suffix(name, path) == ".jsonl"


def identity(name: str) -> list[Any]:
    """What tells whether a name still stands for what was read under it.

    A local file's size and time of change count; what is remote counts as unchanged.
    """
    if remote.is_url(name):
        return [remote.shown(name), remote.fingerprint(name)]
    path = Path(name.removeprefix(datasets.PREFIX).split(":")[0])
    if is_dataset(name):
        found = [path / file for file in ("state.json", "dataset_dict.json")]
    else:
        found = [path]
    about = [path.stat() for path in found if path.exists()]
    return [name, *([each.st_size, each.st_mtime_ns] for each in about)]


def plain_suffix(name: str) -> str:
    """A file name for a copy of an input, of which the suffixes are the input's."""
    tail = shown(name).rsplit("/", 1)[-1] if name != STDIN else "stdin"
    kept = Path(plain_name(tail)).suffix
    return kept + tail[len(plain_name(tail)) :]
