"""Two real engines on a Ray cluster of this machine, one of which is killed in mid-run.

The command is a fork of a process that has SGLang imported. Ray's workers are new processes,
and their engines' processes are forks of them.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import preloaded
import pytest
import ray
from ray._private import workers
from transformers import AutoTokenizer

from sglang_batch import PlannedProcessor
from sglang_batch.errors import ConfigError
from sglang_batch.fleet.ray.ray_fleet import RayFleet, check_room, join_cluster
from sglang_batch.lang import frame_job
from sglang_batch.run.demo_model import write_demo_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from ray.data.llm import (
        HttpRequestProcessorConfig,
        SGLangEngineProcessorConfig,
        build_processor,
    )

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

from fleet_demo import run
from fleet_parts.local_cluster import (
    LocalCluster,
    local_cluster,
    processes,
    wait_until,
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    worker = Path(workers.__path__[0]) / "default_worker.py"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SGLANG_BATCH_TEST_FORKS", str(worker))
        with local_cluster(2) as cluster:
            yield cluster


def forked(command: list[str], **options: Any) -> subprocess.Popen[Any]:
    python, _, _, *arguments = command
    code = "from sglang_batch.__main__ import command; command()"
    return preloaded.Popen([python, "-c", code, *arguments], **options)


def test_a_killed_engine_costs_no_line(cluster: LocalCluster, tmp_path: Path) -> None:
    write_demo_model(tmp_path / "model")
    assert run(cluster, tmp_path, forked) == 0
    # The job has ended its engines, and its directory can tell about it.
    wait_until(lambda: not processes("ray::RayWorker"), 10.0)
    log = (tmp_path / "answers.jsonl.job" / "engine.log").read_text()
    assert "is lost: its process died" in log


def test_engines_without_room_are_refused(cluster: LocalCluster) -> None:
    def fleet(engines: int, **resources: float) -> RayFleet:
        return RayFleet(cluster.address, 1, engines, engines, resources)

    join_cluster(cluster.address)
    try:
        check_room(fleet(2, CPU=1))
        with pytest.raises(
            ConfigError, match="room for 2 of 3 engines with 1 CPU each"
        ):
            check_room(fleet(3, CPU=1))
        with pytest.raises(ConfigError, match="room for 0 of 1 engines with 1 GPU"):
            check_room(fleet(1, GPU=1))
        check_room(fleet(0, GPU=1))
    finally:
        ray.shutdown()


FAMILIES, MEMBERS, FAILS = 6, 6, 7
TOO_MANY = 10**6


def num_unique_tokens(rows: list[dict[str, Any]], model: Path) -> int:
    """Tokens of all prompts, those of a shared beginning once."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    beginnings = set()
    for row in rows:
        ids = tokenizer(row["text"]).input_ids
        assert len(ids) == row["num_input_tokens"]
        beginnings |= {tuple(ids[:end]) for end in range(1, len(ids) + 1)}
    return len(beginnings)


@pytest.mark.filterwarnings("ignore")  # Ray Data warns of its own settings
def test_a_dataset_of_ray_data_is_one_job(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one family are in different blocks, and each prefix is computed once."""
    write_demo_model(tmp_path / "model")
    pipes = {name: getattr(subprocess, name) for name in ("PIPE", "DEVNULL")}
    monkeypatch.setattr(frame_job, "subprocess", SimpleNamespace(Popen=forked, **pipes))
    # Rows of a family differ in their next token: a prefix that is longer than a cached one
    # by less than SHORTEST_AWAITED tokens would be computed again, not waited for.
    rows = [
        {"id": i, "text": "abcdef"[i % FAMILIES] * 150 + f"{i:c}", "most": 2 + i % 3}
        for i in range(48, 48 + FAMILIES * MEMBERS)
    ]
    rows[FAILS]["most"] = TOO_MANY
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        config = SGLangEngineProcessorConfig(
            model_source=str(tmp_path / "model"),
            engine_kwargs={
                "dtype": "float32", "device": "cpu", "max_total_tokens": 20000,
                "max_running_requests": 8,
            },
            chat_template_stage=False,
            should_continue_on_error=True,
        )  # fmt: skip
        processor = build_processor(
            config,
            preprocess=lambda row: {
                "prompt": row["text"],
                "sampling_params": {"max_new_tokens": row["most"], "temperature": 0},
            },
            postprocess=lambda row: {**row, "answer": row["generated_text"]},
        )
        dataset = ray.data.from_items(rows, override_num_blocks=FAMILIES)
        answered = PlannedProcessor(processor, job=tmp_path / "job")(dataset)
        found = answered.take_all()
    finally:
        ray.shutdown()
    assert [{name: row[name] for name in rows[0]} for row in found] == rows
    failed = found.pop(FAILS)
    assert str(TOO_MANY) in failed["__inference_error__"].replace(",", "")
    assert failed["generated_text"] == "" and failed.get("answer") is None
    assert all(row["__inference_error__"] == "" for row in found)
    assert all(row["answer"] == row["generated_text"] != "" for row in found)
    assert all(1 <= row["num_generated_tokens"] <= row["most"] for row in found)
    computed = sum(row["num_input_tokens"] - row["num_cached_tokens"] for row in found)
    assert computed == num_unique_tokens(found, tmp_path / "model")


@pytest.mark.filterwarnings("ignore")
def test_a_processor_that_cannot_be_planned_is_refused(cluster: LocalCluster) -> None:
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        processor = build_processor(HttpRequestProcessorConfig(url="http://a"))
        with pytest.raises(ConfigError, match="HttpRequestProcessorConfig: give"):
            PlannedProcessor(processor)
        config = SGLangEngineProcessorConfig(model_source="m", accelerator_type="L4")
        with pytest.raises(
            ConfigError, match="accelerator_type='L4' reaches no engine"
        ):
            PlannedProcessor(build_processor(config))
    finally:
        ray.shutdown()
