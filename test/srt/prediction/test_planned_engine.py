"""``sglang-batch plan`` with the limits of its engine, and with steps that were timed here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_command import MAX_TOKENS_IS_USED, chat, plan, write
from transformers import AutoConfig

from sglang_batch.planner.costs.hardware import Parallelism, hardware
from sglang_batch.planner.costs.step_costs import StepSample, step_costs
from sglang_batch.srt.engine.machine import model_spec, timed_steps_key
from sglang_batch.store.measured_costs import TimedSteps, keep_steps

pytestmark = MAX_TOKENS_IS_USED


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return write(tmp_path, [chat(f"q{i}", f"Question {i}?") for i in range(12)])


def keep_slow_steps(model: Path, dtype: str, seconds: float) -> None:
    """Steps of this model on this machine, all as slow."""
    spec = model_spec(AutoConfig.from_pretrained(model), kv_dtype=dtype)
    state: Any = {
        "attention_backend": "torch_native",
        "offline_batch": {"mixed_chunk": True},
    }
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 400, 200)
    prompts = [
        StepSample(seconds, t, 1, 4, t * t, context=t, squares=t * t, kv_tokens=200)
        for t in tokens[::2]
    ]
    decodes = [
        StepSample(seconds, 0, 0, t % 16 + 1, 0, context=0, squares=0, kv_tokens=900)
        for t in tokens[::2]
    ]
    samples = [list(map(float, sample)) for sample in prompts + decodes]
    key = timed_steps_key(None, state, spec, Parallelism())
    keep_steps(TimedSteps(key=key, samples=samples, measured_at="2026-01-01"))
    assert step_costs(spec, hardware("cpu"), Parallelism()).token_time_s < 1e-3


def report(
    capsys: pytest.CaptureFixture[str], job: Path, model: Path, *options: str
) -> dict[str, Any]:
    assert plan(job, model, "--json", "--policy", "dfs", *options) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_limits_of_the_engines_arguments_count(
    job: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free = report(capsys, job, demo_model)
    tight = report(
        capsys,
        job,
        demo_model,
        "--max-total-tokens",
        "900",
        "--max-running-requests",
        "2",
    )
    assert tight["machine"]["kv_capacity_tokens"] == 900
    assert tight["policies"][0]["steps"] > free["policies"][0]["steps"]


def test_timed_steps_of_this_machine_are_used(
    job: Path, demo_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = report(capsys, job, demo_model, "--dtype", "float32")["policies"][0]
    keep_slow_steps(demo_model, "float32", 0.5)
    after = report(capsys, job, demo_model, "--dtype", "float32")["policies"][0]
    assert after["seconds"] > 20 * before["seconds"]
    assert after["seconds"] == pytest.approx(0.5 * after["steps"], rel=0.5)
    options = ("--policy", "dfs", "--dtype", "float32", "--all")
    assert plan(job, demo_model, *options) == 0
    assert "costs of 200 timed steps" in capsys.readouterr().out
    # Of other bits nothing was measured, nor of other devices.
    other = report(capsys, job, demo_model, "--dtype", "bfloat16")["policies"][0]
    assert other["seconds"] < after["seconds"] / 10
    gpu = ("--dtype", "float32", "--hardware", "h100")
    assert report(capsys, job, demo_model, *gpu)["policies"][0]["seconds"] < 10
