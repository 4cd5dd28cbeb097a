"""The lines of a batch: requests, results and errors, and the rules for a line of its input."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from ..request import BatchRequestInput, RequestOutput, engine_request_id, json_line
from .protocol import (
    ENDPOINTS,
    MAX_CUSTOM_ID_LEN,
    MAX_LINE_BYTES,
    Endpoint,
    canonical_url,
    error_body,
)


class InvalidLine(ValueError):
    """The line is not a JSON object."""


class _Envelope(msgspec.Struct):
    # Raw keeps the body as the client wrote it, numbers beyond 64 bits included.
    custom_id: Any = msgspec.UNSET
    method: Any = msgspec.UNSET
    url: Any = msgspec.UNSET
    body: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_decoder = msgspec.json.Decoder(_Envelope)
REQUIRED_KEYS = ("custom_id", "method", "url", "body")


def decode_envelope(line: bytes) -> dict[str, Any]:
    """The known keys of a line, ``body`` as raw bytes. InvalidLine: it is no object."""
    try:
        envelope = _decode(_decoder, line)
        found = {key: getattr(envelope, key) for key in REQUIRED_KEYS}
        body = found["body"]
        if body is not msgspec.UNSET:
            is_raw = isinstance(body, msgspec.Raw)
            found["body"] = bytes(body) if is_raw else json.dumps(body).encode()
    except (ValueError, RecursionError):
        raise InvalidLine from None
    return {key: value for key, value in found.items() if value is not msgspec.UNSET}


def _decode(decoder: msgspec.json.Decoder[Any], data: bytes) -> Any:
    """An object's known keys, with any numbers. Raises ValueError if it is none."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value, kind = loads_lenient(data), decoder.type
        if not isinstance(value, dict):
            raise InvalidLine from None
        known = kind.__struct_fields__
        return kind(**{key: value[key] for key in known if key in value})


def loads_lenient(data: bytes) -> Any:
    """Parse JSON with NaN, Infinity and any numbers, as Python writes it.

    Raises:
        ValueError: it is no JSON, or nested too deeply.
    """
    try:
        # Given bytes, json would also accept UTF-16 and lone surrogates.
        return json.loads(data.decode())
    except RecursionError:
        raise ValueError("The JSON is nested too deep.") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # a whole number that Python does not read
        most = sys.get_int_max_str_digits()
        raise ValueError(f"A number has more than {most:,} digits.") from None


class ResultResponse(msgspec.Struct):
    """The answer to a request that ran. One rejected at once has no ``request_id``."""

    status_code: int
    request_id: str | None
    body: msgspec.Raw


class ResultError(msgspec.Struct):
    code: str
    message: str


class ResultLine(msgspec.Struct):
    """A line of an output or error file.

    custom_id: None for a line of the input that has none, or one that cannot be used.
    response: None for a request that was cancelled, expired or never began.
    error: None for a request that was answered, also with an error.
    merged_with: the ``custom_id`` of an equal request that was computed for both. Not there
        if this one was computed.
    from_cache: true if an earlier job computed the answer. Not there otherwise.
    """

    id: str
    custom_id: str | None
    response: ResultResponse | None
    error: ResultError | None
    merged_with: str | msgspec.UnsetType = msgspec.UNSET
    from_cache: bool | msgspec.UnsetType = msgspec.UNSET

    @property
    def index(self) -> int:
        """Index of the request in its batch, from 0, as the line's id has it."""
        _, dash, number = self.id.rpartition("-")
        # Earlier releases wrote eight hexadecimal digits.
        return int(number) if dash else int(self.id[-8:], 16)


def result_line(
    request: BatchRequestInput, job_id: str, output: RequestOutput
) -> bytes:
    """One line of an output or error file, for a request that ran."""
    body = msgspec.Raw(output.body)
    return _written(
        _line_id(job_id, request.index),
        request.custom_id,
        ResultResponse(output.status_code, output.request_id, body),
        None,
        msgspec.UNSET if output.merged_with is None else output.merged_with,
        output.from_cache or msgspec.UNSET,
    )


def invalid_line(
    index: int, custom_id: str | None, job_id: str, code: str, message: str
) -> bytes:
    """One line of an error file, for a line that is not a valid request.

    Readers of either field see the error: ``response`` is the answer that the
    endpoint would give, and ``error`` is set because nothing ran.
    """
    body = msgspec.json.encode(error_body(message, code=code))
    response = ResultResponse(400, engine_request_id(job_id, index), msgspec.Raw(body))
    error = ResultError(code, message)
    return _written(_line_id(job_id, index), custom_id, response, error)


