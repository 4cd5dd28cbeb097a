"""Each rule of the contract: one bad line, and its error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from builders import CHAT, MODEL, make_body, make_file, make_line
from jsonl_files import RULES, custom_ids_of, errors_of

from sglang_batch.batch_api.lines import LineError

MISSING = "Missing required parameter: '{}'."
CUSTOM_ID = "'custom_id' must be a string of 1 to 512 characters that UTF-8 can hold."
NOT_AN_OBJECT = "The body of a request must be a JSON object."

CONTRACT: dict[str, tuple[str | bytes, str, str | None, str]] = {
    "not JSON": (
        "{oops",
        "invalid_json_line",
        None,
        "This line is not parseable as valid JSON.",
    ),
    "not an object": (
        "[1, 2]",
        "invalid_json_line",
        None,
        "This line is not parseable as valid JSON.",
    ),
    "not UTF-8": (
        make_line(text="caf\u00e9").encode("utf-8").replace(b"\\u00e9", b"\xe9"),
        "invalid_json_line",
        None,
        "This line is not parseable as valid JSON.",
    ),
    "UTF-16": (
        make_line().encode("utf-16"),
        "invalid_json_line",
        None,
        "This line is not parseable as valid JSON.",
    ),
    "no custom_id": (
        make_line(without="custom_id"),
        "missing_required_parameter",
        "custom_id",
        MISSING.format("custom_id"),
    ),
    "no method": (
        make_line(without="method"),
        "missing_required_parameter",
        "method",
        MISSING.format("method"),
    ),
    "no url": (
        make_line(without="url"),
        "missing_required_parameter",
        "url",
        MISSING.format("url"),
    ),
    "no body": (
        make_line(without="body"),
        "missing_required_parameter",
        "body",
        MISSING.format("body"),
    ),
    "number as custom_id": (make_line(7), "invalid_request", "custom_id", CUSTOM_ID),
    "null as custom_id": (make_line(None), "invalid_request", "custom_id", CUSTOM_ID),
    "empty custom_id": (make_line(""), "invalid_request", "custom_id", CUSTOM_ID),
    "long custom_id": (make_line("x" * 513), "invalid_request", "custom_id", CUSTOM_ID),
    "custom_id with a lone surrogate": (
        make_line("\ud800"),
        "invalid_request",
        "custom_id",
        CUSTOM_ID,
    ),
    "method GET": (
        make_line(method="GET"),
        "invalid_method",
        "method",
        "The method of a batch request must be POST.",
    ),
    "url of another endpoint": (
        make_line(url="/v1/embeddings"),
        "invalid_url",
        "url",
        "The URL provided for this request does not match the batch endpoint. "
        f"It is '/v1/embeddings', expected {CHAT}.",
    ),
    "url of no text": (
        make_line(url=[CHAT]),
        "invalid_url",
        "url",
        "The URL provided for this request does not match the batch endpoint. "
        f"It is <list>, expected {CHAT}.",
    ),
    "unknown model": (
        make_line(body=make_body(model="gpt-9")),
        "model_not_found",
        "body.model",
        "The provided model 'gpt-9' is not supported by the Batch API. "
        f"This server serves {MODEL}.",
    ),
    "model of no text": (
        make_line(body=make_body(model=5)),
        "model_not_found",
        "body.model",
        "The provided model <int> is not supported by the Batch API. "
        f"This server serves {MODEL}.",
    ),
    "no model": (
        make_line(body=make_body(without="model")),
        "invalid_request",
        "body.model",
        "Model parameter is required.",
    ),
    "null as model": (
        make_line(body=make_body(model=None)),
        "invalid_request",
        "body.model",
        "Model parameter is required.",
    ),
    "no messages": (
        make_line(body=make_body(without="messages")),
        "invalid_request",
        "body.messages",
        "Messages parameter is required.",
    ),
    "stream": (
        make_line(body=make_body(stream=True)),
        "streaming_unsupported",
        "body.stream",
        "Chat Completions: Streaming is not supported in the Batch API.",
    ),
    "text as body": (
        make_line(body="hello"),
        "invalid_request",
        "body",
        NOT_AN_OBJECT,
    ),
    "list as body": (make_line(body=[1]), "invalid_request", "body", NOT_AN_OBJECT),
}


@pytest.mark.parametrize("name", CONTRACT)
def test_a_bad_line_is_named_with_code_line_param_and_message(
    tmp_path: Path, name: str
) -> None:
    line, code, param, message = CONTRACT[name]
    path = make_file(tmp_path, [make_line("first"), line, make_line("last")])
    assert errors_of(path) == [LineError(code, message, 2, param)]


@pytest.mark.parametrize(
    ("url", "title", "required"),
    [
        (CHAT, "Chat Completions", "messages"),
        ("/v1/completions", "Completions", "prompt"),
        ("/v1/embeddings", "Embeddings", "input"),
        ("/v1/responses", "Responses", "input"),
        ("/v1/score", "Score", "items"),
        ("/v1/classify", "Classify", "input"),
    ],
)
def test_each_endpoint_has_its_required_key_and_title(
    tmp_path: Path, url: str, title: str, required: str
) -> None:
    streamed = {"model": MODEL, required: "x", "stream": True}
    path = make_file(
        tmp_path,
        [
            make_line("a", url=url, body={"model": MODEL}),
            make_line("b", url=url, body=streamed),
        ],
    )
    assert errors_of(path, replace(RULES, endpoint=url)) == [
        LineError(
            "invalid_request",
            f"{required.capitalize()} parameter is required.",
            1,
            f"body.{required}",
        ),
        LineError(
            "streaming_unsupported",
            f"{title}: Streaming is not supported in the Batch API.",
            2,
            "body.stream",
        ),
    ]


@pytest.mark.parametrize(
    ("url", "title", "required"),
    [
        ("/v1/messages", "Messages", ("messages", "max_tokens")),
        ("/v1/rerank", "Rerank", ("query", "documents")),
    ],
)
def test_every_required_key_that_is_missing_is_named(
    tmp_path: Path, url: str, title: str, required: tuple[str, str]
) -> None:
    whole = {"model": MODEL, **dict.fromkeys(required, "x")}
    bodies = [{k: v for k, v in whole.items() if k != key} for key in required]
    bodies += [{"model": MODEL}, {**whole, "stream": True}]
    lines = [
        make_line(str(number), url=url, body=body) for number, body in enumerate(bodies)
    ]
    found = errors_of(make_file(tmp_path, lines), replace(RULES, endpoint=url))
    first, second = required
    assert [(error.line, error.param) for error in found] == [
        (1, f"body.{first}"),
        (2, f"body.{second}"),
        (3, f"body.{first}"),
        (3, f"body.{second}"),
        (4, "body.stream"),
    ]
    assert found[0].message == f"{first.capitalize()} parameter is required."
    assert found[4].message.startswith(f"{title}: ")
    good = make_file(tmp_path, [make_line(url=url, body=whole)])
    assert custom_ids_of(good, replace(RULES, endpoint=url)) == ["a"]


def test_stream_false_is_no_streaming(tmp_path: Path) -> None:
    path = make_file(tmp_path, [make_line(body=make_body(stream=False))])
    assert custom_ids_of(path) == ["a"]


@pytest.mark.parametrize("data", [b"", b"\n", b"\n \r\n\t\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])  # fmt: skip
def test_a_file_without_a_request_is_empty(tmp_path: Path, data: bytes) -> None:
    message = (
        "The input file is empty. Please ensure that the batch contains at least one "
        "request."
    )
    assert errors_of(make_file(tmp_path, data)) == [LineError("empty_file", message)]


def test_an_error_reads_as_line_message_param_and_code() -> None:
    error = LineError("invalid_url", "No.", 3, "url")
    assert str(error) == "line 3: No. (url) [invalid_url]"
    assert str(LineError("empty_file", "Empty.")) == "Empty. [empty_file]"
