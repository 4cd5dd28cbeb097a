"""Offline answers are those of ``transformers``, token for token, by all doors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from batches import client, jsonl, line, results, submit, wait
from prompts import MAX_TOKENS, Case
from servers import SERVER_ARGS, Server

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def input_lines(cases: list[Case], url: str) -> list[dict[str, Any]]:
    wish = {"max_tokens": MAX_TOKENS, "return_token_ids": True}
    return [
        line(
            case.custom_id,
            {**wish, "messages": case.messages}
            if url == CHAT
            else {**wish, "prompt": case.prompt},
            url,
        )
        for case in cases
    ]


def output_ids(result: dict[str, Any]) -> list[int]:
    assert result["response"]["status_code"] == 200, result
    choice = result["response"]["body"]["choices"][0]
    # SGLang names them differently per endpoint.
    ids: list[int] = choice.get("token_ids") or choice["response_token_ids"]
    return ids


def assert_equal(results: list[dict[str, Any]], cases: list[Case]) -> None:
    assert [result["custom_id"] for result in results] == [
        case.custom_id for case in cases
    ]
    for result, case in zip(results, cases, strict=True):
        assert output_ids(result) == case.output_ids, case.custom_id


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_batch_api_answers_as_transformers(
    offline_server: Server, cases: list[Case], url: str
) -> None:
    api = client(offline_server.url)
    batch = wait(api, submit(api, jsonl(input_lines(cases, url)), url).id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.failed == 0
    assert_equal(results(api, batch.output_file_id), cases)


def test_run_command_answers_as_transformers(
    demo_model: Path, cases: list[Case], tmp_path: Path
) -> None:
    lines = input_lines(cases[::2], CHAT) + input_lines(cases[1::2], COMPLETIONS)
    (tmp_path / "in.jsonl").write_bytes(jsonl(lines))
    command = [
        *(sys.executable, "-m", "sglang_batch", "run"),
        *("-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")),
        *("--model-path", str(demo_model), *SERVER_ARGS),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["completed"], summary["failed"]) == (len(cases), 0)
    assert summary["output_tokens"] == sum(len(case.output_ids) for case in cases)
    assert 0 < summary["cached_share"] <= summary["optimal_cached_share"]
    found = [
        json.loads(item) for item in (tmp_path / "out.jsonl").read_text().splitlines()
    ]
    assert_equal(found, cases[::2] + cases[1::2])


def test_programs_answer_as_transformers(
    offline_server: Server, cases: list[Case]
) -> None:
    import sglang as sgl

    from sglang_batch.lang import BatchBackend

    @sgl.function
    def answer(s: Any, prompt: str) -> None:
        s += prompt
        s += sgl.gen(
            "answer", max_tokens=MAX_TOKENS, temperature=0, return_logprob=True
        )

    states = answer.run_batch(
        [{"prompt": case.prompt} for case in cases],
        backend=BatchBackend(offline_server.url),
    )
    for state, case in zip(states, cases, strict=True):
        logprobs = state.get_meta_info("answer")["output_token_logprobs"]
        assert [token_id for _, token_id, *_ in logprobs] == case.output_ids
