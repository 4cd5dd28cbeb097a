"""Bodies are checked by SGLang's request classes before SGLang is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from builders import CHAT

from sglang_batch.batch_api.lines import ModelLimits
from sglang_batch.batch_api.protocol import ENDPOINTS
from sglang_batch.srt.engine.checks.body_checks import (
    body_errors,
    check_native,
    request_classes,
)
from sglang_batch.srt.engine.checks.pattern_checks import check_schema
from sglang_batch.srt.engine.checks.value_checks import (
    SAMPLING_FIELDS,
    FieldError,
    Text,
    check_value,
)

# A body for each endpoint, and one with errors in these fields.
BODIES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "/v1/chat/completions": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "tool", "content": "b", "tool_call_id": "1"},
            ],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "response_format": {"type": "json_object"},
        },
        {"messages": "hi", "n": "many"},
        ["messages", "n"],
    ),
    "/v1/completions": ({"prompt": [1, 2]}, {"prompt": 5}, ["prompt"]),
    "/v1/embeddings": ({"input": ["a"]}, {"input": 1.5}, ["input"]),
    "/v1/responses": (
        {"input": "a", "tools": [{"type": "function", "name": "f"}]},
        {"input": "a", "max_output_tokens": "x"},
        ["max_output_tokens"],
    ),
    "/v1/messages": (
        {
            "model": "m",
            "max_tokens": 1,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        },
        {"model": "m", "max_tokens": 1, "messages": 1},
        ["messages"],
    ),
    "/v1/score": ({"query": "a", "items": ["b"]}, {"items": 1}, ["items"]),
    "/v1/rerank": ({"query": "a", "documents": ["b"]}, {"query": 1}, ["query"]),
    "/v1/classify": ({"input": "a"}, {"input": None}, ["input"]),
    "/v1/audio/transcriptions": (
        {"file_url": "https://sounds.example.com/1.wav", "language": "en"},
        {"file_url": 1, "response_format": "srt", "stream": True},
        ["file_url", "response_format", "stream"],
    ),
}
CHECK = """
import json, sys
from sglang_batch.batch_api.protocol import ENDPOINTS
from sglang_batch.srt.engine.checks.body_checks import body_errors, request_classes
from sglang_batch.srt.engine.checks.value_checks import FieldError

