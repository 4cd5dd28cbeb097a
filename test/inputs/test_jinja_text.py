"""Strings of a template in Jinja2, and those that stay what they are."""

from __future__ import annotations

import json
import re
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from input_files import contents_of, staged

from sglang_batch.__main__ import main
from sglang_batch.errors import ConfigError, InputError
from sglang_batch.inputs.template import Template
from sglang_batch.lang.streamer import RowLines
from sglang_batch.run.demo_model import write_demo_model


def rendered(text: str, **row: Any) -> str:
    found: str = json.loads(Template({"prompt": text}).fill(row))["prompt"]
    return found


@pytest.mark.parametrize(
    ("text", "row", "expected"),
    [
        ("{% if a %}yes{% else %}no{% endif %} {{ b }}", {"a": 0, "b": 1}, "no 1"),
        ("{# jinja #}\n{{ a | upper }}!", {"a": "é"}, "É!"),
        ("{#-jinja-#} {{ a.b[0] }}", {"a": {"b": ["x"]}}, "x"),
        ("{% for t in a %}{{ loop.index }}/{{ loop.length }} {{ t }}\n{% endfor %}",
         {"a": ["x", "y"]}, "1/2 x\n2/2 y\n"),
        ("{%- for t in a | map('upper') -%} {{ t }} {%- endfor -%}", {"a": "xy"}, "XY"),
        ("{% set n = namespace(i=0) %}{% for t in a %}{% set n.i = n.i + t %}{% endfor %}"
         "{{ n.i }}", {"a": [1, 2]}, "3"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(a) }}", {"a": 1}, "<1>"),
        ("{% if a % 2 %}odd{% endif %}", {"a": 3}, "odd"),
        ("{% raw %}{{ a }} {% if %}{% endraw %}{{ b }}", {"b": 1}, "{{ a }} {% if %}1"),
        # Values are those of {{column}}.
        ("{# jinja #}{{ a }}|{{ b }}|{{ c }}|{{ d }}", {
            "a": None, "b": True, "c": [1, {"x": "é"}], "d": date(2024, 2, 29),
        }, '|true|[1, {"x": "é"}]|2024-02-29'),
        ("{# jinja #}{{ a }} {{ b }} {{ c is none }}",
         {"a": np.float32(0.1), "b": np.array([1, 2]), "c": float("nan")},
         "0.1 [1, 2] true"),
        ("{# jinja #}{{ a | tojson }}", {"a": {"x": "<&'é"}}, '{"x": "<&\'é"}'),
        ("{% if a %}{{ a }}{% endif %}", {"a": "{{ b }} {% if %}"}, "{{ b }} {% if %}"),
        ("{% if a %}\"\\\u2028{{ a }}{% endif %}\n", {"a": "\n\""}, "\"\\\u2028\n\"\n"),
    ],
)  # fmt: skip
def test_a_tag_or_the_mark_makes_a_string_jinja(
    text: str, row: dict[str, Any], expected: str
) -> None:
    template = Template({"prompt": text})
    assert template.columns == set(row)
    assert template.fill(row).isascii()
    assert rendered(text, **row) == expected


@pytest.mark.parametrize(
    ("text", "row", "expected"),
    [
        ("{{a | upper}} {{ b.c }} {{d('e')}}",
         {"a | upper": 1, "b.c": 2, "d('e')": 3}, "1 2 3"),
        ("{{the price}} 5 {% more or 5{%, {#5} or {# if #}", {"the price": 1},
         "1 5 {% more or 5{%, {#5} or {# if #}"),
        ("{% of all %} {%iffy%} {{a}}", {"a": 1}, "{% of all %} {%iffy%} 1"),
        ("{{#fields}}A: {{a}}\n{# x #}{{/fields}}", {"a": 1}, "A: 1\n{# x #}"),
    ],
)  # fmt: skip
def test_every_other_string_stays_what_it_is(
    text: str, row: dict[str, Any], expected: str
) -> None:
    assert Template({"prompt": text}).columns == set(row)
    assert rendered(text, **row) == expected


def test_strings_of_one_body_are_each_for_themselves(tmp_path: Path) -> None:
    content = (
        "{% if hint %}{{ hint }}\n{% endif %}"
        "{{#fields}}{% if maker %}Maker: {{ maker }}{% endif %}\n{{the kind}}{{/fields}}"
    )
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": "{{n}}",
    }
    table = tmp_path / "rows.jsonl"
    rows = [{"hint": "h", "maker": "", "the kind": 1, "n": 3}]
    rows += [{"hint": "", "maker": f"m{i}", "the kind": 2, "n": 4} for i in range(2)]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = staged(tmp_path, table, template=Template(body))
    assert contents_of(found) == ["h\n\n1", "Maker: m0\n2", "Maker: m1\n2"]
    lines = found.path.read_text().splitlines()
    assert [json.loads(line)["body"]["max_tokens"] for line in lines] == [3, 4, 4]