def unrun_line(
    request: BatchRequestInput, job_id: str, code: str, message: str
) -> bytes:
    error = ResultError(code, message)
    return _written(_line_id(job_id, request.index), request.custom_id, None, error)


def _written(*fields: Any) -> bytes:
    return json_line(ResultLine(*fields)).removesuffix(b"\n")


def _line_id(job_id: str, index: int) -> str:
    """The engine's id of the request, with OpenAI's prefix."""
    return f"batch_req_{engine_request_id(job_id, index).removeprefix('batch_')}"


# JSON can escape a lone surrogate, but no result line could be written with it.
_SURROGATE = re.compile("[\ud800-\udfff]")
# Besides the JSON value true, the values that SGLang's request classes take for true.
_TRUE_WORDS = {"true", "1", "on", "t", "yes", "y"}

BodyCheck = Callable[[str, bytes], Sequence[tuple[str, str | None]]]
"""A further check of (url, body): the (message, param) of each error."""


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a batch's input cannot run. ``line`` is from 1, or None for the file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def __str__(self) -> str:
        where = "" if self.line is None else f"line {self.line}: "
        what = f" ({self.param})" if self.param else ""
        return f"{where}{self.message}{what} [{self.code}]"


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a model allows in a request. None: it is not known.

    model: its name, which the name of an adapter may follow, after a colon.
    context_len: most tokens of a prompt and its answer.
    adapters: the names of all LoRA adapters.
    """

    model: str = ""
    context_len: int | None = None
    vocab_size: int | None = None
    adapters: frozenset[str] | None = None


UNKNOWN_MODEL = ModelLimits()


@dataclass(frozen=True, slots=True)
class LineRules:
    """The rules that each line is checked against.

    None allows any known endpoint, and every name of a model. ``check_body`` gets
    bodies that have all required keys. Of all errors, ``max_errors`` are listed.
    ``line_name`` names other lines in messages.
    """

    endpoint: str | None = None
    models: tuple[str, ...] | None = None
    require_model: bool = True
    check_body: BodyCheck | None = None
    max_errors: int = 100
    line_name: Callable[[int], str] = "line {}".format


def check_line(
    number: int, line: bytes, rules: LineRules, errors: list[LineError]
) -> dict[str, Any]:
    """Append the errors of a line, and return its known keys."""

    def bad(code: str, message: str, param: str | None = None) -> None:
        errors.append(LineError(code, message, number, param))

    if len(line) > MAX_LINE_BYTES:
        bad("invalid_request", f"This line has more than {MAX_LINE_BYTES:,} bytes.")
        return {}
    try:
        line.decode()  # the JSON decoder skips the body without checking its bytes
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
    if "custom_id" in found and not is_custom_id(found["custom_id"]):
        bad(
            "invalid_request",
            f"'custom_id' must be a string of 1 to {MAX_CUSTOM_ID_LEN} characters "
            "that UTF-8 can hold.",
            "custom_id",
        )
    if found.get("method", "POST") != "POST":
        bad("invalid_method", "The method of a batch request must be POST.", "method")
    if "url" in found:
        url = canonical_url(found["url"]) if isinstance(found["url"], str) else ""
        if url not in ENDPOINTS or rules.endpoint not in (None, url):
            expected = rules.endpoint or "one of " + ", ".join(ENDPOINTS)
            bad(
                "invalid_url",
                "The URL provided for this request does not match the batch endpoint. "
                f"It is {_quoted(found['url'])}, expected {expected}.",
                "url",
            )
        elif "body" in found:
            _check_body(url, found["body"], rules, bad)
    return found


def is_custom_id(value: object) -> bool:
    """Whether a line's ``custom_id`` can be used."""
    return (
        isinstance(value, str)
        and 0 < len(value) <= MAX_CUSTOM_ID_LEN
        and _SURROGATE.search(value) is None
    )


