"""Offline answers are those of ``transformers``, token for token, by all doors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import preloaded
import pytest
from batches import client, jsonl, line, results, submit, wait
from forked_children import command
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


# Lines that `vllm run-batch` answers with an error each, and which end it with 0.
BAD_LINES = {
    "model": line("bad-model", {"model": "other", "messages": []}, CHAT),
    "url": line("bad-url", {"messages": []}, "/bad_url"),
    "stream": line("bad-stream", {"messages": [], "stream": "True"}, CHAT),
    "messages": line("bad-messages", {"messages": "hi"}, CHAT),
    "role": line("bad-role", {"messages": [{"role": "cat", "content": "x"}]}, CHAT),
}
NUM_REPEATED = 10
# Endpoints by the names that vLLM has for them. This model can score, but not rerank.
PAIR = {"query": "q", "documents": ["a", "b"]}
SCORED = {"query": "q", "items": ["a"], "label_token_ids": [65], "temperature": 1}
OTHER_NAMES = [
    line("score", SCORED, "/score"),
    line("rerank", PAIR, "/rerank"),
    line("rerank-2", PAIR, "/v2/rerank"),
]


@pytest.fixture(scope="module")
def run_job(
    demo_model: Path, cases: list[Case], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The output of one run of good and bad lines, its summary and its exit status."""
    directory = tmp_path_factory.mktemp("run")
    repeated = input_lines(cases[: 2 * NUM_REPEATED : 2], CHAT)
    lines = [
        *input_lines(cases[::2], CHAT),
        *BAD_LINES.values(),
        *input_lines(cases[1::2], COMPLETIONS),
        *OTHER_NAMES,
        *({**one, "custom_id": f"again-{one['custom_id']}"} for one in repeated),
    ]
    (directory / "in.jsonl").write_bytes(jsonl(lines))
    done = preloaded.run(
        [
            *command("cli_main", "run", "--skip-invalid"),
            *("-i", str(directory / "in.jsonl"), "-o", str(directory / "out.jsonl")),
            *("--model-path", str(demo_model), *SERVER_ARGS),
        ]
    )
    assert done.returncode in (0, 3), done.stderr[-4000:]
    output = (directory / "out.jsonl").read_text().splitlines()
    return {
        "status": done.returncode,
        "stdout": done.stdout,
        "stderr": done.stderr,
        "summary": json.loads(done.stdout.splitlines()[-1]),
        "results": {item["custom_id"]: item for item in map(json.loads, output)},
        "order": [item["custom_id"] for item in lines],
    }


def test_run_command_answers_as_transformers(
    run_job: dict[str, Any], cases: list[Case]
) -> None:
    summary, results = run_job["summary"], run_job["results"]
    assert list(results) == run_job["order"]
    assert_equal([results[case.custom_id] for case in cases], cases)
    # The plan has one prompt per line, and the line that is scored has several.
    most = summary["optimal_cached_share"] + 0.001
    assert 0 < summary["cached_share"] <= most


def test_a_line_that_repeats_another_gets_its_answer(run_job: dict[str, Any]) -> None:
    results = run_job["results"]
    merged = {x: y["merged_with"] for x, y in results.items() if "merged_with" in y}
    assert merged.pop("rerank-2") == "rerank"
    assert len(merged) == NUM_REPEATED
    for name, other in merged.items():
        assert name == f"again-{other}"
        assert results[name]["response"]["body"] == results[other]["response"]["body"]
    summary = run_job["summary"]
    assert summary["merged"] == NUM_REPEATED + 1
    assert 0 < summary["merged_output_tokens"] < summary["output_tokens"]
    assert "merged requests" in run_job["stdout"]


def test_bad_lines_have_an_error_each_and_the_others_their_answers(
    run_job: dict[str, Any], cases: list[Case]
) -> None:
    assert run_job["status"] == 0
    assert run_job["summary"]["completed"] == len(cases) + 1 + NUM_REPEATED
    for bad in BAD_LINES.values():
        result = run_job["results"][bad["custom_id"]]
        assert result["response"]["status_code"] == 400
        assert result["response"]["body"]["error"]["message"]
    for name in ("model", "url", "stream", "messages", "role"):
        assert run_job["results"][f"bad-{name}"]["error"] is not None
    assert run_job["results"]["score"]["response"]["status_code"] == 200
    for name in ("rerank", "rerank-2"):
        result = run_job["results"][name]
        assert result["response"]["status_code"] == 400
        assert result["error"] is None  # it is the model's answer, not the URL's


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
