"""Templates: the requests made from rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_batch.errors import ConfigError, InputError
from sglang_batch.inputs.cells import text_of
from sglang_batch.inputs.template import Template


def filled(body: dict[str, Any], **row: Any) -> Any:
    return json.loads(Template(body).fill(row))


def test_a_placeholder_alone_keeps_the_type_and_inside_a_text_becomes_text() -> None:
    body = {
        "max_tokens": "{{n}}",
        "prompt": "Say {{n}} {{ n }} times: {{word}}!",
        "stop": ["{{word}}", "{{none}}"],
        "fixed": {"x": [1, 2.5, None, True, "plain {brace}"]},
    }
    assert filled(body, n=3, word='"}\n\u00e9\u2028', none=None) == {
        "max_tokens": 3,
        "prompt": 'Say 3 3 times: "}\n\u00e9\u2028!',
        "stop": ['"}\n\u00e9\u2028', None],
        "fixed": {"x": [1, 2.5, None, True, "plain {brace}"]},
    }


@pytest.mark.parametrize(
    ("value", "as_json", "as_text"),
    [
        (float("nan"), None, ""),
        (None, None, ""),
        (10**30, 10**30, str(10**30)),
        (True, True, "true"),
        (0.5, 0.5, "0.5"),
        (np.float32(0.1), 0.1, "0.1"),
        (np.float16(0.1), 0.1, "0.1"),
        (np.float32("nan"), None, ""),
        (pandas.NaT, None, ""),
        (pandas.NA, None, ""),
        (np.datetime64("NaT"), None, ""),
        (
            np.datetime64("2024-02-29T01:02", "ns"),
            "2024-02-29T01:02:00",
            "2024-02-29T01:02:00",
        ),
        (
            np.datetime64(1, "ns"),
            "1970-01-01T00:00:00.000000001",
            "1970-01-01T00:00:00.000000001",
        ),
        (np.timedelta64(10**9, "ns"), "0:00:01", "0:00:01"),
        (
            np.array(["2024-02-29", "NaT"], "M8[ns]"),
            ["2024-02-29T00:00:00", None],
            '["2024-02-29T00:00:00", null]',
        ),
        (Decimal("1.10"), "1.10", "1.10"),
        (date(2024, 2, 29), "2024-02-29", "2024-02-29"),
        (datetime(2024, 2, 29, 1, 2), "2024-02-29T01:02:00", "2024-02-29T01:02:00"),
        (time(1, 2), "01:02:00", "01:02:00"),
        (timedelta(hours=1), "1:00:00", "1:00:00"),
        (UUID(int=1), str(UUID(int=1)), str(UUID(int=1))),
        ([1, None], [1, None], "[1, null]"),
        ({"a": Decimal("2"), 3: []}, {"a": "2", "3": []}, '{"a": "2", "3": []}'),
        ("{{other}}", "{{other}}", "{{other}}"),
    ],
)
def test_values_of_all_kinds(value: object, as_json: object, as_text: str) -> None:
    assert filled({"x": "{{v}}", "y": "<{{v}}>"}, v=value) == {
        "x": as_json,
        "y": f"<{as_text}>",
    }


@pytest.mark.parametrize(
    "value", [b"x", [b"x"], float("inf"), np.float32("inf"), object()]
)
@pytest.mark.parametrize("text", ["{{picture}}", "see {{picture}}"])
def test_values_that_json_cannot_hold_are_refused_with_their_column(
    value: object, text: str
) -> None:
    with pytest.raises(InputError, match="column 'picture' holds"):
        filled({"x": text}, picture=value)


PLACEHOLDER = re.compile(r"\{\{(a|b)\}\}")
TEXTS = st.lists(st.sampled_from(["{{a}}", "{{b}}", "}", "{"]) | st.text(max_size=3))
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_infinity=False)
    | st.text(st.characters(codec=None), max_size=5) | st.just("{{a}}"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=5,
)  # fmt: skip
BODIES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | TEXTS.map("".join),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3)
    ),
    max_leaves=6,
)


def without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if value != value else value


def substituted(value: Any, row: dict[str, Any]) -> Any:
    """The expected result, by walking over values instead of joining JSON."""
    if isinstance(value, dict):
        return {key: substituted(item, row) for key, item in value.items()}
    if isinstance(value, list):
        return [substituted(item, row) for item in value]
    if not isinstance(value, str):
        return value
    if whole := PLACEHOLDER.fullmatch(value):
        return without_nan(row[whole[1]])
    return PLACEHOLDER.sub(lambda found: text_of(row[found[1]]), value)


@given(BODIES, VALUES, VALUES)
def test_any_template_with_any_values_is_json_of_the_values(
    part: Any, a: Any, b: Any
) -> None:
    body = {"part": part, "used": "{{a}}"}
    template = Template(body)
    if not template.columns <= {"a", "b"}:
        return  # a string happens to contain another placeholder
    row = {"a": a, "b": b}
    text = template.fill(row)
    assert json.loads(text) == substituted(body, row)
    assert text.isascii() and "\n" not in text


def test_a_tuple_is_a_list() -> None:
    assert filled({"stop": ("{{word}}", "x")}, word="a") == {"stop": ["a", "x"]}


def test_a_template_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "{{q}}"}')
    assert Template.parse(f"@{path}").columns == {"q"}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "{{q}}\nIn one word:"}]},
        ),
        ("/v1/completions", {"prompt": "{{q}}\nIn one word:"}),
        ("/v1/embeddings", {"input": "{{q}}\nIn one word:"}),
    ],
)
def test_text_is_a_prompt(tmp_path: Path, endpoint: str, body: dict[str, Any]) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("{{q}}\nIn one word:\n")
    for text in (f"@{path}", "{{q}}\nIn one word:"):
        assert Template.parse(text, endpoint).body == body


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("cell", "prompt"), [(12, "12"), (0.5, "0.5"), (True, "true"), ("x", "x")]
)
def test_a_number_that_is_a_prompt_is_text(
    endpoint: str, cell: object, prompt: str
) -> None:
    body = json.loads(Template.parse("{{q}}", endpoint).fill({"q": cell}))
    (value,) = body.values()
    assert value == prompt or value == [{"role": "user", "content": prompt}]


def test_numbers_elsewhere_and_other_values_keep_their_type() -> None:
    body = {"input": "{{q}}", "dimensions": "{{q}}", "metadata": {"of": ["{{q}}"]}}
    for cell, text in ((7, "7"), ([1, 2], [1, 2]), (None, None)):
        found = json.loads(Template(body).fill({"q": cell}))
        assert found == {"input": text, "dimensions": cell, "metadata": {"of": [cell]}}


def test_text_that_is_no_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="/v1/rerank takes more than a prompt"):
        Template.parse("{{q}}", "/v1/rerank")
    path = tmp_path / "prompt.txt"
    path.write_text("{{q}}")
    with pytest.raises(ConfigError, match="name it as @"):
        Template.parse(str(path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "--template is not JSON"),
        ('["{{q}}"]', "must be a JSON object"),
        ('{"prompt": "{q}"}', "the template uses no column"),
        ('{"{{q}}": "{{q}}"}', "key '{{q}}' cannot be a column"),
        ("@none.json", "none.json cannot be read: No such file"),
    ],
)
def test_a_bad_template_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        Template.parse(text)


def test_a_prompt_may_begin_with_a_brace_as_its_refusal_says() -> None:
    with pytest.raises(ConfigError) as found:
        Template.parse("{Judge: {{q}}}")
    assert "write {# jinja #} before it" in str(found.value)
    body = json.loads(Template.parse("{# jinja #}{Judge: {{q}}}").fill({"q": "a"}))
    assert body["messages"][0]["content"] == "{Judge: a}"


@pytest.mark.parametrize("write", [lambda path: path.write_bytes(b"\xff")])
def test_a_template_file_that_is_not_utf8_is_refused(
    tmp_path: Path, write: Callable[[Path], object]
) -> None:
    write(tmp_path / "t.json")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        Template.parse(f"@{tmp_path / 't.json'}")


@pytest.mark.parametrize("value", ["\ud83d", np.int64(1), {1, 2}])
def test_a_template_that_cannot_be_json_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="the template cannot be JSON"):
        Template({"prompt": "{{q}}", "user": value})
