"""Waves of requests over HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import make_line, parse_lines
from route_server import Server, error_of

from sglang_batch.job.engine import WAVE_PATH


def test_a_wave_answers_each_request_by_its_index(server: Server) -> None:
    bodies = [{"text": f"prompt {i}"} for i in range(3)]
    answer = server.http.post(WAVE_PATH, json={"requests": bodies})
    assert answer.status_code == 200
    assert int(answer.headers["x-max-inflight"]) > 0
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


def test_a_wave_of_lines_answers_each_by_its_index(server: Server) -> None:
    lines = [json.loads(make_line(f"line-{i}", f"text {i}")) for i in range(3)]
    bad = {
        1: ({**lines[0], "url": "/v1/none"}, "invalid_url"),
        3: ({"custom_id": "a"}, "missing_required_parameter"),
        4: ({**lines[0], "body": {"messages": [], "stream": True}}, "streaming_unsupported"),
    }  # fmt: skip
    wave: list[Any] = [lines[0], bad[1][0], lines[1], bad[3][0], bad[4][0], lines[2]]
    # Ids need not be unique, and a model need not be named.
    del wave[5]["body"]["model"]
    wave[5]["custom_id"] = wave[0]["custom_id"]
    answer = server.http.post(WAVE_PATH, json={"lines": wave})
    assert answer.status_code == 200
    found = {line["index"]: line for line in parse_lines(answer.content)}
    assert sorted(found) == [0, 1, 2, 3, 4, 5]
    for index, (_, code) in bad.items():
        assert found[index]["status_code"] == 400
        assert found[index]["body"]["error"]["code"] == code
    for index in (0, 2, 5):
        assert found[index]["status_code"] == 200
        text = found[index]["body"]["choices"][0]["message"]["content"]
        assert text == wave[index]["body"]["messages"][0]["content"]


def test_a_wave_of_lines_may_be_bad_altogether(bare_server: Server) -> None:
    answer = bare_server.http.post(WAVE_PATH, json={"lines": [{}, {"url": 5}]})
    assert [line["status_code"] for line in parse_lines(answer.content)] == [400, 400]
    answer = bare_server.http.post(WAVE_PATH, json={"lines": [1]})
    assert error_of(answer)["param"] == "lines"
    answer = bare_server.http.post(WAVE_PATH, json={"lines": [], "requests": []})
    assert "not both" in error_of(answer)["message"]
