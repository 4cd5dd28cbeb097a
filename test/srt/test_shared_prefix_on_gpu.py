"""A whole server on a GPU whose decodes share prefixes; needs an accelerator."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
import torch
from batches import client, jsonl, line, results, submit, wait
from prompts import MAX_TOKENS, Case
from servers import server

from sglang_batch.demo_model import write_demo_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("accelerator")]

EAGER = "--disable-cuda-graph"
# In float32 greedy tokens can be compared; SGLang's Triton backend computes it.
EXACT = ("--attention-backend=triton", "--dtype=float32")
ENGINES: dict[str, tuple[str, tuple[str, ...]]] = {
    "graphs": ("triton", EXACT),
    "fa3": ("triton", ("--dtype=bfloat16", "--attention-backend=fa3")),
    "beside-flashinfer": (
        "triton",
        ("--dtype=bfloat16", "--attention-backend=flashinfer"),
    ),
    "named": ("auto", ("--dtype=bfloat16", "--attention-backend=shared_prefix")),
    "eager": ("triton", (*EXACT, EAGER)),
    "torch": ("torch", (*EXACT, EAGER)),
    "chosen": ("auto", ("--dtype=bfloat16",)),
    "flashinfer": ("flashinfer", ("--dtype=bfloat16", EAGER)),
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_batch_on_a_gpu(
    name: str, demo_model: Path, cases: list[Case], tmp_path: Path
) -> None:
    attention, arguments = ENGINES[name]
    if name == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention 3 is for Hopper")
    exact = "--dtype=float32" in arguments
    model = demo_model
    if not exact:  # SGLang's backends for 16 bits want wider heads
        model = tmp_path / "model"
        write_demo_model(model, hidden_size=256, head_dim=64)
    config = json.dumps({"attention": attention})
    lines = [
        line(
            case.custom_id,
            {"max_tokens": MAX_TOKENS, "return_token_ids": True, "prompt": case.prompt},
            "/v1/completions",
        )
        for case in cases
    ]
    with server(
        model,
        "--offline-batch",
        f"--offline-batch-dir={tmp_path / 'batches'}",
        f"--offline-batch-config={config}",
        "--chunked-prefill-size=256",
        *arguments,
        log_dir=tmp_path,
    ) as running:
        api = client(running.url)
        batch = wait(api, submit(api, jsonl(lines), "/v1/completions").id)
        answers = {
            each["custom_id"]: each["response"]["body"]["choices"][0]
            for each in results(api, batch.output_file_id)
        }
        with urllib.request.urlopen(f"{running.url}/server_info") as answer:
            state = json.load(answer)["internal_states"][0]["offline_batch"]
    assert batch.status == "completed" and len(answers) == len(cases)
    assert state["shares_prefixes"] and state["attention_steps_shared"] > 0
    assert state["kv_read_bytes_saved"] > 0.3 * state["kv_read_bytes"]
    if exact:
        wrong = [
            case.custom_id
            for case in cases
            if answers[case.custom_id].get("token_ids") != case.output_ids
        ]
        # A tie of two logits may fall either way.
        assert len(wrong) <= len(cases) // 20, wrong
