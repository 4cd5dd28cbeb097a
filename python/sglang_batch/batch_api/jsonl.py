"""Batch input files: validation of the whole file, then random access by line.

Lines end at ``\\n`` only (JSON allows a bare ``\\r`` as white space), a leading
UTF-8 byte order mark is dropped, blank lines are skipped. Validation streams:
memory grows by some 70 bytes per line, whatever the lines hold.
"""

from __future__ import annotations

import hashlib
import os
import re
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from ..request import BatchRequestInput
from .lines import REQUIRED_KEYS, InvalidLine, decode_envelope, loads_lenient
from .protocol import ENDPOINTS, MAX_CUSTOM_ID_LEN, Endpoint

_BOM = b"\xef\xbb\xbf"
_DIGEST_BYTES = 16
# JSON can escape a lone surrogate, but no result line could be written with it.
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a batch's input cannot run; ``line`` counts from 1, None is the file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def __str__(self) -> str:
        where = "" if self.line is None else f"line {self.line}: "
        what = f" ({self.param})" if self.param else ""
        return f"{where}{self.message}{what} [{self.code}]"


@dataclass(frozen=True, slots=True)
class LineRules:
    """What a line must look like.

    endpoint: the one endpoint all lines must name; None allows any known one.
    models: names of the models served; None accepts every name.
    require_model: whether a body must name its model.
    check_body: a further check of (url, body); returns (message, param) or None.
    max_errors: stop listing after so many.
    line_name: what messages call another line, by its number.
    """

    endpoint: str | None = None
    models: tuple[str, ...] | None = None
    require_model: bool = True
    check_body: Callable[[str, bytes], tuple[str, str | None] | None] | None = None
    max_errors: int = 100
    line_name: Callable[[int], str] = "line {}".format


class BatchFile:
    """A validated input file: its requests by index, read from disk on demand."""

    def __init__(self, path: Path, starts: array[int], ends: array[int]) -> None:
        self._fd = os.open(path, os.O_RDONLY)
        self._starts = starts
        self._ends = ends

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> BatchRequestInput:
        start, end = self._starts[index], self._ends[index]
        found = decode_envelope(os.pread(self._fd, end - start, start))
        return BatchRequestInput(index, found["custom_id"], found["url"], found["body"])

    def model(self) -> str | None:
        """The model that the first request names."""
        if not len(self):
            return None
        first = self[0]
        model = _decode_body(first.url, first.body).model
        return model if isinstance(model, str) else None

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Close the file when the block ends."""
        try:
            yield
        finally:
            os.close(self._fd)


def validate(path: Path, rules: LineRules) -> BatchFile | list[LineError]:
    """Check every line of a file.

    Returns:
        The file, ready to be read; or its errors in the order of lines, at most
        ``rules.max_errors``. One bad line condemns the file, as at OpenAI.
    """
    errors: list[LineError] = []
    starts, ends = array("q"), array("q")
    line_numbers = array("q")
    digests = bytearray()
    with open(path, "rb") as file:
        for number, start, line in _lines(file):
            found = _check_line(number, line, rules, errors)
            starts.append(start)
            ends.append(start + len(line))
            line_numbers.append(number)
            digests += _digest(found.get("custom_id"), number)
            if len(errors) >= rules.max_errors:
                break
    errors += _duplicates(digests, line_numbers, rules.line_name)
    if not starts:
        errors.append(
            LineError(
                "empty_file",
                "The input file is empty. Please ensure that the batch contains at "
                "least one request.",
            )
        )
    if errors:
        errors.sort(key=lambda error: error.line or 0)
        return errors[: rules.max_errors]
    return BatchFile(path, starts, ends)


def _digest(custom_id: object, number: int) -> bytes:
    """What tells custom ids apart; unlike any other where the line has none."""
    name = f"id {custom_id}" if _is_custom_id(custom_id) else f"line {number}"
    return hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES).digest()


def _is_custom_id(value: object) -> bool:
    return (
        isinstance(value, str)
        and 0 < len(value) <= MAX_CUSTOM_ID_LEN
        and _SURROGATE.search(value) is None
    )


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """(line number from 1, offset, bytes) of every line that is not blank."""
    offset = 0
    for number, line in enumerate(file, start=1):
        start = offset
        offset += len(line)
        if number == 1 and line.startswith(_BOM):
            start += len(_BOM)
            line = line[len(_BOM) :]
        if line.strip():
            yield number, start, line.rstrip(b"\n")


def _check_line(
    number: int, line: bytes, rules: LineRules, errors: list[LineError]
) -> dict[str, Any]:
    def bad(code: str, message: str, param: str | None = None) -> None:
        errors.append(LineError(code, message, number, param))

    try:
        line.decode()  # decoding skips over the body, whatever its bytes
        found = decode_envelope(line)
    except ValueError:
        bad("invalid_json_line", "This line is not parseable as valid JSON.")
        return {}
    for key in REQUIRED_KEYS:
        if key not in found:
            bad(
                "missing_required_parameter",
                f"Missing required parameter: '{key}'.",
                key,
            )
    if "custom_id" in found and not _is_custom_id(found["custom_id"]):
        bad(
            "invalid_request",
            f"'custom_id' must be a string of 1 to {MAX_CUSTOM_ID_LEN} characters "
            "that UTF-8 can hold.",
            "custom_id",
        )
    if found.get("method", "POST") != "POST":
        bad("invalid_method", "The method of a batch request must be POST.", "method")
    if "url" not in found:
        return found
    url = found["url"]
    if not _url_allowed(url, rules):
        expected = rules.endpoint or "one of " + ", ".join(ENDPOINTS)
        bad(
            "invalid_url",
            "The URL provided for this request does not match the batch endpoint. "
            f"It is {_quoted(url)}, expected {expected}.",
            "url",
        )
    elif "body" in found:
        _check_body(url, found["body"], rules, bad)
    return found


def _quoted(value: object) -> str:
    """A client's value in a message: never long, and text that can be written."""
    return repr(value[:200]) if isinstance(value, str) else f"<{type(value).__name__}>"


