"""Shared prefixes read once: the same tokens, with less KV read."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import client, jsonl, line, results, submit, wait
from prompts import MAX_TOKENS, Case
from servers import Server, server
from stress_runs import scenario

from sglang_batch.scheduling.step_record import read_steps

COMPLETIONS = "/v1/completions"
STEPS, SIDES = "steps.csv", ("left", "right", "online")
ENGINES = {
    "mixed": ("--attention-backend=shared_prefix", "--enable-mixed-chunk"),
    "decodes-only-pages": (
        "--decode-attention-backend=shared_prefix",
        "--disable-overlap-schedule",
        "--page-size=16",
    ),
}


@pytest.fixture(scope="module")
def sharing(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Prompts come in chunks, beside requests that decode."""
    directory = tmp_path_factory.mktemp("sharing-server")
    # Beside the backend that SGLang chooses; below, by the backend's own name.
    config = {"attention": "torch", "step_log": str(directory / STEPS)}
    with server(
        demo_model,
        "--offline-batch",
        f"--offline-batch-dir={directory / 'batches'}",
        f"--offline-batch-config={json.dumps(config)}",
        "--enable-mixed-chunk",
        "--chunked-prefill-size=256",
        "--enable-metrics",
        log_dir=directory,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def answers(sharing: Server, cases: list[Case]) -> list[dict[str, Any]]:
    return batch_of(sharing, cases)


def batch_of(running: Server, cases: list[Case]) -> list[dict[str, Any]]:
    api = client(running.url)
    body = {"max_tokens": MAX_TOKENS, "return_token_ids": True}
    lines = [
        line(case.custom_id, {**body, "prompt": case.prompt}, COMPLETIONS)
        for case in cases
    ]
    batch = wait(api, submit(api, jsonl(lines), COMPLETIONS).id)
    assert batch.status == "completed"
    return results(api, batch.output_file_id)


def output_ids(answer: dict[str, Any]) -> list[int]:
    choice = answer["response"]["body"]["choices"][0]
    # SGLang names them differently per endpoint.
    ids: list[int] = choice.get("token_ids") or choice["response_token_ids"]
    return ids


def test_a_batch_answers_as_transformers(
    answers: list[dict[str, Any]], cases: list[Case]
) -> None:
    found = {each["custom_id"]: output_ids(each) for each in answers}
    assert found == {case.custom_id: case.output_ids for case in cases}


def test_the_server_says_what_was_saved(
    sharing: Server, answers: list[dict[str, Any]]
) -> None:
    with urllib.request.urlopen(f"{sharing.url}/server_info") as answer:
        state = json.load(answer)["internal_states"][0]["offline_batch"]
    assert answers
    assert 0 < state["attention_steps_shared"] <= state["attention_steps"]
    # Two documents of 400 and 600 tokens, 20 requests each; prompts of up to 650.
    read, saved = state["kv_read_bytes"], state["kv_read_bytes_saved"]
    assert 0.4 < saved / (read + saved) < 0.95
    with urllib.request.urlopen(f"{sharing.url}/metrics") as answer:
        text = answer.read().decode()
    found = re.search(
        r"^sglang_batch_kv_read_bytes_saved_total\{.*\} (\S+)", text, re.M
    )
    assert found is not None
    # Each step reports what the one before it saved.
    assert 0.8 * saved < float(found[1]) <= saved


def test_prompts_beside_decodes_share_too(
    sharing: Server, answers: list[dict[str, Any]]
) -> None:
    """Every step with decodes could share, and some with prompts beside them do."""
    assert answers
    with urllib.request.urlopen(f"{sharing.url}/server_info") as answer:
        state = json.load(answer)["internal_states"][0]["offline_batch"]
    assert state["shares_prefixes"]
    steps = read_steps(sharing.log_path.parent / STEPS)
    decodes = sum(steps[f"decode_{side}"] for side in SIDES)
    prompts = sum(steps[f"prefill_{side}"] for side in SIDES)
    assert state["attention_steps"] == (decodes > 0).sum()
    # What a step saved is known when the next one is made.
    saved = np.append(steps["kv_saved_bytes"][1:], 0)
    assert (saved[(decodes > 0) & (prompts > 0)] > 0).any()
    assert not saved[decodes == 0].any()


def test_online_prompts_have_a_step_of_their_own(
    sharing: Server, answers: list[dict[str, Any]], cases: list[Case]
) -> None:
    """Lines of a batch neither decode nor have prompts in the step of an online prompt."""
    assert answers
    log = sharing.log_path.parent / STEPS
    before = len(read_steps(log)["prefill_online"])
    api = client(sharing.url)
    body = {"max_tokens": 400, "ignore_eos": True}
    lines = [
        line(case.custom_id, {**body, "prompt": case.prompt}, COMPLETIONS)
        for case in cases
    ]
    batch = submit(api, jsonl(lines), COMPLETIONS)
    sharing.until_busy()
    for i in range(4):
        prompt = [50 + i] * 40
        api.completions.create(model="demo", prompt=prompt, max_tokens=3)
    wait(api, batch.id)
    steps = {name: column[before:] for name, column in read_steps(log).items()}
    online = steps["prefill_online"] > 0
    of_lines = [
        f"{what}_{side}" for what in ("prefill", "decode") for side in SIDES[:2]
    ]
    beside = sum(steps[name][online] for name in of_lines)
    assert online.sum() == 4
    assert (steps["kv_left"][online] > 0).any()
    assert not beside.any()


def test_kv_in_fp8_is_read_as_sglang_reads_it(
    demo_model: Path, cases: list[Case], tmp_path: Path
) -> None:
    """SGLang's answers, of which a few differ from those without rounding."""
    found = {}
    for attention in ("stock", "torch"):
        config = {"attention": attention}
        with server(
            demo_model,
            "--offline-batch",
            f"--offline-batch-dir={tmp_path / attention}",
            f"--offline-batch-config={json.dumps(config)}",
            "--kv-cache-dtype=fp8_e4m3",
            log_dir=tmp_path,
        ) as running:
            answers = batch_of(running, cases)
            with urllib.request.urlopen(f"{running.url}/server_info") as answer:
                state = json.load(answer)["internal_states"][0]["offline_batch"]
        found[attention] = {each["custom_id"]: output_ids(each) for each in answers}
        assert state["shares_prefixes"] == (attention == "torch")
    assert state["attention_steps_shared"] > 0
    assert found["torch"] == found["stock"]
    exact = {case.custom_id: case.output_ids for case in cases}
    assert found["torch"] != exact


@pytest.mark.parametrize("breadth", [1, 4])
def test_drafts_share_where_they_are_in_a_row(
    demo_model: Path, cases: list[Case], tmp_path: Path, breadth: int
) -> None:
    """Steps without drafts share, also between trees, which SGLang's backend verifies."""
    few = 6
    config = {"attention": "torch", "draft_requests": few}
    config["step_log"] = str(tmp_path / STEPS)
    with server(
        demo_model,
        "--offline-batch",
        f"--offline-batch-dir={tmp_path / 'batches'}",
        f"--offline-batch-config={json.dumps(config)}",
        "--speculative-algorithm=NGRAM",
        "--speculative-num-draft-tokens=4",
        f"--speculative-ngram-max-bfs-breadth={breadth}",
        "--max-running-requests=8",
        log_dir=tmp_path,
    ) as running:
        found = {
            each["custom_id"]: output_ids(each) for each in batch_of(running, cases)
        }
        with urllib.request.urlopen(f"{running.url}/server_info") as answer:
            state = json.load(answer)["internal_states"][0]["offline_batch"]
    assert found == {case.custom_id: case.output_ids for case in cases}
    steps = read_steps(tmp_path / STEPS)
    decodes = sum(steps[f"decode_{side}"] for side in SIDES)
    assert state["attention_steps"] == (decodes > 0).sum()
    saved = np.append(steps["kv_saved_bytes"][1:], 0)
    drafts = (decodes > 0) & (decodes <= few)
    assert (saved[decodes > few] > 0).any() and drafts.any()
    assert (saved[drafts] > 0).any() == (breadth == 1)
    read = state["kv_read_bytes"] + state["kv_read_bytes_saved"]
    assert 0.2 < state["kv_read_bytes_saved"] / read < 0.9


@pytest.mark.parametrize("name", ENGINES)
def test_jobs_at_random_are_answered_right(demo_model: Path, name: str) -> None:
    """Offloaded requests, followers, chunks, aborts and online requests go on beside."""
    found = scenario(demo_model, "random", 3, 3, *ENGINES[name])["random"]
    assert found["lines"] > 50
    assert found["offloaded"] >= found["resumed"]
