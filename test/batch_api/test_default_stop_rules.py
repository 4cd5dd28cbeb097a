"""A job's stop rules are added to lines that have none and generate something."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_batch.batch_api.stop_rules import with_stop_rules
from sglang_batch.config import OfflineBatchConfig
from sglang_batch.errors import ConfigError
from sglang_batch.request import BatchRequestInput

CHAT = "/v1/chat/completions"
RULES = '{"json": true}'


def request(body: bytes, url: str = CHAT) -> BatchRequestInput:
    return BatchRequestInput(3, "a", url, body)


def changed(body: bytes, url: str = CHAT) -> bytes:
    [found] = with_stop_rules([request(body, url)], RULES)
    assert (found.index, found.custom_id, found.url) == (3, "a", url)
    return found.body


def test_a_line_gets_the_rules_and_keeps_every_other_byte() -> None:
    body = b'  {"model":  "demo", "seed": 1.0}'
    assert (
        changed(body)
        == b'{"stop_rules": {"json": true}, "model":  "demo", "seed": 1.0}'
    )
    assert json.loads(changed(body)) == {
        **json.loads(body),
        "stop_rules": {"json": True},
    }


@pytest.mark.parametrize(
    ("body", "url"),
    [
        (b'{"model": "demo", "stop_rules": {"regex": "x"}}', CHAT),
        (b'{"model": "demo", "stop_rules": null}', CHAT),
        (b'{"model": "demo", "input": "x"}', "/v1/embeddings"),
        (b'{"model": ', CHAT),
        (b"[1]", CHAT),
        (b"{}", CHAT),
    ],
)
def test_other_lines_stay_as_they_are(body: bytes, url: str) -> None:
    assert changed(body, url) == body


def test_no_rules_are_no_work() -> None:
    requests = [request(b"{}")]
    assert with_stop_rules(requests, None) is requests


@pytest.mark.parametrize(
    "given", [{"json": True}, '{"json": true}', ' {"json":true, "regex": null}']
)
def test_the_setting_is_an_object_or_its_json(given: Any) -> None:
    assert OfflineBatchConfig(stop_rules=given).stop_rules == RULES


def test_a_setting_without_rules_is_none() -> None:
    assert OfflineBatchConfig(stop_rules="{}").stop_rules is None
    given = OfflineBatchConfig.from_json('{"stop_rules": {"json": false}}')
    assert given.stop_rules is None


@pytest.mark.parametrize("given", [{"jsn": True}, "{", '{"regex": "("}', 5])
def test_a_bad_setting_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"stop_rules: .*\.$"):
        OfflineBatchConfig(stop_rules=given)