def _check_body(
    url: str, body: bytes, rules: LineRules, bad: Callable[..., None]
) -> None:
    endpoint = ENDPOINTS[url]
    try:
        fields = _decode(_body_decoders[url], body)
    except ValueError:
        bad("invalid_request", "The body of a request must be a JSON object.", "body")
        return
    model = fields.model
    if model is msgspec.UNSET or model is None:
        if rules.require_model:
            bad("invalid_request", "Model parameter is required.", "body.model")
    # "base:adapter" names a LoRA adapter of a served model.
    elif rules.models is not None and not (
        isinstance(model, str)
        and f"{model}:".startswith(tuple(f"{name}:" for name in rules.models))
    ):
        bad(
            "model_not_found",
            f"The provided model {_quoted(model)} is not supported by the Batch API. "
            f"This server serves {', '.join(rules.models)}.",
            "body.model",
        )
    missing = [
        key for key in endpoint.required if getattr(fields, key) is msgspec.UNSET
    ]
    for key in missing:
        message = f"{key.capitalize()} parameter is required."
        bad("invalid_request", message, f"body.{key}")
    if fields.stream in (True, 1) or str(fields.stream).lower() in _TRUE_WORDS:
        bad(
            "streaming_unsupported",
            f"{endpoint.title}: Streaming is not supported in the Batch API.",
            "body.stream",
        )
    if rules.check_body is not None and not missing:
        for message, param in rules.check_body(url, body):
            bad("invalid_request", message, param)


def _quoted(value: object) -> str:
    """A client's value for a message: short, and safe to print."""
    return repr(value[:200]) if isinstance(value, str) else f"<{type(value).__name__}>"


class _CheckedBody(msgspec.Struct):
    model: Any = msgspec.UNSET
    stream: Any = False


def _body_decoder(endpoint: Endpoint) -> msgspec.json.Decoder[Any]:
    """Decodes the checked keys of an endpoint's body. Missing ones are UNSET."""
    kind = msgspec.Raw | msgspec.UnsetType
    keys = [(key, kind, msgspec.UNSET) for key in endpoint.required]
    return msgspec.json.Decoder(msgspec.defstruct("_Body", keys, bases=(_CheckedBody,)))


_body_decoders = {url: _body_decoder(endpoint) for url, endpoint in ENDPOINTS.items()}


def model_of(url: str, body: bytes) -> object:
    """The model that a body names, or :data:`msgspec.UNSET`."""
    return _decode(_body_decoders[url], body).model


# The most reasons that are told apart by their messages, and the most that are stored.
MAX_REASONS = 1000
MAX_STORED = 50
MAX_CODE_CHARS = 64
MAX_MESSAGE_CHARS = 200

# The parts of a message that differ from line to line: quoted text and numbers.
_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`|[\w.+-]*\d[\w.,+-]*")


class Reason(NamedTuple):
    """One reason, and the lines that failed for it.

    The messages of others differ from that of the first in numbers and quoted text
    only. It is empty if too many messages are unlike.
    """

    code: str
    message: str
    lines: int


def without_details(message: str) -> str:
    """A message without quoted text and numbers: equal messages are one reason."""
    return _VARIABLE.sub("*", message)


class ErrorReasons:
    """Counts the bodies of error answers by reason, so that thousands are a few rows."""

    def __init__(self) -> None:
        self._lines: Counter[tuple[str, str]] = Counter()
        self._first: dict[tuple[str, str], str] = {}

    def add(self, body: bytes) -> None:
        """Count a line with this answer."""
        try:
            error: Any = msgspec.json.decode(body)["error"]
            given = error.get("code") or error.get("type"), error.get("message")
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
            given = None, None
        code = str(given[0] or "unknown")[:MAX_CODE_CHARS]
        message = str(given[1] or "")[:MAX_MESSAGE_CHARS]
        key = (code, without_details(message))
        if key not in self._lines:
            if len(self._lines) >= MAX_REASONS:
                key, message = (code, ""), ""
            self._first.setdefault(key, message)
        self._lines[key] += 1

    def by_code(self) -> dict[str, int]:
        """Number of lines by code, of the ``MAX_STORED`` most frequent codes."""
        lines: Counter[str] = Counter()
        for (code, _), count in self._lines.items():
            lines[code] += count
        return dict(lines.most_common(MAX_STORED))

    def reasons(self) -> list[Reason]:
        """The ``MAX_STORED`` most frequent reasons, most frequent first."""
        return [
            Reason(key[0], self._first[key], lines)
            for key, lines in self._lines.most_common(MAX_STORED)
        ]

    def as_json(self) -> str | None:
        """The reasons as a JSON list of objects, or None without any."""
        reasons = [reason._asdict() for reason in self.reasons()]
        return json.dumps(reasons) if reasons else None


def line_error(entry: dict[str, Any]) -> str:
    """The message of an error line, parsed from JSON, whatever its shape."""
    response = entry.get("response")
    body = response.get("body") if isinstance(response, dict) else None
    in_body = body.get("error") if isinstance(body, dict) else body
    error = in_body or entry.get("error")
    if isinstance(error, dict):
        error = error.get("message") or error.get("code")
    return str(error or "unknown error")
