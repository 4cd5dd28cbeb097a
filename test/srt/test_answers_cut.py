"""Stop rules on real SGLang: lines of batches, calls, and refusals.

Grammars make the demo model, whose weights are random, write what a rule is to find.
"""

from __future__ import annotations

import json
import re
from typing import Any

import requests
from batches import client, jsonl, line, results, submit, wait
from servers import Server

ASK = {"messages": [{"role": "user", "content": "Why?"}], "max_tokens": 120}
OBJECT = r'\{"n": \[[1-9][0-9]{2}\]\}'
# So many digits that several samples are not equal by chance.
LONG_OBJECT = r'\{"n": \[[1-9][0-9]{40}\]\}'
LINES: dict[str, dict[str, Any]] = {
    "json": {"regex": f"{OBJECT} and [a-z]{{150}}", "stop_rules": {"json": True}},
    # The value ends before the last token's text.
    "number": {"regex": r"-[1-9][0-9]{2}, [a-z]{150}", "stop_rules": {"json": True}},
    "regex": {
        "regex": r"[a-f]{9}END[a-f]{150}",
        "stop_rules": {"regex": "END[a-c]*[d-f]"},
    },
    "loop": {
        "regex": "[0-9]{3}(no, ){50}",
        "stop_rules": {"repetition": {"min_tokens": 20}},
    },
    "several": {
        "regex": f"{LONG_OBJECT} and [a-z]{{150}}", "n": 3, "temperature": 2, "seed": 1,
        "stop_rules": {"json": True},
    },
    "stop string": {
        "regex": f"{OBJECT} and [a-z]{{150}}", "stop": "]", "stop_rules": {"json": True}
    },
    "last token": {
        "regex": f"{OBJECT} and", "max_tokens": 12, "stop_rules": {"json": True}
    },
    "no match": {"regex": "[a-z]{20}", "stop_rules": {"json": True, "regex": "END"}},
    "no rules": {"regex": "[a-z]{20}"},
}  # fmt: skip
BAD: dict[str, Any] = {
    "unknown": {"looping": {}},
    "no pattern": {"regex": "("},
    "empty": {"regex": "x*"},
}


def choices(result: dict[str, Any]) -> list[tuple[str, str, object, int]]:
    """Text, ``finish_reason`` and ``matched_stop`` of each answer, and the output tokens."""
    body = result["response"]["body"]
    return [
        (
            each["message"]["content"],
            each["finish_reason"],
            each["matched_stop"],
            body["usage"]["completion_tokens"],
        )
        for each in body["choices"]
    ]


def test_lines_end_by_their_rules(offline_server: Server) -> None:
    api = client(offline_server.url)
    lines = [line(name, {**ASK, **fields}) for name, fields in LINES.items()]
    lines += [line(name, {**ASK, "stop_rules": rules}) for name, rules in BAD.items()]
    batch = wait(api, submit(api, jsonl(lines)).id)
    found = {each["custom_id"]: each for each in results(api, batch.output_file_id)}
    [(text, reason, matched, tokens)] = choices(found["json"])
    assert re.fullmatch(OBJECT, text)
    assert (reason, matched, tokens) == ("stop", "stop_rules.json", len(text))
    [(text, _, matched, tokens)] = choices(found["number"])
    assert re.fullmatch("-[0-9]{3}", text)
    assert (matched, tokens) == ("stop_rules.json", 5)
    [(text, _, matched, tokens)] = choices(found["regex"])
    assert re.fullmatch("[a-f]{9}END[a-c]*[d-f]", text)
    assert (matched, tokens) == ("stop_rules.regex", len(text))
    [(text, _, matched, tokens)] = choices(found["loop"])
    assert re.fullmatch("[0-9]{3}(no, ){5}", text)
    assert (matched, tokens) == ("stop_rules.repetition", len(text))
    several = choices(found["several"])
    assert len(several) == 3 and len({text for text, *_ in several}) > 1
    assert all(re.fullmatch(LONG_OBJECT, text) for text, *_ in several)
    assert {matched for _, _, matched, _ in several} == {"stop_rules.json"}
    [(text, _, matched, _)] = choices(found["stop string"])
    assert text.startswith('{"n": [') and matched == "]"
    [(text, reason, matched, _)] = choices(found["last token"])
    assert (len(text), reason, matched) == (12, "stop", "stop_rules.json")
    assert choices(found["no match"]) == choices(found["no rules"])
    errors = {
        each["custom_id"]: each["response"]["body"]["error"]
        for each in results(api, batch.error_file_id)
    }
    assert {name: each["param"] for name, each in errors.items()} == dict.fromkeys(
        BAD, "body.stop_rules"
    )
    assert errors["unknown"]["message"] == (
        "stop_rules: there is no rule 'looping'; the rules are json, regex, repetition"
    )


