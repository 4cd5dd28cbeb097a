"""Inputs that a batch may be made of by mistake, or by malice.

Two kinds: lines that condemn their whole file, and lines that pass its check and ask
an endpoint for nonsense. Both are drawn the same way each time.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterator
from typing import Any

CHAT = "/v1/chat/completions"
MODEL = "demo"

# Bodies that endpoints take; what is wrong with a line is one key of these.
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "Why?", "max_tokens": 2},
    "/v1/responses": {"input": "Why?", "max_output_tokens": 16},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "Why?"}],
        "max_tokens": 2,
    },
    "/v1/embeddings": {"input": "Why?"},
    "/v1/score": {"query": "Why?", "items": ["So", "Not"], "label_token_ids": [65]},
    "/v1/rerank": {"query": "Why?", "documents": ["So", "Not"]},
    "/v1/classify": {"input": "Why?"},
}


class Raw(str):
    """JSON text that stands for itself, where Python has no such value."""


def nested(depth: int) -> Raw:
    return Raw("[" * depth + "]" * depth)


# For any key; what each endpoint makes of them is its own business.
VALUES: list[Any] = [
    *(None, True, "", "x", "\u0000", "\U0001f600\u2028", "9" * 400, "word " * 600),
    *(0, -1, 1.5, -0.001, 3, 129, 2**31, 2**63, -(2**63), 2**70),
    *(Raw("NaN"), Raw("-Infinity"), Raw("1e999"), Raw('"\\ud800"'), nested(60)),
    *([], [None], [[]], [-1], [2**31], [2**63], ["a", 1], [["x"]], {}, {"a": {"b": 1}}),
    *({"": None}, {"type": "x"}, {"5": 1e9}, {"999999": 1}, {"-1": 1}, nested(300)),
]


def _image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def _tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


# For keys whose values have a shape of their own.
_FORMATS: list[Any] = [
    *({"type": "json_schema"}, {"type": "json_object"}, {"type": "x"}, {"type": None}),
    *map(_schema, (None, [], {"type": "x"}, {"$ref": "#/no"}, {"pattern": "("})),
    _schema({"type": "object", "properties": {"a": {"$ref": "#"}}}),
    _schema({"enum": []}),
    {"type": "structural_tag", "structures": [], "triggers": []},
]
_TOOLS = [
    [_tool()],
    [_tool(name="")],
    [_tool(name="a", parameters=[])],
    [_tool(name="a", parameters={"type": "x"})],
    [_tool(name="a", parameters=_schema({"type": "x"}), strict=True)],
    [{"type": "x"}],
    [_tool(name="a")] * 200,
]
_MESSAGES: list[Any] = [
    [{"role": "user"}],
    [{"role": "nobody", "content": "x"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "x", "x": 1}]}],
    [{"role": "tool", "content": "x", "tool_call_id": "none"}],
    [{"role": "assistant", "content": None, "tool_calls": [_tool(name="a")]}],
    [{"role": "assistant", "content": "the last word is mine"}],
    [{"role": "user", "content": "word " * 3000}],
    [{"role": "user", "content": "<|eos|><|end|>\u0000" * 9}],
    [{"role": "user", "content": [_image("data:image/png;base64,!!!")]}],
    [{"role": "user", "content": [_image("data:image/png;base64,iVBORw0K")]}],
    [{"role": "user", "content": [_image("file:///etc/hostname")]}],
    [{"role": "user", "content": [_image("http://127.0.0.1:9/x.png")]}],
    [{"role": "user", "content": [{"type": "input_audio", "input_audio": 1}]}],
]
_PROMPTS: list[Any] = [
    *([[65, 66], []], [[65], "a"], ["a"] * 40, "word " * 3000, [264], [10**9], [[-5]]),
]
SPECIAL: dict[str, list[Any]] = {
    "messages": _MESSAGES,
    "input": [*_PROMPTS, *_MESSAGES],
    "prompt": _PROMPTS,
    "items": [*_PROMPTS, [None]],
    "documents": [[None], [{"text": "a"}], ["word " * 3000]],
    "response_format": _FORMATS,
    "text": [{"format": {"type": "json_schema", "name": "x", "schema": 1}}],
    "tools": _TOOLS,
    "tool_choice": ["required", {"type": "function", "function": {"name": "none"}}],
    "stop": [["a"] * 5000, "\ud7ff", [""], ["x" * 5000]],
    "regex": ["(", "(a+)+$", "[", "\\p{Zz}"],
    "ebnf": ["root ::= root", "root ::= ", "x"],
    "json_schema": ["{", "{}", '{"type": "x"}'],
    "stop_regex": ["(", "(a+)+$"],
    "label_token_ids": [[264], [10**9], [65] * 5000],
    "input_ids": [[264], [10**9], [65] * 5000],
    "custom_logit_processor": ['{"callable": "80"}'],
}


def odd_bodies(
    url: str, keys: list[str], most: int | None, seed: int
) -> Iterator[tuple[str, str]]:
    """(what is wrong, body as JSON) of bodies that are JSON objects.

    Args:
        keys: those that the endpoint knows.
        most: so many, drawn of all; None gives all.
    """
    base = BODIES[url]
    names = dict.fromkeys([*base, *keys, "no_such_key"])
    for fixed in ("model", "stream"):  # what these hold is checked before
        names.pop(fixed, None)
    cases = [
        (name, value)
        for name in names
        for value in (*VALUES, *SPECIAL.get(name, ()))
        # Not checked by SGLang, which takes the memory for so many at once.
        if not (name in ("n", "best_of") and isinstance(value, int) and value > 200)
    ]
    if most is not None and most < len(cases):
        cases = random.Random(seed).sample(cases, most)
    for name, value in cases:
        text = to_json({"model": MODEL, **base, name: value})
        yield f"{name}={to_json(value)[:60]}", text


def to_json(value: Any) -> str:
    """JSON of a value; :class:`Raw` text goes into it as it is."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        pairs = (f"{json.dumps(k)}: {to_json(v)}" for k, v in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(to_json, value)) + "]"
    return json.dumps(value)


