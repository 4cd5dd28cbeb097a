"""Groups of samples on a server that a trainer gives new weights.

The tests share a server of little KV. Each leaves it running, with whatever weights.
"""

from __future__ import annotations

import asyncio
import csv
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import preloaded
import pytest
from batches import client, jsonl, line, submit, wait
from forked_children import script_command
from servers import Server, server
from slime_stand_in import Sample, slime_args

from sglang_batch.rollout import GroupResult, LengthHistory, RolloutClient, RolloutGroup
from sglang_batch.rollout.slime_generate import SlimeGenerate
from sglang_batch.run.demo_model import SPECIAL_IDS, write_demo_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_rollouts.py"
GREEDY = {"temperature": 0, "ignore_eos": True}
# Of unknown length to the plan, but they do not end.
ENDLESS = {"temperature": 0, "logit_bias": {str(SPECIAL_IDS["<|eos|>"]): -100}}
ENDLESS["logit_bias"][str(SPECIAL_IDS["<|end|>"])] = -100
OWN_ARGS = (
    "--dtype=float32",
    "--mem-fraction-static=0.3",
    "--max-total-tokens=4000",
    "--served-model-name=demo",
)


class Rollouts:
    """A server, what it logs of its steps, and two models of one shape."""

    def __init__(self, running: Server, directory: Path, demo: Path) -> None:
        self.url = running.url
        self.http = httpx.Client(base_url=running.url, timeout=120)
        self.client = RolloutClient(running.url)
        self.models = [demo, directory / "other"]
        self._step_log = directory / "steps.csv"
        self._version = 0

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.content else {}

    def load(self, which: int) -> str:
        """Load the weights of a model. Returns their new version."""
        self._version += 1
        body = {"model_path": str(self.models[which])}
        self.post(
            "/update_weights_from_disk", weight_version=f"{self._version}", **body
        )
        return f"{self._version}"

    def steps(self, since: int = 0) -> list[dict[str, float]]:
        """The steps so far, once the engine is idle and they are all on disk."""
        seen = -1
        while seen != (size := self._step_log.stat().st_size):
            seen = size
            time.sleep(0.3)
        with self._step_log.open() as log:
            rows = list(csv.DictReader(log))
        return [{k: float(v) for k, v in row.items()} for row in rows[since:]]

    def meanwhile(
        self, groups: Sequence[RolloutGroup], act: Callable[[], Any], **options: Any
    ) -> tuple[list[GroupResult], Any]:
        """Run groups, and do something while their samples decode."""
        found: list[GroupResult] = []
        running = threading.Thread(
            target=lambda: found.extend(self.client.run(groups, **options))
        )
        running.start()
        self.until_running(sum(group.n or options["n"] for group in groups))
        acted = act()
        running.join()
        return found, acted

    def until_running(self, most: int) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            info = self.http.get("/server_info").json()
            state = info["internal_states"][0]["offline_batch"]
            if state["kv_use"]["running"] >= min(most, 4):
                return
            time.sleep(0.02)
        raise AssertionError("no sample came into the engine")


@pytest.fixture(scope="module")
def rollouts(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rollouts]:
    directory = tmp_path_factory.mktemp("rollouts")
    write_demo_model(directory / "other", seed=1)
    config = json.dumps({"step_log": str(directory / "steps.csv")})
    with server(
        demo_model,
        *("--offline-batch", f"--offline-batch-dir={directory / 'batches'}"),
        *("--offline-batch-config", config),
        log_dir=directory,
        defaults=OWN_ARGS,
    ) as running:
        found = Rollouts(running, directory, demo_model)
        yield found
        found.http.close()


@pytest.fixture(scope="module")
def greedy(rollouts: Rollouts) -> Callable[[int, Sequence[int], int], list[int]]:
    """What ``transformers`` appends to tokens with one of the models."""
    import torch
    from transformers import AutoModelForCausalLM

    models: list[Any] = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in rollouts.models
    ]

    @torch.no_grad()
    def appended(which: int, tokens: Sequence[int], count: int) -> list[int]:
        found: list[int] = []
        past, new = None, torch.tensor([list(tokens)])
        for _ in range(count):
            output = models[which](new, past_key_values=past, use_cache=True)
            past = output.past_key_values
            found.append(int(output.logits[0, -1].argmax()))
            new = torch.tensor([found[-1:]])
        return found

    return appended


def prompt(i: int) -> list[int]:
    return list(f"Question {i}: why? ".encode() * 3)


