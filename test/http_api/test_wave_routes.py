"""Waves of requests over HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import parse_lines
from route_server import Server, error_of

from sglang_batch.engine import WAVE_PATH


def test_a_wave_answers_each_request_by_its_index(server: Server) -> None:
    bodies = [{"text": f"prompt {i}"} for i in range(3)]
    answer = server.http.post(WAVE_PATH, json={"requests": bodies})
    assert answer.status_code == 200
    lines = sorted(parse_lines(answer.content), key=lambda line: line["index"])
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert [line["status_code"] for line in lines] == [200] * 3
    texts = [line["body"]["choices"][0]["message"]["content"] for line in lines]
    assert texts == [body["text"] for body in bodies]


@pytest.mark.parametrize(("asked", "given"), [(None, 1001), (-3, -3), (1000, 1000)])
def test_a_wave_goes_before_batches_unless_it_says_so(
    server: Server, asked: int | None, given: int
) -> None:
    body = {"requests": [{"text": "a prompt"}], "priority": asked}
    assert server.http.post(WAVE_PATH, json=body).status_code == 200
    *_, priority = server.engine.priorities.values()
    assert priority == given


def test_a_priority_out_of_range_is_refused(bare_server: Server) -> None:
    answer = bare_server.http.post(WAVE_PATH, json={"requests": [], "priority": 1001})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "priority"


def test_an_empty_wave_has_no_answers(bare_server: Server) -> None:
    answer = bare_server.http.post(WAVE_PATH, json={"requests": []})
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("body", [{}, {"requests": {}}, {"requests": [1]}])
def test_a_wave_that_is_no_list_of_objects_is_refused(
    bare_server: Server, body: dict[str, Any]
) -> None:
    answer = bare_server.http.post(WAVE_PATH, content=json.dumps(body))
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "requests"