def test_other_endpoints_and_calls(offline_server: Server) -> None:
    api = client(offline_server.url)
    rules = {"json": True}
    prompt = {"prompt": "Why?", "max_tokens": 120}
    batch = wait(
        api,
        submit(
            api,
            jsonl(
                [
                    line(
                        "cut",
                        {**prompt, **LINES["json"]},
                        "/v1/completions",
                    ),
                    line("own", {**prompt, "regex": OBJECT}, "/v1/completions"),
                ]
            ),
            "/v1/completions",
        ).id,
    )
    cut, own = (
        each["response"]["body"]["choices"][0]
        for each in results(api, batch.output_file_id)
    )
    assert (cut["text"], cut["matched_stop"]) == (own["text"], "stop_rules.json")

    wanted = {"regex": LINES["number"]["regex"], "custom_params": {"stop_rules": rules}}
    streamed = api.chat.completions.create(
        model="demo", messages=ASK["messages"], max_tokens=120, stream=True,
        extra_body=wanted,
    )  # fmt: skip
    chunks = list(streamed)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert re.fullmatch("-[0-9]{3}", text)
    assert chunks[-1].choices[0].finish_reason == "stop"

    params = {"max_new_tokens": 120, "regex": LINES["json"]["regex"]}
    native = requests.post(
        f"{offline_server.url}/generate", timeout=60,
        json={
            "text": "Why?",
            "sampling_params": {
                **params, "custom_params": {"stop_rules": json.dumps(rules)}
            },
        },
    ).json()  # fmt: skip
    assert native["meta_info"]["finish_reason"]["stop_rule"] == "json"
    assert re.fullmatch(OBJECT, native["text"])
    refused = requests.post(
        f"{offline_server.url}/generate", timeout=60,
        json={
            "text": "Why?",
            "sampling_params": {**params, "custom_params": {"stop_rules": {"x": 1}}},
        },
    )  # fmt: skip
    assert refused.status_code == 400
    assert "there is no rule 'x'" in refused.text


def test_a_pattern_at_its_limits_fails_its_line_alone(offline_server: Server) -> None:
    api = client(offline_server.url)
    ask = {**ASK, "max_tokens": 1500, "ignore_eos": True, "regex": "[a-z]{1400}"}
    lines = [
        line("complex", {**ask, "stop_rules": {"regex": ".{900}!"}}),
        line("simple", {**ask, "stop_rules": {"regex": "!"}, "max_tokens": 9}),
    ]
    batch = wait(api, submit(api, jsonl(lines)).id)
    [good] = results(api, batch.output_file_id)
    [bad] = results(api, batch.error_file_id)
    assert (good["custom_id"], bad["custom_id"]) == ("simple", "complex")
    assert bad["response"]["status_code"] == 400
    assert (
        "'.{900}!' has too many ways to match"
        in bad["response"]["body"]["error"]["message"]
    )


def test_rules_where_nothing_is_generated(offline_server: Server) -> None:
    api = client(offline_server.url)
    body = {"input": "Why?", "stop_rules": {"json": True}}
    lines = [line("vector", body, "/v1/embeddings")]
    batch = wait(api, submit(api, jsonl(lines), "/v1/embeddings").id)
    [error] = results(api, batch.error_file_id)
    assert error["response"]["body"]["error"]["message"] == (
        "stop_rules: /v1/embeddings generates nothing that could be cut; drop them"
    )