def line(custom_id: str, url: str, body: str) -> str:
    """A line of an input file, of a body that is JSON already."""
    return to_json(
        {"custom_id": custom_id, "method": "POST", "url": url, "body": Raw(body)}
    )


def condemned_lines(url: str, most: int, seed: int) -> list[tuple[str, bytes]]:
    """(code, line) of lines that must fail the file they are in."""
    rng = random.Random(seed)
    cases = [*_not_json(url, rng), *_wrong_keys(url), *_wrong_bodies(url)]
    return rng.sample(cases, most) if most < len(cases) else cases


def _good(endpoint: str, **changes: Any) -> dict[str, Any]:
    """A good line but for the changes; no two have one id."""
    body = {"model": MODEL, **BODIES[endpoint]}
    good = {"custom_id": uuid.uuid4().hex, "method": "POST", "url": endpoint}
    return {**good, "body": body, **changes}


_TYPES: list[Any] = [None, 7, True, [], "text", [{}], Raw("NaN")]
_IDS: list[Any] = [None, 7, True, [], {}, "", "x" * 513, Raw('"\\ud800"'), 2**70]
_METHODS: list[Any] = [None, 7, [], "GET", "post", ""]
_MODELS: list[Any] = ["gpt-9", 7, True, [], {}, "", "Demo", "demo ", Raw('"\\ud800"')]


def _not_json(url: str, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    text = json.dumps(_good(url))
    code = "invalid_json_line"
    for _ in range(60):
        yield code, text[: rng.randrange(1, len(text))].encode()
    for _ in range(20):  # no JSON has such a character, in a string or outside
        at = rng.randrange(len(text))
        yield code, (text[:at] + "\x01" + text[at:]).encode()
    for extra in ("}", "]", ",", ",}"):
        yield code, (text + extra).encode()
    for value in ("null", "true", "7", '"text"', "[]", "[{}]", "NaN", "{}{}"):
        yield code, value.encode()
    for data in (text.encode("utf-16"), text.encode() + b"\x00", b"\xff\xfe", b"\x00"):
        yield code, data
    yield code, text.replace("Why?", "\u00e9").encode("latin-1")
    yield code, b"[" * 50_000
    for depth in (2000, 50_000):
        yield code, (text[:-1] + f', "deep": {nested(depth)}}}').encode()


def _wrong_keys(url: str) -> Iterator[tuple[str, bytes]]:
    for key in ("custom_id", "method", "url", "body"):
        rest = {k: v for k, v in _good(url).items() if k != key}
        yield "missing_required_parameter", json.dumps(rest).encode()
    for value in _IDS:
        yield "invalid_request", to_json(_good(url, custom_id=value)).encode()
    for value in _METHODS:
        yield "invalid_method", to_json(_good(url, method=value)).encode()
    other = "/v1/embeddings" if url == CHAT else CHAT
    for value in (
        None,
        7,
        {},
        "",
        other,
        url + "/",
        "v1",
        "x" * 5000,
        Raw('"\\ud800"'),
    ):
        yield "invalid_url", to_json(_good(url, url=value)).encode()


def _wrong_bodies(url: str) -> Iterator[tuple[str, bytes]]:
    base = {"model": MODEL, **BODIES[url]}
    for value in _TYPES:
        yield "invalid_request", to_json(_good(url, body=value)).encode()
    for value in _MODELS:
        body = {**base, "model": value}
        yield "model_not_found", to_json(_good(url, body=body)).encode()
    yield "invalid_request", to_json(_good(url, body={**base, "model": None})).encode()
    streaming = {**base, "stream": True}
    yield "streaming_unsupported", to_json(_good(url, body=streaming)).encode()
