"""The input of ``sglang-batch submit``: one local file of lines, checked before it is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ..batch_api.jsonl import read_lines
from ..batch_api.line_checks import LineRules
from ..batch_api.lines import InvalidLine, decode_envelope
from ..batch_api.protocol import ENDPOINTS, canonical_url
from ..errors import InputError
from ..inputs.compression import plain_name
from ..inputs.input_sources import STDIN, input_sources
from ..inputs.job_input import JobInput
from ..inputs.local_input import LocalInput
from ..inputs.staging import Staging

_WAY_OUT = "Nothing was sent. --no-check sends the file as it is."


@dataclass(frozen=True, slots=True)
class UploadInput:
    """A file to upload.

    name: for the server, ending in ``.jsonl``.
    endpoint: of all its lines.
    """

    path: Path
    name: str
    endpoint: str


@contextmanager
def submission(
    names: Sequence[str], endpoint: str | None, *, check: bool
) -> Iterator[UploadInput]:
    """The inputs of these names as one file, for the length of the block.

    Args:
        names: as for ``sglang-batch run``: files, URLs, ``-``; compressed or not.
        endpoint: of all lines. None: the endpoint of the first line that names one.
        check: look for all errors that the server would find, and check each body as
            the server does when it runs.

    Raises:
        InputError: an input cannot be read, or lines are bad; the message lists them.
    """
    inputs = JobInput(input_sources(names))
    inputs.check()
    with TemporaryDirectory(prefix="sglang-batch-") as directory:
        local = Staging(Path(directory)).stage(inputs)
        endpoint = endpoint or _first_endpoint(local.path)
        if check:
            _check(local, endpoint)
        if endpoint is None:
            raise InputError(
                f"{local.title} has no line with one of the endpoints "
                f"{', '.join(ENDPOINTS)}; name it with --endpoint."
            )
        yield UploadInput(local.path, _upload_name(names[0]), endpoint)


def _check(local: LocalInput, endpoint: str | None) -> None:
    from ..srt.engine.checks.body_checks import body_errors

    rules = LineRules(endpoint=endpoint, check_body=body_errors)
    with local.requests(rules, way_out=_WAY_OUT).closing():
        pass


def _first_endpoint(path: Path) -> str | None:
    with open(path, "rb") as file:
        for _, _, line in read_lines(file):
            try:
                url = decode_envelope(line).get("url")
            except InvalidLine:
                continue
            if isinstance(url, str) and canonical_url(url) in ENDPOINTS:
                return canonical_url(url)
    return None


def _upload_name(name: str) -> str:
    stem = "stdin" if name == STDIN else plain_name(name.split("?")[0].rsplit("/")[-1])
    return stem if stem.endswith(".jsonl") else f"{stem}.jsonl"