def test_a_prompt_may_begin_with_a_tag_and_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompt.j2"
    path.write_text("{% if a %}{{ b }}{% endif %}\n")
    for text in (f"@{path}", "{% if a %}{{ b }}{% endif %}"):
        template = Template.parse(text, "/v1/completions")
        assert json.loads(template.fill({"a": 1, "b": "x"})) == {"prompt": "x"}
    assert Template.parse("{# jinja #}{{ a | trim }}").columns == {"a"}
    with pytest.raises(
        ConfigError, match=r"\{% for x in a %\} must be inside of a str"
    ):
        Template.parse('{"messages": [{% for x in a %}{}{% endfor %}]}')


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("{{ a }}\n{% if a %}", 2, "Unexpected end of template"),
        ("{% for x in a %}\n\n{{ x.. }}{% endfor %}", 3, "expected name or number"),
        ("{# jinja #}\n{{ a | uper }}", 2, "No filter named 'uper'"),
        ("{{ a }}{{ a is blue }}{% if a %}{% endif %}", 1, "No test named 'blue'"),
        ("{% if a %}{% endif %}{{ a | random }}", 1, "No filter named 'random'"),
        ("{{ a }}{% include 'x' %}", 1, "it cannot name other templates"),
        ("{% from 'x' import y %}{{ a }}", 1, "it cannot name other templates"),
        ("{% fro x in a %}{% endfor %}", 1, "unknown tag 'fro'"),
        ("{% if a %}{{ the price }}{% endif %}", 1, "expected token 'end of print"),
    ],
)  # fmt: skip
def test_mistakes_are_found_before_any_row(text: str, line: int, said: str) -> None:
    with pytest.raises(ConfigError) as found:
        Template({"prompt": text})
    message = str(found.value)
    assert f", line {line}: " in message and said in message, message
    assert "put it between {% raw %} and {% endraw %}." in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "a", "line", "said"),
    [
        ("\n{# jinja #}{{ a.b }}", {}, 2, "has no attribute 'b'; ask `is defined`"),
        ("{# jinja #}{{ a.b.c }}", {}, 1, "has no attribute 'b'"),
        ("{# jinja #}\n\n{{ a.__class__ }}", "x", 3, "use the values of its row alone"),
        ("{# jinja #}{{ a['__class__'].__mro__ }}", "x", 1, "is unsafe"),
        ("{# jinja #}{{ a.append(1) }}", [], 1, "use the values of its row alone"),
        ("{# jinja #}{{ a + 1 }}", "x", 1, "can only concatenate str"),
        ("{# jinja #}{{ a | map('upper') }}", ["x"], 1, "end a chain of filters"),
        ("{% for x in range(10**9) %}{% endfor %}{{ a }}", 1, 1, "Range too big"),
        ("{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}"
         "{{ a }}", 1, 1, "more than 1,000,000 passes"),
        ("{% if a is blue %}{% endif %}", 1, 1, "No test named 'blue'"),
        ("{% for x in range(9000) %}{{ a }}{% endfor %}", "x" * 9000, 1,
         "more than 16,777,216 characters"),
        ("{# jinja #}{{ a * 99999999999 }}", "x", 1, "is too much"),
        ("{# jinja #}{{ 9 ** (9 ** a) }}", 9, 1, "is too much"),
        ("{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(a) }}", 1, 1, "recursion depth"),
        ("{% for x in a %}{% endfor %}", 5, 1, "'int' object is not iterable"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_rendered_says_where_and_why(
    text: str, a: object, line: int, said: str
) -> None:
    template = Template({"prompt": text})
    began = time.monotonic()
    with pytest.raises(InputError) as found:
        template.fill({"a": a})
    assert time.monotonic() - began < 20
    message = str(found.value)
    assert f", line {line}: " in message and said in message, message
    assert len(message) < 400 and "\n" not in message
    assert json.loads(Template({"prompt": "{% if a %}x{% endif %}"}).fill({"a": 1}))


def test_values_that_json_cannot_hold_are_refused_with_their_column() -> None:
    with pytest.raises(InputError, match="column 'a' holds bytes"):
        rendered("{% if a %}{% endif %}", a=b"x")


def test_an_unknown_column_is_told_of_a_file_and_of_a_stream(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    table.write_text("question,b.c\nx,y\n")
    with pytest.raises(
        InputError, match=r"has no column 'answr'; it has 'question', 'b\.c'"
    ):
        staged(
            tmp_path, table, template=Template({"prompt": "{% if answr %}{% endif %}"})
        )
    # A name that looks like an expression: the way out is said.
    hint = "begin the text with {# jinja #}"
    with pytest.raises(InputError, match=re.escape(hint)):
        staged(tmp_path, table, template=Template({"prompt": "{{question | upper}}"}))
    line = RowLines("/v1/completions", "{{question|upper}}").line({"question": "x"}, 0)
    assert hint in line.refused
    staged(tmp_path, table, template=Template({"prompt": "{{b.c}}"}))


@pytest.mark.parametrize("text", ["{% if q %}{{ q.b }}{% endif %}", "{% if q %}"])
def test_the_command_ends_in_one_sentence_before_the_engine(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, table = tmp_path / "model", tmp_path / "rows.jsonl"
    write_demo_model(model)
    table.write_text('{"q": "x"}\n')
    arguments = ["run", "-i", str(table), "-o", str(tmp_path / "out.jsonl")]
    assert main([*arguments, "--template", text, "--model-path", str(model)]) == 2
    said = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert len(said) == 1 and "line 1: " in said[0]
