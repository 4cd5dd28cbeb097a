"""Mistakes of templates are found before SGLang is imported, with the field and a reason."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from builders import make_file

from sglang_batch.__main__ import main
from sglang_batch.errors import SGLangBatchError
from sglang_batch.inputs.job_input import JobInput, input_sources
from sglang_batch.inputs.staging import Staging, check_template
from sglang_batch.inputs.template import Template
from sglang_batch.run.prepare import line_rules
from sglang_batch.srt.engine.checks import grammar_checks

USER = {"role": "user", "content": "Judge: {{text}}"}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


def with_schema(schema: Any) -> dict[str, Any]:
    form = {"name": "answer", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


def with_property(schema: Any) -> dict[str, Any]:
    return with_schema({"type": "object", "properties": {"a": schema}})


def with_content(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "user": "{{text}}"}


# Fields of a body, and a part of the message.
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "type of response_format": (
        {"response_format": {"type": "json"}},
        "response_format.type': Input should be 'text', 'json_object' or 'json_schema'",
    ),
    "response_format as text": (
        {"response_format": "json"},
        "response_format: it must be an object",
    ),
    "schema as a number": (
        {"response_format": {"type": "json_schema", "schema": 5}},
        "and so must its schema",
    ),
    "no schema": (
        {"response_format": {"type": "json_schema"}},
        "response_format: it has no schema, which belongs in json_schema.schema",
    ),
    "schema without its name": (
        {"response_format": {"type": "json_schema", "json_schema": {"type": "object"}}},
        "body.response_format.json_schema.name",
    ),
    "schema as text": (with_schema('{"type": "object"}'), "a valid dictionary"),
    "unknown type": (with_schema({"type": "objct"}), 'Unsupported type "objct"'),
    "unknown type inside": (with_property({"type": "strng"}), '"strng"'),
    "reference to nowhere": (
        with_property({"$ref": "#/$defs/x"}),
        "Cannot find field $defs in #/$defs/x",
    ),
    "reference to another file": (
        with_property({"$ref": "other.json"}),
        "$ref 'other.json' leads out of the schema",
    ),
    "properties as a list": (
        with_schema({"type": "object", "properties": ["a"]}),
        "properties must be an object",
    ),
    "required as text": (
        with_schema({"type": "object", "required": "a"}),
        "required must be an array",
    ),
    "no value of an enum": (
        with_property({"enum": []}),
        "enum array must not be empty",
    ),
    "limits the wrong way": (
        with_property({"type": "array", "minItems": 5, "maxItems": 2}),
        "minItems is greater than maxItems: 5 > 2",
    ),
    "pattern": (
        with_property({"type": "string", "pattern": "a("}),
        "The parenthesis is not closed",
    ),
    "keyword that would be ignored": (
        with_property({"type": "integer", "multipleOf": 5}),
        "multipleOf would be ignored",
    ),
    "format": (
        with_property({"type": "string", "format": "phone"}),
        "string format 'phone' is not implemented",
    ),
    "structural tag": (
        {
            "response_format": {
                "type": "structural_tag",
                "triggers": ["<a>"],
                "structures": [
                    {"begin": "<a>", "end": "</a>", "schema": {"type": "objct"}}
                ],
            }
        },
        'Unsupported type "objct"',
    ),
    "regex": ({"regex": "a("}, "regex: Regex parsing error"),
    "regex with a backreference": ({"regex": r"(a)\1"}, "Backreference"),
    "grammar without a root": ({"ebnf": 'rot ::= "a"'}, 'name "root" is not found'),
    "two grammars": (
        {"regex": "a", "response_format": {"type": "json_object"}},
        "an answer has one grammar",
    ),
    "no messages": ({"messages": [], "user": "{{text}}"}, "messages: there are none"),
    "misspelt field": ({"temperture": 0}, "Did you mean 'temperature'?"),
    "field of SGLang's own API": ({"max_new_tokens": 5}, "Did you mean 'max_tokens'?"),
    "budget of SGLang's own API": (
        {"max_thinking_tokens": 5},
        "Did you mean 'custom_params.thinking_budget'?",
    ),
    "text for a number": ({"temperature": "hot"}, "body.temperature"),
    "limits of tokens": (
        {"min_tokens": 5, "max_tokens": 4},
        "min_tokens: 5 is more than the limit, 4",
    ),
    "stop strings": ({"stop": ["a", 5]}, "body.stop.1"),
    "number of logprobs": (
        {"logprobs": True, "top_logprobs": -1},
        "top_logprobs: -1 is not from 0",
    ),
    "logprobs that are not asked for": ({"top_logprobs": 5}, "without logprobs: true"),
    "word in logit_bias": ({"logit_bias": {"yes": 5}}, "'yes' is not a token id"),
    "role": ({"messages": [{**USER, "role": "usr"}]}, "body.messages.0.role"),
    "part of a message": (
        with_content([{"type": "txt", "text": ""}]),
        ".content.0.type",
    ),
    "no content": ({"messages": [{"role": "user", "text": "{{text}}"}]}, "0.content"),
    "column": ({"messages": [{**USER, "content": "{{txt}}"}]}, "no column 'txt'"),
    "tool without its function": ({"tools": [FUNCTION]}, "body.tools.0.function"),
}
# Left alone are fields of OpenAI and other servers that SGLang ignores, and good ones.
GOOD: list[dict[str, Any]] = [
    {
        "speed": "fast",
        "model": "m",
        "models": ["m"],
        "typical_p": 0.9,
        "guided_json": {},
    },
    {"store": True, "service_tier": "flex", "verbosity": "low", "metadata": {"a": "b"}},
    with_property({"$ref": "#/$defs/x"} | {"$defs": {}})
    | with_schema(
        {
            "$defs": {"x": {"type": "string"}},
            "properties": {"$ref": {"$ref": "#/$defs/x"}},
        }
    ),
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {
        "logprobs": True,
        "top_logprobs": 5,
        "stop": ["a"],
        "min_tokens": 1,
        "max_tokens": 1,
    },
    {"response_format": {"type": "json_object"}},
]


def stage(tmp_path: Path, fields: dict[str, Any], **options: Any) -> None:
    """Make requests of the first rows with the fields, and check them as a run does."""
    table = tmp_path / "reviews.csv"
    table.write_text("id,text\n1,good\n2,bad\n3,dear\n")
    template = Template.parse(json.dumps({"messages": [USER], **fields}))
    job_input = JobInput(input_sources([str(table)]), template=template)
    known = argparse.Namespace(model_path="m", **options)
    check_template(job_input, line_rules(known))
    Staging(tmp_path).stage(job_input)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_on_the_first_rows(tmp_path: Path, name: str) -> None:
    fields, said = MISTAKES[name]
    with pytest.raises(SGLangBatchError) as found:
        stage(tmp_path, fields)
    assert said in str(found.value)
    assert "\n" not in str(found.value)  # not one for each row
    assert not (tmp_path / "input.jsonl").exists()


@pytest.mark.parametrize("fields", [{"temperature": "hot"}, {"max_tokens": 2048}])
@pytest.mark.parametrize("command", ["run -o out", "run -o out --dry-run", "plan"])
def test_every_command_tells_it_once(
    tmp_path: Path,
    command: str,
    fields: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make_file(tmp_path, ["text", "good", "bad"], "in.csv")
    make_file(tmp_path, b'{"max_position_embeddings": 2048}', "config.json")
    body = json.dumps({"messages": [USER], **fields})
    options = ["-i", "in.csv", "--model-path", ".", "--template", body]
    assert main([*command.split(), *options]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: the template makes no valid request for --url")


@pytest.mark.parametrize("fields", GOOD)
def test_a_good_template_is_taken(tmp_path: Path, fields: dict[str, Any]) -> None:
    stage(tmp_path, fields)


def test_grammars_of_another_backend_are_left_to_it(tmp_path: Path) -> None:
    stage(tmp_path, MISTAKES["regex"][0], grammar_backend="llguidance")


def test_a_mistake_of_one_row_is_not_the_templates(tmp_path: Path) -> None:
    fields = {"messages": [{"role": "user", "content": "{{text}}"}], "stop": "{{text}}"}
    table = tmp_path / "rows.csv"
    table.write_text("text\nx\n\nz\n")
    job_input = JobInput(
        input_sources([str(table)]), template=Template.parse(json.dumps(fields))
    )
    known = argparse.Namespace(model_path="m")
    check_template(job_input, line_rules(known))
    Staging(tmp_path).stage(job_input)
    assert (tmp_path / "input.jsonl").exists()


def test_of_many_grammars_some_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "MOST_COMPILED", 1)
    assert grammar_checks.grammar_fault("regex", "a(") is not None
    for others in "bcd":
        assert grammar_checks.grammar_fault("regex", f"{others}(") is None
    assert grammar_checks.grammar_fault("regex", "a(") is not None
    assert len(grammar_checks.FAULTS) == 1


def test_a_grammar_that_takes_long_is_left_to_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_checks, "COMPILE_S", 0.001)
    assert grammar_checks.grammar_fault("regex", "a(") is None


@pytest.fixture(autouse=True)
def compiles() -> None:
    grammar_checks.FAULTS.clear()