def test_a_group_ends_with_its_kth_answer_and_the_others_can_continue(
    rollouts: Rollouts,
) -> None:
    version = rollouts.load(0)
    lengths = [20, 40, 400, 400]
    samples = [{"sampling_params": {"max_new_tokens": each}} for each in lengths]
    whole = {"input_ids": prompt(0), "id": "a", "samples": samples}
    group = RolloutGroup.model_validate(whole)
    # The abort comes within 20 tokens, unless something else holds the processor.
    for _ in range(5):
        (found,) = rollouts.client.run([group], n=4, k=2, sampling_params=GREEDY)
        assert (found.id, found.status) == ("a", "complete")
        status = [sample.status for sample in found.samples]
        assert status == ["finished", "finished", "aborted", "aborted"]
        if max(len(sample.output_ids) for sample in found.samples) < 60:
            break
    first, second, *aborted = found.samples
    assert [len(first.output_ids), len(second.output_ids)] == [20, 40]
    for sample in aborted:
        assert 40 <= len(sample.output_ids) < 60
        assert sample.output_ids[:40] == second.output_ids
        assert len(sample.output_logprobs or []) == len(sample.output_ids)
        (span,) = sample.weight_versions
        assert span == {"version": version, "start": 0, "end": len(sample.output_ids)}
    rest = RolloutGroup(
        input_ids=prompt(0),
        samples=[sample.so_far() for sample in aborted],
        expected_tokens=100,
    )
    params = {**GREEDY, "max_new_tokens": 100}
    (again,) = rollouts.client.run([rest], n=2, sampling_params=params)
    (at_once,) = rollouts.client.run(
        [RolloutGroup(input_ids=prompt(0))], sampling_params=params
    )
    for sample in again.samples:
        assert sample.output_ids == at_once.samples[0].output_ids
        assert sample.text == at_once.samples[0].text
        assert sample.output_logprobs == pytest.approx(
            at_once.samples[0].output_logprobs, abs=1e-3
        )


def test_a_share_of_the_groups_is_enough(rollouts: Rollouts) -> None:
    groups = [
        RolloutGroup(
            input_ids=prompt(i), sampling_params={"max_new_tokens": 15 + 300 * (i == 2)}
        )
        for i in range(3)
    ]
    found = rollouts.client.run(groups, n=2, share=0.6, sampling_params=GREEDY)
    assert [group.status for group in found] == ["complete", "complete", "aborted"]
    assert all(sample.output_ids for sample in found[2].samples)


