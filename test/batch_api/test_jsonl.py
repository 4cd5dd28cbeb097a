"""Validation of input files: each rule of the contract, and no input that crashes it."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import CHAT, MODEL, make_body, make_file, make_line, make_lines
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sglang_batch.batch_api.jsonl import BatchFile, LineError, LineRules, validate
from sglang_batch.batch_api.lines import unrun_line

RULES = LineRules(endpoint=CHAT, models=(MODEL,))


def errors_of(path: Path, rules: LineRules = RULES) -> list[LineError]:
    result = validate(path, rules)
    if isinstance(result, BatchFile):
        with result.closing():
            pytest.fail(f"accepted {len(result)} lines")
    return result


def custom_ids_of(path: Path, rules: LineRules = RULES) -> list[str]:
    result = validate(path, rules)
    assert isinstance(result, BatchFile), result
    with result.closing():
        return [result[i].custom_id for i in range(len(result))]


# One bad line -------------------------------------------------------------------

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


# Rules --------------------------------------------------------------------------


def test_without_an_endpoint_any_known_one_will_do(tmp_path: Path) -> None:
    lines = [
        make_line("a"),
        make_line("b", url="/v1/embeddings", body={"model": MODEL, "input": "x"}),
        make_line("c", url="/v1/magic"),
    ]
    [error] = errors_of(make_file(tmp_path, lines), LineRules())
    assert (error.line, error.code) == (3, "invalid_url")


def test_any_model_will_do_where_none_is_named(tmp_path: Path) -> None:
    path = make_file(tmp_path, [make_line(body=make_body(model="gpt-9"))])
    assert custom_ids_of(path, LineRules()) == ["a"]


def test_a_model_may_be_left_out_where_none_is_required(tmp_path: Path) -> None:
    path = make_file(tmp_path, [make_line(body=make_body(without="model"))])
    assert custom_ids_of(path, replace(RULES, require_model=False)) == ["a"]


def test_an_adapter_of_a_served_model_is_served(tmp_path: Path) -> None:
    path = make_file(tmp_path, [make_line(body=make_body(model=f"{MODEL}:adapter"))])
    assert custom_ids_of(path) == ["a"]


def test_a_name_that_only_begins_like_a_served_model_is_not(tmp_path: Path) -> None:
    path = make_file(tmp_path, [make_line(body=make_body(model=f"{MODEL}-2"))])
    assert [error.code for error in errors_of(path)] == ["model_not_found"]


def test_a_further_check_sees_url_and_body_of_lines_that_are_well_formed(
    tmp_path: Path,
) -> None:
    seen = []

    def check(url: str, body: bytes) -> tuple[str, str | None] | None:
        seen.append((url, json.loads(body)))
        return ("Too hot.", "body.temperature") if b"temperature" in body else None

    hot = make_body(temperature=9)
    lines = [make_line("a"), make_line("b", body=hot), make_line("c", without="url")]
    errors = errors_of(make_file(tmp_path, lines), replace(RULES, check_body=check))
    assert errors[0] == LineError("invalid_request", "Too hot.", 2, "body.temperature")
    assert [error.line for error in errors] == [2, 3]
    assert seen == [(CHAT, make_body()), (CHAT, hot)]


# Several errors -----------------------------------------------------------------


def test_all_errors_are_listed_in_the_order_of_lines(tmp_path: Path) -> None:
    lines = [
        make_line("a", without="method", body=make_body(without="model")),
        make_line("b"),
        make_line("b"),
        "nonsense",
        make_line("c", method="PUT", url="/v1/magic"),
        make_line("a"),
    ]
    errors = errors_of(make_file(tmp_path, lines))
    assert [(error.line, error.code, error.param) for error in errors] == [
        (1, "missing_required_parameter", "method"),
        (1, "invalid_request", "body.model"),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "invalid_json_line", None),
        (5, "invalid_method", "method"),
        (5, "invalid_url", "url"),
        (6, "duplicate_custom_id", "custom_id"),
    ]


@pytest.mark.parametrize("max_errors", [1, 7, 100])
def test_no_more_errors_are_listed_than_asked_for(
    tmp_path: Path, max_errors: int
) -> None:
    path = make_file(tmp_path, ["bad"] * 200)
    errors = errors_of(path, replace(RULES, max_errors=max_errors))
    assert [error.line for error in errors] == list(range(1, max_errors + 1))


def test_the_cap_counts_duplicates_too(tmp_path: Path) -> None:
    path = make_file(tmp_path, [make_line("same")] * 20)
    errors = errors_of(path, replace(RULES, max_errors=5))
    assert [error.line for error in errors] == [2, 3, 4, 5, 6]


def test_the_cap_is_kept_where_one_line_has_several_errors(tmp_path: Path) -> None:
    path = make_file(tmp_path, ["{}"] * 3)
    assert len(errors_of(path, replace(RULES, max_errors=6))) == 6


# Duplicates ---------------------------------------------------------------------


def test_every_repetition_names_the_first_line_with_its_custom_id(
    tmp_path: Path,
) -> None:
    lines: list[str | bytes] = [*make_lines(3000)]
    lines[1234] = make_line("r7")
    lines[2999] = make_line("r7")
    lines[2000] = make_line("r1999")
    lines.insert(0, b"")  # physical line numbers, from here one higher
    errors = errors_of(make_file(tmp_path, lines))
    message = (
        "The custom_id of this request is that of line {} too; custom ids must be "
        "unique in a batch."
    )
    assert errors == [
        LineError("duplicate_custom_id", message.format(earlier), line, "custom_id")
        for line, earlier in [(1236, 9), (2002, 2001), (3001, 9)]
    ]


def test_custom_ids_that_differ_in_one_character_are_not_duplicates(
    tmp_path: Path,
) -> None:
    ids = ["a", "A", "a ", " a", "a\0", "\u00e9", "e\u0301", "line 3", "id a"]
    assert custom_ids_of(make_file(tmp_path, map(make_line, ids))) == ids


def test_lines_without_a_usable_custom_id_are_not_duplicates_of_each_other(
    tmp_path: Path,
) -> None:
    lines = [
        make_line(None), make_line(None), make_line(5), make_line(5),
        make_line(without="custom_id"), make_line(without="custom_id"),
        "bad", "bad",
    ]  # fmt: skip
    codes = {error.code for error in errors_of(make_file(tmp_path, lines))}
    assert "duplicate_custom_id" not in codes


# Splitting into lines -----------------------------------------------------------


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85"])
def test_only_a_newline_ends_a_line(tmp_path: Path, inside: str) -> None:
    # All of them are line ends to str.splitlines().
    line = json.dumps(json.loads(make_line("a", f"x{inside}y")), ensure_ascii=False)
    assert inside in line
    path = make_file(tmp_path, [line, make_line("b")])
    assert custom_ids_of(path) == ["a", "b"]


def test_a_bare_carriage_return_is_white_space(tmp_path: Path) -> None:
    spread = make_line("a").replace(", ", ",\r").replace(": ", ":\r")
    path = make_file(tmp_path, [spread, make_line("b") + "\r"])
    assert custom_ids_of(path) == ["a", "b"]


def test_the_last_line_needs_no_newline(tmp_path: Path) -> None:
    data = f"{make_line('a')}\n{make_line('b')}".encode()
    assert custom_ids_of(make_file(tmp_path, data)) == ["a", "b"]


def test_a_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + f"{make_line('a')}\n{make_line('b')}\n".encode()
    assert custom_ids_of(make_file(tmp_path, data)) == ["a", "b"]


def test_a_byte_order_mark_further_down_is_an_error(tmp_path: Path) -> None:
    path = make_file(tmp_path, [make_line("a"), "\ufeff" + make_line("b")])
    assert [error.line for error in errors_of(path)] == [2]


def test_blank_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    lines = ["", make_line("a"), " \t\r", "", "bad", make_line("b"), "", "bad"]
    assert [error.line for error in errors_of(make_file(tmp_path, lines))] == [5, 8]
    lines = [line for line in lines if line != "bad"]
    assert custom_ids_of(make_file(tmp_path, lines)) == ["a", "b"]


# Reading back -------------------------------------------------------------------


def test_requests_are_read_back_by_index_in_any_order(tmp_path: Path) -> None:
    lines: list[str | bytes] = [*make_lines(50), b"", b" "]
    lines.insert(20, b"\r")
    data = b"\xef\xbb\xbf" + b"".join(
        (line.encode() if isinstance(line, str) else line) + b"\n" for line in lines
    )
    result = validate(make_file(tmp_path, data), RULES)
    assert isinstance(result, BatchFile)
    with result.closing():
        assert len(result) == 50
        for i in (49, 0, 20, 19, 21, 0):
            request = result[i]
            assert (request.index, request.custom_id, request.url) == (i, f"r{i}", CHAT)
            assert json.loads(request.body) == make_body(f"prompt {i}")
        with pytest.raises(IndexError):
            result[50]


def test_the_body_is_read_back_byte_for_byte(tmp_path: Path) -> None:
    body = (
        '{ "messages":[ ],"model" :"demo","seed":123456789012345678901234567890,'
        '"x":1.00,"x":1E5,"text":"\\u00e9\u00e9\\/" }'
    )
    line = f'{{"custom_id":"a","method":"POST","url":"{CHAT}","body":{body}}}'
    result = validate(make_file(tmp_path, [line]), RULES)
    assert isinstance(result, BatchFile)
    with result.closing():
        assert result[0].body == body.encode()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_only_python_writes_reach_the_body(
    tmp_path: Path, number: str
) -> None:
    fields: dict[str, Any] = {"temperature": float(number), "seed": 10**30}
    path = make_file(tmp_path, [make_line(body=make_body(**fields))])
    result = validate(path, RULES)
    assert isinstance(result, BatchFile)
    with result.closing():
        body = result[0].body.decode()
        assert result.model() == MODEL
    assert f'"temperature": {number}' in body
    assert f'"seed": {10**30}' in body


def test_the_model_of_a_file_is_that_of_its_first_line(tmp_path: Path) -> None:
    lines = [
        make_line("a", body=make_body(model="one")),
        make_line("b", body=make_body(model="two")),
    ]
    result = validate(make_file(tmp_path, lines), LineRules())
    assert isinstance(result, BatchFile)
    with result.closing():
        assert result.model() == "one"


# Anything at all ----------------------------------------------------------------


def assert_answered(path: Path) -> None:
    """A file or errors, never an exception; what is accepted can be answered."""
    for rules in (RULES, LineRules(require_model=False)):
        result = validate(path, rules)
        if isinstance(result, BatchFile):
            with result.closing():
                for request in (result[i] for i in range(len(result))):
                    line = json.loads(unrun_line(request, "batch_1", "code", "message"))
                    assert line["custom_id"] == request.custom_id
        else:
            assert result
            # As they are stored and sent.
            json.dumps([str(error) for error in result], ensure_ascii=False).encode()


JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=6,
)
ENVELOPES = st.fixed_dictionaries(
    {},
    optional={
        "custom_id": st.sampled_from(["a", "b"]) | JSON_VALUES,
        "method": st.just("POST") | JSON_VALUES,
        "url": st.just(CHAT) | JSON_VALUES,
        "body": JSON_VALUES
        | st.fixed_dictionaries(
            {},
            optional={
                "model": st.just(MODEL) | JSON_VALUES,
                "messages": JSON_VALUES,
                "stream": JSON_VALUES,
            },
        ),
    },
)
CHUNKS = (
    st.binary(max_size=30)
    | ENVELOPES.map(lambda value: json.dumps(value).encode())
    | ENVELOPES.map(
        lambda value: json.dumps(value, ensure_ascii=False).encode(
            "utf-8", "surrogatepass"
        )
    )
    | st.sampled_from([make_line(str(i)).encode() for i in range(3)])
)


@st.composite
def mutated_lines(draw: st.DrawFn) -> bytes:
    """A valid line with some bytes replaced."""
    line = bytearray(make_line("id").encode())
    for _ in range(draw(st.integers(0, 3))):
        line[draw(st.integers(0, len(line) - 1))] = draw(st.integers(0, 255))
    return bytes(line)


@settings(
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(CHUNKS | mutated_lines(), max_size=5).map(b"\n".join))
@example(b"\xff\xfe")
@example(b"\0" * 10)
@example(make_line("\ud800").encode())
@example(make_line(body=make_body(model="\ud800")).encode())
@example(make_line(url="\ud800").encode())
@example(make_line(body=make_body(x=float("nan"), y="\ud800")).encode())
def test_no_bytes_make_validation_raise(tmp_path: Path, data: bytes) -> None:
    assert_answered(make_file(tmp_path, data))


@pytest.mark.parametrize("depth", [100, 950, 980, 1000, 100_000])
@pytest.mark.parametrize("key", ["custom_id", "url", "body", "model", "x", "nan"])
def test_no_depth_of_nesting_makes_validation_raise(
    tmp_path: Path, key: str, depth: int
) -> None:
    nested = "[" * depth + "]" * depth
    line = make_line(
        body=make_body(model="MODEL", x="X", y=float("nan") if key == "nan" else 0)
    )
    line = {
        "custom_id": line.replace('"a"', nested),
        "url": line.replace(f'"{CHAT}"', nested),
        "body": line[: line.index('"body": ') + 8] + nested + "}",
        "model": line.replace('"MODEL"', nested),
    }.get(key, line.replace('"X"', nested))
    assert_answered(make_file(tmp_path, [line.replace('"MODEL"', f'"{MODEL}"')]))


def test_validation_holds_positions_not_lines(tmp_path: Path) -> None:
    num_lines = 100_000
    text = "x" * 400  # 50 MB in all
    line = make_line("@@@@@@", text).encode()
    with open(tmp_path / "big.jsonl", "wb") as file:
        for i in range(num_lines):
            file.write(line.replace(b"@@@@@@", b"%06d" % i) + b"\n")
    tracemalloc.start()
    try:
        result = validate(tmp_path / "big.jsonl", RULES)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(result, BatchFile)
    with result.closing():
        assert len(result) == num_lines
        assert result[99_999].custom_id == "099999"
    assert peak < 20_000_000