def _url_allowed(url: object, rules: LineRules) -> bool:
    if rules.endpoint is not None:
        return url == rules.endpoint
    return isinstance(url, str) and url in ENDPOINTS


class _Body(msgspec.Struct):
    model: Any = msgspec.UNSET
    stream: Any = False


def _body_decoder(endpoint: Endpoint) -> msgspec.json.Decoder[Any]:
    """Decodes what is checked of an endpoint's body and skips over the rest.

    The required keys are attributes too; :data:`msgspec.UNSET` where they are missing.
    """
    kind = msgspec.Raw | msgspec.UnsetType
    keys = [(key, kind, msgspec.UNSET) for key in endpoint.required]
    return msgspec.json.Decoder(msgspec.defstruct("_Body", keys, bases=(_Body,)))


_body_decoders = {url: _body_decoder(endpoint) for url, endpoint in ENDPOINTS.items()}


def _decode_body(url: str, body: bytes) -> Any:
    decoder = _body_decoders[url]
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _lenient_body(decoder.type, body)


def _lenient_body(kind: type[Any], body: bytes) -> Any:
    value = loads_lenient(body)
    if not isinstance(value, dict):
        raise InvalidLine
    return kind(**{key: value[key] for key in kind.__struct_fields__ if key in value})


def _check_body(
    url: str, body: bytes, rules: LineRules, bad: Callable[..., None]
) -> None:
    endpoint = ENDPOINTS[url]
    try:
        fields = _decode_body(url, body)
    except ValueError:
        bad("invalid_request", "The body of a request must be a JSON object.", "body")
        return
    if fields.model is msgspec.UNSET or fields.model is None:
        if rules.require_model:
            bad("invalid_request", "Model parameter is required.", "body.model")
    elif rules.models is not None and not _model_served(fields.model, rules.models):
        served = ", ".join(rules.models)
        bad(
            "model_not_found",
            f"The provided model {_quoted(fields.model)} is not supported by the Batch API. "
            f"This server serves {served}.",
            "body.model",
        )
    complete = True
    for key in endpoint.required:
        if getattr(fields, key) is msgspec.UNSET:
            complete = False
            message = f"{key.capitalize()} parameter is required."
            bad("invalid_request", message, f"body.{key}")
    if not complete:
        return
    if fields.stream is True:
        bad(
            "streaming_unsupported",
            f"{endpoint.title}: Streaming is not supported in the Batch API.",
            "body.stream",
        )
    elif rules.check_body is not None and (why := rules.check_body(url, body)):
        bad("invalid_request", why[0], why[1])


def _model_served(model: object, served: tuple[str, ...]) -> bool:
    # "base:adapter" names a LoRA adapter of a served model.
    return isinstance(model, str) and (
        model in served or any(model.startswith(f"{name}:") for name in served)
    )


def _duplicates(
    digests: bytearray, line_numbers: array[int], line_name: Callable[[int], str]
) -> Iterator[LineError]:
    """Every line whose custom_id an earlier line has."""
    if not line_numbers:
        return
    ids = np.frombuffer(digests, dtype=f"V{_DIGEST_BYTES}")
    in_order = np.sort(ids)
    if not (in_order[1:] == in_order[:-1]).any():
        return  # as nearly always; what follows takes three times the memory
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    for position in np.flatnonzero(first[inverse] != np.arange(len(ids))):
        earlier = line_numbers[int(first[inverse[position]])]
        yield LineError(
            "duplicate_custom_id",
            f"The custom_id of this request is that of {line_name(earlier)} too; "
            "custom ids must be unique in a batch.",
            line_numbers[int(position)],
            "custom_id",
        )