def test_bad_calls_are_refused_and_bad_samples_fail_alone(rollouts: Rollouts) -> None:
    body = {"groups": [{"text": "x"}], "n": 2, "k": 3}
    answer = rollouts.http.post("/offline_batch/rollouts", json=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message == "groups.0: k=3 is above n=2, the samples of the group."
    groups = [
        RolloutGroup(text="good"),
        RolloutGroup(text="bad", sampling_params={"temperature": -1}),
        RolloutGroup(text="x" * 3000),
    ]
    good, bad, long = rollouts.client.run(
        groups, n=2, sampling_params={"max_new_tokens": 4}
    )
    assert good.status == "complete" and good.input_ids == list(b"good")
    assert [bad.status, long.status] == ["failed", "failed"]
    assert "temperature" in (bad.samples[0].error or {})["message"]


def test_no_token_of_a_sample_that_waits_on_the_host_is_lost(
    rollouts: Rollouts,
) -> None:
    before = len(rollouts.steps())
    groups = [RolloutGroup(input_ids=prompt(i)) for i in range(8)]

    def abort_once_offloaded() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            info = rollouts.http.get("/server_info").json()
            if info["internal_states"][0]["offline_batch"]["offloaded_now"]:
                break
            time.sleep(0.05)
        rollouts.post("/abort_request", abort_all=True)

    params = {**ENDLESS, "max_new_tokens": 900}
    found, _ = rollouts.meanwhile(
        groups, abort_once_offloaded, n=2, sampling_params=params
    )
    samples = [sample for group in found for sample in group.samples]
    steps = rollouts.steps(before)
    offloaded = sum(step["offloaded"] - step["resumed"] for step in steps)
    assert offloaded >= 1 and not sum(step["retracted"] for step in steps)
    # A row of a step is a token, but for the first one of each sample. The last row of
    # those that run is under way when they are aborted.
    started = [sample for sample in samples if sample.output_ids]
    rows = sum(step["decode_left"] + step["decode_right"] for step in steps)
    tokens = sum(len(sample.output_ids) - 1 for sample in started)
    assert 0 <= rows - tokens <= len(started) - offloaded
    assert all(len(s.output_logprobs or []) == len(s.output_ids) for s in samples)


def test_weights_may_change_between_calls_and_within_one(
    rollouts: Rollouts, greedy: Callable[[int, Sequence[int], int], list[int]]
) -> None:
    groups = [RolloutGroup(input_ids=prompt(i)) for i in range(3)]
    params = {**GREEDY, "max_new_tokens": 300}
    first = rollouts.load(0)
    short = {**params, "max_new_tokens": 8}
    rollouts.client.run(groups, n=2, sampling_params=short)

    def change() -> str:
        rollouts.post("/pause_generation", mode="retract")
        version = rollouts.load(1)
        rollouts.post("/continue_generation")
        return version

    found, second = rollouts.meanwhile(groups, change, n=2, sampling_params=params)
    for group in found:
        assert group.status == "complete"
        sample = group.samples[0]
        at = sample.weight_versions[0]["end"]
        assert [tuple(span.values()) for span in sample.weight_versions] == [
            (first, 0, at),
            (second, at, 300),
        ]
        # KV of the old weights is not used with the new ones.
        tokens = [*prompt(group.index), *sample.output_ids]
        start = len(tokens) - 300 + at
        assert tokens[start : start + 20] == greedy(1, tokens[:start], 20)
    third = rollouts.load(0)
    found = rollouts.client.run(groups, n=2, sampling_params=short)
    for group in found:
        leader, follower = group.samples
        assert leader.weight_versions == [{"version": third, "start": 0, "end": 8}]
        assert leader.output_ids == greedy(0, prompt(group.index), 8)
        # From the leader of the same group, and what all prompts begin with.
        assert leader.cached_tokens <= len("Question ")
        assert follower.cached_tokens >= len(prompt(group.index)) - 1


def test_a_call_ends_with_its_tokens_when_it_is_stopped(rollouts: Rollouts) -> None:
    async def run() -> list[GroupResult]:
        groups = [RolloutGroup(input_ids=prompt(i)) for i in range(2)]
        params = {**GREEDY, "max_new_tokens": 900}
        async with rollouts.client.start(
            groups, n=2, sampling_params=params
        ) as rollout:
            await asyncio.to_thread(rollouts.until_running, 4)
            await rollout.stop()
            return [group async for group in rollout]

    found = asyncio.run(run())
    assert [group.status for group in found] == ["aborted", "aborted"]
    assert all(s.output_ids for group in found for s in group.samples)
    gone = rollouts.http.post("/offline_batch/rollouts/rollout_1/stop")
    assert gone.status_code == 404


def test_a_client_that_leaves_takes_its_samples_along(rollouts: Rollouts) -> None:
    async def leave() -> None:
        groups = [RolloutGroup(input_ids=prompt(i)) for i in range(4)]
        params = {**GREEDY, "max_new_tokens": 900}
        async with rollouts.client.start(groups, n=2, sampling_params=params):
            await asyncio.to_thread(rollouts.until_running, 4)

    asyncio.run(leave())
    assert rollouts.steps()  # waits until no more are made
    info = rollouts.http.get("/server_info").json()["internal_states"][0]
    assert info["offline_batch"]["kv_use"]["running"] == 0


def test_batches_name_the_model_as_before_once_it_has_new_weights(
    rollouts: Rollouts,
) -> None:
    rollouts.load(1)
    api = client(rollouts.url)
    batch = wait(api, submit(api, jsonl([line("a", {"messages": [
        {"role": "user", "content": "Why?"}], "max_tokens": 4})])).id)  # fmt: skip
    assert batch.request_counts is not None and batch.request_counts.completed == 1


def test_slime_gets_its_samples_and_continues_those_that_were_aborted(
    rollouts: Rollouts,
) -> None:
    history = LengthHistory()
    params = {"max_new_tokens": 500, **GREEDY}

    async def ask(samples: list[Sample], *, abort: bool) -> list[Any]:
        generate = SlimeGenerate([rollouts.url], history=history)
        asked = [
            asyncio.ensure_future(generate(slime_args(), each, dict(params)))
            for each in samples
        ]
        if abort:
            await asyncio.to_thread(rollouts.until_running, 4)
            await asyncio.to_thread(
                lambda: rollouts.post("/abort_request", abort_all=True)
            )
        return await asyncio.gather(*asked)

    samples = [Sample(group_index=i // 2, tokens=prompt(i // 2)) for i in range(4)]
    asyncio.run(ask(samples, abort=True))
    assert {each.status for each in samples} == {Sample.Status.ABORTED}
    had = [list(each.tokens) for each in samples]
    assert all(0 < each.response_length < 500 for each in samples)
    asyncio.run(ask(samples, abort=False))
    for sample, before in zip(samples, had, strict=True):
        assert sample.status is Sample.Status.TRUNCATED
        assert sample.tokens[: len(before)] == before
        assert sample.response_length == len(sample.rollout_log_probs or []) == 500
        assert len(sample.weight_versions) == 2  # one for each call
    assert (history.expected(RolloutGroup(input_ids=prompt(0))) or 0) >= 400


def test_the_example_learns(rollouts: Rollouts) -> None:
    script = script_command(EXAMPLE, "--url", rollouts.url, "--steps", "5")
    done = preloaded.run(script, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.split()[-1]) > 1.5, done.stdout
