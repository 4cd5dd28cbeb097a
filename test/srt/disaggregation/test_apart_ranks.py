"""A decode server of two TP ranks with two prefill servers: equal answers."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from apart_servers import apart_servers
from batches import client, jsonl, line, results, submit, wait
from prompts import questions
from servers import Server

NUM_LINES = 60
DECODE_TOKENS = 2560


def _lines() -> list[dict[str, Any]]:
    return [
        line(
            f"line-{i}",
            {
                "messages": [{"role": "user", "content": question}],
                "max_tokens": 8 + 24 * (i % 3),
            },
        )
        for i, question in enumerate(questions(NUM_LINES))
    ]


def _answers(server: Server) -> dict[str, str]:
    api = client(server.url)
    batch = wait(api, submit(api, jsonl(_lines())).id)
    return {
        item["custom_id"]: item["response"]["body"]["choices"][0]["message"]["content"]
        for item in results(api, batch.output_file_id)
    }


def _computed_tokens(server: Server) -> int:
    with urllib.request.urlopen(f"{server.url}/server_info", timeout=10) as answer:
        state = json.load(answer)["internal_states"][0]["offline_batch"]
    return int(state["prefill_tokens"])


def test_two_ranks_and_two_prefill_servers_have_the_answers_of_one_process(
    demo_model: Path,
    offline_server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    wanted = _answers(offline_server)
    assert len(wanted) == NUM_LINES
    with apart_servers(
        demo_model,
        tmp_path,
        "--tp-size=2",
        "--page-size=16",
        # Six ranks start at a time, and each looks at the memory that is left.
        "--mem-fraction-static=0.8",
        decode_args=(f"--max-total-tokens={DECODE_TOKENS}",),
        num_prefill=2,
        policy="length-aligned",
        max_inflight=200,
    ) as servers:
        assert _answers(servers.decode) == wanted
        for server in (servers.prefill, *servers.more_prefill):
            assert _computed_tokens(server) > 0
        assert _computed_tokens(servers.decode) == 0
        for server in (servers.prefill, *servers.more_prefill, servers.decode):
            assert server.process.poll() is None
            assert "Traceback" not in server.log