cases = json.load(sys.stdin)
assert set(cases) == set(ENDPOINTS)
found = {
    url: [body_errors(url, json.dumps(body).encode()) for body in bodies]
    for url, (*bodies, _) in cases.items()
}
loaded = [name for name in sys.modules if name.partition(".")[0] in ("sglang", "torch")]
print(json.dumps([found, loaded]))
"""


@pytest.fixture(scope="module")
def found() -> Any:
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        input=json.dumps(BODIES),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("url", BODIES)
def test_each_endpoint_has_its_rules(found: Any, url: str) -> None:
    good, bad = found[0][url]
    assert good == []
    params = {param.removeprefix("body.").split(".")[0] for _, param in bad}
    assert params >= set(BODIES[url][2])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", "0"), ("n", "100000"), ("temperature", "5"), ("temperature", "-1"),
        ("temperature", "NaN"), ("temperature", "1e999"), ("top_p", "0"),
        ("max_tokens", "-1"), ("seed", "1e30"), ("user", '"\\ud800"'),
        ("top_k", "1" * 5000), ("logit_bias", '{"": 1}'), ("logit_bias", '{"-1": 1}'),
        ("logit_bias", '{"1": 1e30}'), ("stop_token_ids", "[-1]"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_sampled_with_are_found(field: str, value: str) -> None:
    body = f'{{"messages": [], "{field}": {value}}}'.encode()
    [(message, param)] = body_errors(CHAT, body)
    assert param in (f"body.{field}", "body"), message


@pytest.mark.parametrize(
    ("url", "fields", "param"),
    [
        (CHAT, {"max_tokens": 100}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 100}, "max_completion_tokens"),
        (CHAT, {"min_tokens": 100}, "min_tokens"),
        (CHAT, {"stop_token_ids": [5, 300]}, "stop_token_ids"),
        (CHAT, {"logit_bias": {"300": 1}}, "logit_bias"),
        (CHAT, {"logprobs": True, "top_logprobs": 301}, "top_logprobs"),
        (CHAT, {"lora_path": "de"}, "lora_path"),
        (CHAT, {"model": "m:de"}, "lora_path"),
        ("/v1/completions", {"prompt": [1, 300]}, "prompt"),
        ("/v1/completions", {"prompt": [[1], [300]]}, "prompt"),
        ("/v1/completions", {"max_tokens": 100}, "max_tokens"),
        ("/v1/embeddings", {"input": [300]}, "input"),
        ("/v1/score", {"label_token_ids": [5, 300]}, "label_token_ids"),
        ("/v1/responses", {"max_output_tokens": 100}, "max_output_tokens"),
        ("/v1/messages", {"max_tokens": 100}, "max_tokens"),
    ],
)
def test_what_this_model_cannot_do_is_found(
    url: str, fields: dict[str, Any], param: str
) -> None:
    body = json.dumps({**BODIES[url][0], **fields}).encode()
    assert body_errors(url, body) == []
    limits = ModelLimits("m", 100, 300, frozenset({"fr"}))
    [(message, where)] = body_errors(url, body, limits=limits)
    assert where == f"body.{param}", message
    text = body.replace(b"100", b"99").replace(b"30", b"29").replace(b"de", b"fr")
    assert body_errors(url, text, limits=limits) == []


@pytest.mark.parametrize("url", BODIES)
def test_a_body_need_not_name_a_model(url: str) -> None:
    body = {**BODIES[url][0]}
    body.pop("model", None)
    assert body_errors(url, json.dumps(body).encode()) == []
    assert body_errors(url, json.dumps({**body, "model": None}).encode()) == []


def test_neither_torch_nor_sglang_stays_imported(found: Any) -> None:
    assert found[1] == []


def test_stop_rules_are_checked_without_an_engine() -> None:
    def errors(url: str, **body: Any) -> list[tuple[str, str | None]]:
        return body_errors(url, json.dumps(body).encode())

    good = {"messages": [{"role": "user", "content": "a"}]}
    url = "/v1/chat/completions"
    assert errors(url, **good, stop_rules={"json": True}) == []
    [(message, param)] = errors(url, **good, stop_rules={"regex": "a|("})
    assert param == "body.stop_rules"
    assert message == (
        "stop_rules: regex 'a|(' is not a regular expression (unclosed group)"
    )
    found = errors(url, messages=1, stop_rules={"x": 1})
    assert {param for _, param in found} == {"body.messages", "body.stop_rules"}
    assert errors("/v1/embeddings", input="a", stop_rules={"json": True}) == [
        (
            "stop_rules: /v1/embeddings generates nothing that could be cut; drop them",
            "body.stop_rules",
        )
    ]


EMPTY = ["", [""], ["", "x"], ["x", ""]]
# Fields whose empty or zero value would end each answer at once, or never.
LITERAL: dict[str, dict[str, list[Any]]] = {
    "/v1/chat/completions": {
        "stop": EMPTY,
        "stop_regex": [*EMPTY, "a*", "$", "x|"],
        "top_k": [0],
        "max_tokens": [0],
        "max_completion_tokens": [0],
    },
    "/v1/completions": {
        "stop": EMPTY,
        "stop_regex": [*EMPTY, "(a|)"],
        "top_k": [0],
    },
    "/v1/responses": {"stop": EMPTY, "top_k": [0], "max_output_tokens": [0]},
    "/v1/messages": {
        "stop_sequences": [[""], ["x", ""]],
        "top_k": [0],
        "max_tokens": [0],
    },
}
# Empty values that mean none, or what they say.
NONE: dict[str, dict[str, list[Any]]] = {
    "/v1/chat/completions": {
        "stop": [None, [], "x", ["x"], " ", "\n"],
        "stop_regex": [None, [], "a+", "\\n"],
        "stop_token_ids": [[]],
        "top_k": [-1, 1],
        "max_tokens": [1, None],
        "temperature": [0],
        "logit_bias": [{}],
        "tools": [[]],
        "min_p": [0],
        "top_logprobs": [0],
    },
    "/v1/completions": {"max_tokens": [1], "stop": [[]], "logprobs": [0]},
    "/v1/messages": {"stop_sequences": [None, [], ["x"]]},
}


def each_of(table: dict[str, dict[str, list[Any]]]) -> list[tuple[str, str, Any]]:
    return [
        (url, name, value)
        for url, fields in table.items()
        for name, values in fields.items()
        for value in values
    ]


def errors_with(url: str, name: str, value: Any) -> list[str | None]:
    body = {**BODIES[url][0], name: value}
    return [param for _, param in body_errors(url, json.dumps(body).encode())]


@pytest.mark.parametrize(("url", "name", "value"), each_of(LITERAL))
def test_an_empty_value_that_nobody_means_is_refused(
    url: str, name: str, value: Any
) -> None:
    assert errors_with(url, name, value) == [f"body.{name}"]


@pytest.mark.parametrize(("url", "name", "value"), each_of(NONE))
def test_an_empty_value_that_means_none_is_taken(
    url: str, name: str, value: Any
) -> None:
    assert errors_with(url, name, value) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [*[("stop", each) for each in EMPTY], ("stop_regex", "a*"), ("top_k", 0)],
)
@pytest.mark.parametrize("many", [False, True])
def test_an_empty_value_of_a_native_line_is_refused(
    name: str, value: Any, many: bool
) -> None:
    params: Any = {"max_new_tokens": 0, name: value}
    with pytest.raises(FieldError) as found:
        check_native({"sampling_params": [params] if many else params})
    assert found.value.param == f"body.sampling_params.{name}"
    check_native({"sampling_params": {"max_new_tokens": 0, "stop": []}})


@pytest.mark.parametrize("url", BODIES)
def test_a_null_is_as_if_absent(url: str) -> None:
    """Every field of a body that need not be given."""
    good, _, _ = BODIES[url]
    names = set(request_classes()[url].model_fields) - set(good)
    optional = {
        name
        for name in names
        if not request_classes()[url].model_fields[name].is_required()
    }
    assert optional
    assert body_errors(url, json.dumps(good | dict.fromkeys(optional)).encode()) == []


TOOL_F = {"type": "function", "function": {"name": "f"}}
CHOICE_F = TOOL_F
USER = {"role": "user", "content": "a"}
TOOL = {"name": "f", "input_schema": {"type": "object"}, "strict": None}


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (
            "/v1/responses",
            {
                "input": "a",
                "tools": [{"type": "function", "name": "f", "strict": None}],
            },
        ),
        (
            "/v1/messages",
            {
                "messages": [USER],
                "max_tokens": 1,
                "tools": [TOOL],
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": None},
            },
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{**USER, "name": None}],
                "tools": [
                    {"type": "function", "function": {"name": "f", "strict": None}}
                ],
                "stream_options": {"include_usage": None},
            },
        ),
    ],
)
def test_a_null_within_a_field_is_as_if_absent(url: str, body: dict[str, Any]) -> None:
    assert body_errors(url, json.dumps(body).encode()) == []


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": {}}, "response_format: it has no type"),
        (
            {"response_format": {"json_schema": {"name": "a"}}},
            "it has no type, such as",
        ),
        (
            {"tool_choice": {"function": {"name": "g"}}},
            "'g' is none of the tools ['f']",
        ),
    ],
)
def test_what_is_missing_is_blamed(fields: dict[str, Any], said: str) -> None:
    body = {"messages": [USER], "tools": [TOOL_F], **fields}
    ((message, param),) = body_errors(CHAT, json.dumps(body).encode())
    assert said in message
    assert param in ("body.response_format", "body.tool_choice")
    body = {"messages": [USER], "tools": [TOOL_F], "tool_choice": CHOICE_F}
    assert body_errors(CHAT, json.dumps(body).encode()) == []


@pytest.mark.parametrize(
    ("url", "tools", "choice"),
    [
        (CHAT, TOOL_F, {"type": "function", "function": {"name": "f"}}),
        (
            "/v1/responses",
            {"type": "function", "name": "f", "parameters": {}},
            {"type": "function", "name": "f"},
        ),
        (
            "/v1/messages",
            {"name": "f", "input_schema": {"type": "object"}},
            {"type": "tool", "name": "f"},
        ),
    ],
)
def test_a_tool_that_must_be_called_is_there(
    url: str, tools: dict[str, Any], choice: dict[str, Any]
) -> None:
    body = {**BODIES[url][0], "tools": [tools], "tool_choice": choice}
    assert body_errors(url, json.dumps(body).encode()) == []
    named = json.dumps({**body, "tools": []}).encode()
    [(message, param)] = body_errors(url, named)
    assert "'f' is none of the tools []" in message
    assert param == "body.tool_choice"
    body["tool_choice"] = {"type": "auto" if url.endswith("messages") else "web_search"}
    if url != CHAT:  # tools of the server are not in the request
        assert body_errors(url, json.dumps({**body, "tools": []}).encode()) == []


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": None}, "content"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": 5}, "content"),
        ({"role": "user", "content": [{"type": "text"}]}, "content.0.text"),
        ({"role": "user", "content": [{"type": "tixt", "text": ""}]}, "content.0.type"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "content.0.image_url.url",
        ),
        ({"role": "tool", "content": 5}, "content"),
        ({"role": "usr", "content": "a"}, "role"),
        ({"content": "a"}, "role"),
    ],
)
def test_an_error_names_the_part_of_a_message_that_is_wrong(
    message: dict[str, Any], param: str
) -> None:
    body = {"messages": [USER, message]}
    ((text, where),) = body_errors(CHAT, json.dumps(body).encode())
    assert where == f"body.messages.1.{param}"
    assert where in text
    if param == "role" and "role" in message:
        assert "'system'" in text and "'user'" in text


@pytest.mark.parametrize("field", ["max_completion_tokens", "max_tokens"])
def test_a_wrong_number_is_named_as_it_was_sent(field: str) -> None:
    error = FieldError("max_new_tokens", "it is below 0").as_sent({field: -1})
    assert (error.param, str(error)) == (f"body.{field}", f"{field}: it is below 0")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "a", "max_output_tokens": 0}, "body.max_output_tokens"),
        ({"input": "a", "metadata": {"a": 1}}, "body.metadata"),
    ],
)
def test_what_a_response_repeats_is_checked(body: dict[str, Any], param: str) -> None:
    errors = body_errors("/v1/responses", json.dumps(body).encode())
    assert [where for _, where in errors] == [param]


@pytest.mark.parametrize(
    ("max_tokens", "ok"), [(0, True), (1, True), (-1, False), (False, False)]
)
def test_a_completion_may_have_no_tokens(max_tokens: object, ok: bool) -> None:
    body = {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    assert (body_errors("/v1/completions", json.dumps(body).encode()) == []) is ok


WIDE = [
    r"^[^\n]{1,200}$",
    r"^[^\n]{200}$",
    r"^[^\n]{129,}$",
    r"^.{1,129}$",
    r"^\S{1,150}$",
    r"^\s{1,150}$",
    r"^(ab|[^x]){1,200}$",
    r'^["a]{1,150}$',
    r"^[!-~]{1,150}$",
    r"^([^\n]{1,20}){1,20}$",
    r"^([^\n]{1,10}){1,10}$",
    r"^(?:(.){2,8})*x(.{1,8}){8}$",
    r"^([^\n]){150}$",
    r"^[^\n]{1,120}[^\n]{1,120}[^\n]{1,120}[^\n]{1,120}[^\n]{1,120}$",
]
NARROW = [
    r"^[^\n]{1,100}$",
    r"^[a-z ]{1,1000}$",
    r"^\w{1,500}$",
    r"^([^,]{1,30},){1,4}$",
    r"^([^\n]{1,5}){1,5}$",
    r"^[^\n]*$",
    "(",
    "a+",
]


@pytest.mark.parametrize("pattern", [*WIDE, *NARROW])
@pytest.mark.parametrize("place", ["pattern", "patternProperties", "tag"])
def test_a_pattern_whose_answers_would_be_no_json_is_refused(
    pattern: str, place: str
) -> None:
    schema: dict[str, Any] = {"type": "string", "pattern": pattern}
    if place == "patternProperties":
        schema = {"type": "object", "patternProperties": {pattern: {"type": "string"}}}
    elif place == "tag":
        content = {"type": "json_schema", "json_schema": {"items": [schema]}}
        schema = {"type": "structural_tag", "format": content}
    problem = check_schema(json.dumps(schema))
    assert (problem is not None) == (pattern in WIDE)
    assert problem is None or "maxLength" in problem


@pytest.mark.parametrize("name", ["json_schema", "structural_tag"])
def test_such_a_pattern_is_refused_in_a_request(name: str) -> None:
    assert SAMPLING_FIELDS[name] == Text(check_schema)
    schema = json.dumps({"type": "string", "pattern": WIDE[0]})
    with pytest.raises(FieldError):
        check_value(name, schema, SAMPLING_FIELDS[name])


BARE = [
    r"^\t$",
    r"\t+",
    r"^[\t]$",
    r'^"a"$',
    r'a"',
    r'^(?:"|\\)+$',
    r'^(a"|b\t)+c$',
    r"^\0$",
    # As JavaScript writes it.
    r"^[^]$",
    r"^a[^]b$",
    r"^\u{9}$",
    r"^\cI$",
    r"^(?<tab>\t)$",
    r"^[\w-.]?[^]{1,200}$",
]
PLAIN = [
    r'^a(?:"b)?$',
    r'^(a|")$',
    r'^[a"]$',
    r"^[\s\S]*$",
    r"^(?<year>[0-9]{4})$",
    r"^\u{41}$",
    r"^[\w-.]+@[\w-.]{1,100}$",
    r"^\p{L}+$",
]


@pytest.mark.parametrize("pattern", [*BARE, *PLAIN])
@pytest.mark.parametrize("name", ["pattern", "propertyNames"])
def test_a_pattern_of_characters_to_escape_is_refused(pattern: str, name: str) -> None:
    """xgrammar would take it for JSON text."""
    schema: dict[str, Any] = {"type": "string", "pattern": pattern}
    if name == "propertyNames":
        schema = {"type": "object", "propertyNames": {"pattern": pattern}}
    assert (check_schema(json.dumps(schema)) is not None) == (pattern in BARE)


@pytest.mark.parametrize(
    ("name", "refused"),
    [("json-pointer", True), ("relative-json-pointer", True), ("date-time", False)],
)
def test_a_format_with_bare_quotes_is_refused(name: str, refused: bool) -> None:
    schema = {"properties": {"format": {"type": "string", "format": name}}}
    assert (check_schema(json.dumps(schema)) is not None) == refused


REF = {"$ref": "#/$defs/b"}


@pytest.mark.parametrize(
    ("schema", "loops"),
    [
        ({"$ref": "#"}, True),
        ({"allOf": [{"$ref": "#"}]}, True),
        ({"$ref": "#/$defs/a", "$defs": {"a": REF, "b": {"$ref": "#/$defs/a"}}}, True),
        ({"properties": {"a": REF}, "$defs": {"b": REF}}, True),
        ({"properties": {"a": {"$ref": "#"}}}, False),
        ({"anyOf": [{"$ref": "#"}, {"type": "string"}]}, False),
        ({"$ref": "#/none"}, False),
        ({"allOf": [REF, REF], "$defs": {"b": {"type": "string"}}}, False),
        ({"enum": [f"x{i}" for i in range(10_000)]}, False),
        ([], False),
    ],
)
def test_a_schema_that_only_refers_to_itself_is_refused(
    schema: Any, loops: bool
) -> None:
    problem = check_schema(json.dumps(schema))
    assert (problem is not None) == loops


@pytest.mark.parametrize("url", [url for url in ENDPOINTS if url != "/v1/score"])
def test_a_null_in_place_of_a_prompt_is_named_as_one(url: str) -> None:
    """OpenAI has ``expected a string, but got null``; ``Field required`` would not help."""
    prompt = ENDPOINTS[url].required[0]
    body = {**BODIES[url][0], "max_tokens": 1, prompt: None}
    ((message, param),) = body_errors(url, json.dumps(body).encode())
    assert param == f"body.{prompt}"
    kind = "list" if prompt in ("messages", "documents") else "string"
    wanted = f"it is null. Input should be a valid {kind}"
    assert message.startswith(f"Invalid value for 'body.{prompt}': {wanted}")
