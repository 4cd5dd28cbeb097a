"""Penalties count the same tokens in whatever company a request runs."""

from __future__ import annotations

import json
import os
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import preloaded
import pytest
import torch
from forked_children import command

from sglang_batch.srt.scheduler.kv.token_counts import count_again, count_by_place

OFFLINE = {"offline_batch": True}
ENGINES = {
    "room for all": {**OFFLINE, "max_total_tokens": 8000},
    "offloading, mixed steps": {
        **OFFLINE,
        "max_total_tokens": 300,
        "chunked_prefill_size": 64,
        "offline_batch_config": {"mixed_chunk": True},
    },
    "replicas": {**OFFLINE, "max_total_tokens": 400, "dp_size": 2},
}


@pytest.mark.parametrize("name", ENGINES)
def test_answers_in_lists_are_those_alone(demo_model: Path, name: str) -> None:
    answers_of(demo_model, ENGINES[name])


def answers_of(demo_model: Path, engine: dict[str, Any]) -> list[list[int]]:
    """The answers alone, which are those in lists."""
    done = preloaded.run(
        command("penalties_in_company", str(demo_model), json.dumps(engine)),
        env={**os.environ, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
        if "dp_size" in engine
        else None,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    alone: list[list[int]] = found["alone"]
    assert len({tuple(ids) for ids in alone}) > 12
    for answers in found["in lists"]:
        assert answers == alone
    return alone


def test_drafts_change_no_answer_with_penalties(demo_model: Path) -> None:
    drafts = {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(demo_model),
    }
    # As with drafts, no token is counted late.
    without = {"disable_overlap_schedule": True}
    runs = [answers_of(demo_model, OFFLINE | more) for more in (without, drafts)]
    assert runs[1] == runs[0]


class Counted:
    """Notes what is counted, row by row."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def cumulate_output_tokens(self, output_ids: torch.Tensor) -> None:
        self.steps.append(output_ids.tolist())


def batch(reqs: list[Any], seq_lens: list[int], overlap: bool) -> Any:
    return SimpleNamespace(
        reqs=reqs,
        seq_lens_cpu=torch.tensor(seq_lens),
        enable_overlap=overlap,
        device="cpu",
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        sampling_info=SimpleNamespace(penalizer_orchestrator=Counted()),
    )


def request(known: int) -> Any:
    """A request of a prompt of 3 tokens, of whose output the scheduler knows so many."""
    return SimpleNamespace(
        beam_group=None,
        origin_input_ids=array("q", [1, 2, 3]),
        output_ids=array("q", [10, 11, 12, 13][:known]),
    )


def stock(_batch: Any) -> None:
    raise AssertionError("SGLang's own count")


@pytest.mark.parametrize("overlap", [False, True])
def test_the_token_does_not_depend_on_what_the_scheduler_knows(overlap: bool) -> None:
    expected = [3, 10, 11, 12] if overlap else [10, 11, 12, 13]
    for decode in range(1, 5):
        # With the overlap schedule the newest token is known after a step of others only.
        for known in {decode, decode - 1} if overlap else {decode}:
            step = batch([request(known)], [3 + decode - 1], overlap)
            count_by_place(stock, step)
            counted = step.sampling_info.penalizer_orchestrator.steps
            assert counted == [[expected[decode - 1]]]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_comes_back_counts_what_it_had_counted(overlap: bool) -> None:
    step = batch([request(4)], [6], overlap)
    count_again(step, 3)
    count_by_place(stock, step)
    counted = step.sampling_info.penalizer_orchestrator.steps
    expected = [3, 10, 11, 12] if overlap else [10, 11, 12, 13]
    assert counted == [[token] for token in expected]
