"""``serve --backend transformers``: the batch service and SGLang's routes, dense batches."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sglang as sgl
from batches import client, jsonl, line, results, submit, wait
from servers import Server, server

from sglang_batch.errors import EngineError
from sglang_batch.lang import BatchBackend
from sglang_batch.request import BatchRequestInput, RequestOutput
from sglang_batch.run.backend_options import transformers_engine

# SGLang answers errors with a class that its web framework wants to drop.
pytestmark = pytest.mark.filterwarnings("ignore:ORJSONResponse")

COMPLETIONS = "/v1/completions"
PROMPTS = [[7 + i, 50, 91 + i, *range(60, 60 + 2 * i)] for i in range(12)]
Generated = Callable[[list[int], int], list[int]]


@pytest.fixture(scope="module")
def dense_server(
    neo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("dense")
    with server(
        neo_model,
        f"--offline-batch-dir={folder / 'batches'}",
        module=("sglang_batch", "serve", "--backend=transformers"),
        defaults=("--dtype=float32", "--device=cpu", "--served-model-name=demo"),
        log_dir=folder,
        as_user=True,
    ) as running:
        yield running


def generate(running: Server, **body: Any) -> Any:
    answer = httpx.post(f"{running.url}/generate", json=body, timeout=60)
    return answer.raise_for_status().json()


def test_a_batch_has_the_tokens_of_generate(
    dense_server: Server, generated: Generated
) -> None:
    api = client(dense_server.url)
    asked = [
        line(f"r{i}", {"prompt": prompt, "max_tokens": 9, "logprobs": 1}, COMPLETIONS)
        for i, prompt in enumerate(PROMPTS)
    ]
    too_long = {"prompt": [60] * 300, "max_tokens": 4}
    asked.append(line("long", too_long, COMPLETIONS))
    batch = wait(api, submit(api, jsonl(asked), COMPLETIONS).id)
    assert batch.status == "completed", batch
    found = {each["custom_id"]: each for each in results(api, batch.output_file_id)}
    for i, prompt in enumerate(PROMPTS):
        body = found[f"r{i}"]["response"]["body"]
        expected = generated(prompt, 9)
        assert body["usage"]["completion_tokens"] == len(expected)
        alone = generate(
            dense_server,
            input_ids=prompt,
            sampling_params={"max_new_tokens": 9, "temperature": 0},
        )
        assert alone["output_ids"] == expected
        assert body["choices"][0]["text"] == alone["text"]
    (failed,) = results(api, batch.error_file_id)
    assert failed["custom_id"] == "long"
    assert failed["response"]["status_code"] == 400


def test_a_list_of_prompts_is_one_job(
    dense_server: Server, generated: Generated
) -> None:
    answers = generate(
        dense_server,
        input_ids=PROMPTS,
        sampling_params={"max_new_tokens": 5, "temperature": 0},
    )
    assert [each["output_ids"] for each in answers] == [
        generated(prompt, 5) for prompt in PROMPTS
    ]
    jobs = {each["meta_info"]["id"].partition("-")[0] for each in answers}
    assert len(jobs) == 1
    assert all(job.startswith("list_") for job in jobs)


def test_sglangs_routes_answer(dense_server: Server) -> None:
    (model,) = client(dense_server.url).models.list().data
    assert model.id == "demo"
    for path in ("/health_generate", "/model_info", "/server_info", "/batches"):
        assert httpx.get(f"{dense_server.url}{path}", timeout=30).is_success, path
    assert httpx.post(f"{dense_server.url}/flush_cache").is_success
    chunks = client(dense_server.url).chat.completions.create(
        model="demo", max_tokens=4, stream=True,
        messages=[{"role": "user", "content": "hi"}],
    )  # fmt: skip
    assert [c.choices[0].finish_reason for c in chunks][-1] == "length"


@sgl.function
def describe(s: Any, topic: str) -> None:
    s += f"About {topic}: "
    s += sgl.gen("first", max_tokens=4, temperature=0)
    s += sgl.select("verdict", choices=["yes", "no"])


def test_programs_run_in_waves(dense_server: Server) -> None:
    backend = BatchBackend(dense_server.url)
    topics = ["rows", "columns", "cells"]
    states = describe.run_batch([{"topic": t} for t in topics], backend=backend)
    for topic, state in zip(topics, states, strict=True):
        alone = generate(
            dense_server,
            text=f"About {topic}: ",
            sampling_params={"max_new_tokens": 4, "temperature": 0},
        )
        assert state["first"] == alone["text"]
        assert state["verdict"] in ("yes", "no")


def test_it_ends_at_sigterm(dense_server: Server) -> None:
    for path in ("/live", "/ready"):
        assert httpx.get(f"{dense_server.url}{path}", timeout=30).is_success, path
    dense_server.process.send_signal(signal.SIGTERM)
    # As SGLang's server ends, once no request runs.
    assert dense_server.process.wait(timeout=60) == 0
    assert "Traceback" not in dense_server.log


def test_a_server_hears_of_a_failed_worker_before_its_requests(
    neo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[list[str]] = []
    argv = ["--model-path", str(neo_model), "--dtype=float32", "--device=cpu"]
    _, start = transformers_engine(argv)

    def fails() -> None:
        raise RuntimeError("the device is gone")

    with start() as (engine, loop):

        async def one() -> None:
            await engine.connect()
            body = json.dumps({"prompt": "a", "max_tokens": 4}).encode()
            request = BatchRequestInput(0, "x", COMPLETIONS, body)
            prepared = await engine.prepare(request, "batch_f-00000000", tokenize=True)
            assert not isinstance(prepared, RequestOutput)
            await engine.execute(prepared)

        manager = engine.manager
        manager.on_failure = lambda: heard.append(list(manager.rid_to_state))
        monkeypatch.setattr(engine._worker._loop, "step", fails)
        with pytest.raises(EngineError, match="the device is gone"):
            loop.run_until_complete(asyncio.wait_for(one(), 30))
    assert heard == [["batch_f-00000000"]]
