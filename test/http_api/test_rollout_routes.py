"""Groups of samples over HTTP, on an engine that a test controls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest
from builders import parse_lines
from fake_engine import FakeEngine
from keyed_server import add, call
from route_server import Server, error_of

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.job.inflight_limit import InflightLimit
from sglang_batch.rollout import GroupResult
from sglang_batch.rollout.rollout_call import ROLLOUTS_PATH, parse_call
from sglang_batch.server.service import RolloutRun


def test_each_group_is_answered_with_a_line(server: Server) -> None:
    body = {"groups": [{"text": "abc", "id": "x"}, {"input_ids": [100]}], "n": 2}
    answer = server.http.post(ROLLOUTS_PATH, json=body)
    assert answer.status_code == 200
    assert answer.headers["x-rollout-id"].startswith("rollout_")
    lines = sorted(parse_lines(answer.content), key=lambda line: line["index"])
    assert [line["id"] for line in lines] == ["x", None]
    assert [line["status"] for line in lines] == ["complete"] * 2
    assert [s["text"] for line in lines for s in line["samples"]] == ["abc"] * 2 + [
        "d"
    ] * 2
    assert lines[0]["samples"][1]["output_logprobs"] == [-1.0] * 3
    *_, priority = server.engine.priorities.values()
    assert priority == 1001
    assert not server.service.rollouts


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"groups": [{"text": "x", "k": 2}]}, "groups.0: k=2 is above n=1"),
        ({"groups": [{"text": "x"}], "share": 0}, "'share'"),
        ({"groups": [{"text": "x"}], "shares": 1}, "'shares'"),
    ],
)
def test_a_bad_call_is_refused(
    server: Server, body: dict[str, Any], message: str
) -> None:
    answer = server.http.post(ROLLOUTS_PATH, json=body)
    assert answer.status_code == 400
    assert message in error_of(answer)["message"]


def test_a_key_runs_its_models_and_stops_its_own_calls(keyed: Server) -> None:
    bob, eve = (add(keyed, name, models=["sql"])["value"] for name in ("bob", "eve"))
    for adapter, status in ((None, 403), ("sql", 200)):
        body = {"groups": [{"text": "x", "lora_path": adapter}]}
        answer = call(keyed, bob, "POST", ROLLOUTS_PATH, json=body)
        assert answer.status_code == status, body
    run = keyed.service.rollout_run(parse_call({"groups": [{"text": "x"}]}), "bob")
    keyed.service.rollouts[run.id] = run
    for key, status in ((eve, 404), (bob, 200)):
        path = f"{ROLLOUTS_PATH}/{run.id}/stop"
        assert call(keyed, key, "POST", path).status_code == status


def in_time(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


def run_of(engine: FakeEngine, body: dict[str, Any]) -> RolloutRun:
    return RolloutRun("rollout_1", parse_call(body), engine)


async def groups_of(run: RolloutRun) -> list[GroupResult]:
    config = OfflineBatchConfig(max_line_attempts=2)
    groups = run.groups(config, InflightLimit(), 0)
    return [group async for group in groups]


def test_samples_that_are_not_sent_yet_end_as_well() -> None:
    async def scenario() -> None:
        engine = FakeEngine(default_max_inflight=2)
        engine.hold(["0", "1"])
        run = run_of(engine, {"groups": [{"text": "abc"}], "n": 4, "k": 1})
        work = asyncio.ensure_future(groups_of(run))
        await engine.until(lambda: len(engine.running) == 2)
        engine.release(["1"])
        (group,) = await work
        assert group.status == "complete"
        assert [s.status for s in group.samples] == [
            "aborted", "finished", "aborted", "aborted",
        ]  # fmt: skip
        assert [len(s.output_ids) for s in group.samples] == [1, 3, 1, 1]

    in_time(scenario())


@pytest.mark.slow
def test_a_sample_that_an_error_of_the_server_ends_is_sent_again() -> None:
    async def scenario() -> None:
        class Shaky(FakeEngine):
            num_failed = 0

            def _answer(self, prepared: Any) -> Any:
                output = super()._answer(prepared)
                if prepared.custom_id == "1" and not self.num_failed:
                    self.num_failed = 1
                    body = json.dumps({"error": {"message": "busy"}}).encode()
                    return type(output)(503, prepared.rid, body)
                return output

        engine = Shaky()
        groups = await groups_of(run_of(engine, {"groups": [{"text": "ab"}], "n": 2}))
        assert [s.status for s in groups[0].samples] == ["finished"] * 2
        assert engine.num_failed == 1

    in_time(scenario())


def test_what_is_expected_of_answers_reaches_the_plan() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        lengths = (40, 200, 10)
        texts = ("a prompt", "be brief", "count")
        groups = [
            {"text": text, "expected_tokens": each}
            for text, each in zip(texts, lengths, strict=True)
        ]
        body = {"groups": groups, "n": 2, "sampling_params": {"max_new_tokens": 900}}
        await groups_of(run_of(engine, body))
        (plan,) = engine.opened["rollout_1"]
        expected = dict(zip(plan.number, plan.est_decode_steps, strict=True))
        assert [round(expected[number]) for number in range(0, 6, 2)] == [39, 199, 9]

    in_time(scenario())


def test_the_longest_group_is_sent_first_wherever_it_is() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        groups = [
            {"text": f"prompt {i}", "expected_tokens": 20 + 500 * (i == 39)}
            for i in range(40)
        ]
        body = {"groups": groups, "n": 10, "sampling_params": {"max_new_tokens": 900}}
        await groups_of(run_of(engine, body))
        assert sorted(map(int, engine.executed[:10])) == list(range(390, 400))

    in_time(scenario())
