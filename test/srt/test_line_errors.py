"""Errors of single lines in OpenAI's shape, and the model's name in answers."""

from __future__ import annotations

from typing import Any

from batches import client, jsonl, line, results, submit, wait
from servers import Server

ASK = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {}}}
BAD: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "no answers": ({"n": 0}, "body.n", "integer_below_min_value"),
    "too hot": ({"temperature": 5}, "body.temperature", "decimal_above_max_value"),
    "bias": (
        {"logit_bias": {"5": 1e30}},
        "body.logit_bias",
        "decimal_above_max_value",
    ),
    "template": (
        {"chat_template_kwargs": {"chat_template": "x"}},
        "body.chat_template_kwargs",
        "invalid_value",
    ),
    "tokenizer": (
        {"chat_template_kwargs": {"tokenize": False}},
        "body.chat_template_kwargs",
        "invalid_value",
    ),
    "no parser": (
        {"tools": [TOOL], "tool_choice": "required"},
        "body.tool_choice",
        "invalid_value",
    ),
}


def test_a_bad_line_names_its_field_and_others_the_model(
    offline_server: Server,
) -> None:
    api = client(offline_server.url)
    lines = [line(name, {**ASK, **fields}) for name, (fields, _, _) in BAD.items()]
    lines.append(line("good", {**ASK, "chat_template_kwargs": {"mood": "calm"}}))
    batch = wait(api, submit(api, jsonl(lines)).id)
    [good] = results(api, batch.output_file_id)
    assert good["response"]["body"]["model"] == "demo"
    errors = {
        each["custom_id"]: each["response"]["body"]["error"]
        for each in results(api, batch.error_file_id)
    }
    assert {
        name: (each["type"], each["param"], each["code"])
        for name, each in errors.items()
    } == {
        name: ("invalid_request_error", param, code)
        for name, (_, param, code) in BAD.items()
    }
