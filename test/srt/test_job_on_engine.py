"""Whole jobs on real SGLang: a sample first, plans made again, lines of many parts."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from servers import SERVER_ARGS

NUM_REQUESTS = 240
MAX_INFLIGHT = 24

RUN_JOBS = """
import json, sys
from builders import CHAT, make_body
from sglang_batch.config import OfflineBatchConfig
from sglang_batch.job import Job
from sglang_batch.request import BatchRequestInput
from sglang_batch.srt import launch

NUM_REQUESTS, MAX_INFLIGHT = int(sys.argv[1]), int(sys.argv[2])


class Recorder:
    '''The engine, noting what it is told.'''

    def __init__(self, engine):
        self._engine = engine
        self.opened, self.sent, self.in_flight = [], [], set()
        self.sides = []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def open_job(self, job_id, plans):
        self.opened.append(plans)
        await self._engine.open_job(job_id, plans)

    async def execute(self, prepared):
        number = int(prepared.rid.rpartition("-")[2])
        self.sent.append(number)
        self.in_flight.add(number)
        plan = self.opened[-1][0]
        if plan.density is not None:
            turns = [plan.turn[plan.leaf[each]] for each in self.in_flight]
            right = sum(int(turn >= plan.num_left) for turn in turns)
            self.sides.append((len(turns) - right, right))
        try:
            return await self._engine.execute(prepared)
        finally:
            self.in_flight.discard(number)


def chats():
    # Half of them short questions, half long documents with one-word answers.
    for i in range(NUM_REQUESTS):
        long = i % 2
        text = f"document {i % 8} {'x' * 400 * long} question {i}"
        body = make_body(text, max_tokens=6 if long else 60, temperature=0)
        yield BatchRequestInput(i, f"r{i}", CHAT, json.dumps(body).encode())


def known_lengths():
    for i in range(8):
        body = make_body(f"question {i}", max_tokens=2, ignore_eos=True)
        yield BatchRequestInput(i, f"r{i}", CHAT, json.dumps(body).encode())


def of_many_parts():
    several = {"prompt": [f"prompt {i}" for i in range(12)], "max_tokens": 3}
    sampled = {"prompt": "one prompt", "n": 11, "max_tokens": 3}
    both = {"prompt": ["a prompt", "another"], "n": 2, "max_tokens": 3}
    for i, fields in enumerate([several, sampled, both]):
        body = json.dumps({"model": "demo", **fields}).encode()
        yield BatchRequestInput(i, f"r{i}", "/v1/completions", body)


def run(loop, engine, job_id, requests, **config):
    recorder, answers = Recorder(engine), {}
    settings = OfflineBatchConfig(**config)

    def sink(request, output):
        assert request.index not in answers
        answers[request.index] = output

    job = Job(job_id, requests, range(len(requests)), recorder, settings, sink)
    loop.run_until_complete(job.run())
    return recorder, answers


def main():
    found = {}
    args = launch.parse_server_args(sys.argv[3:])
    with launch.engine(args) as (engine, loop):
        loop.run_until_complete(engine.connect())
        manager = engine._tokenizer_manager
        # The planner is compiled here, and not while a job waits for a plan.
        run(loop, engine, "batch_first", list(known_lengths()), policy="auto")
        rids, send = [], manager._send_one_request

        async def noting(tokenized):
            rids.append(tokenized.rid)
            return await send(tokenized)

        manager._send_one_request = noting
        for policy in ("dual-scan", "auto"):
            rids.clear()
            recorder, answers = run(
                loop, engine, f"batch_{policy}", list(chats()), policy=policy,
                max_inflight=MAX_INFLIGHT,
            )
            plans = [plans[0] for plans in recorder.opened]
            found[policy] = {
                "answers": {i: a.usage.output_tokens for i, a in answers.items() if a.ok},
                "opened": [plan.policy for plan in plans],
                "same": all(plans[0].same_requests(plan) for plan in plans),
                "estimates": [float(plan.steps.mean()) for plan in plans],
                "sides": recorder.sides,
                "sent": sorted(recorder.sent),
            }
        rids.clear()
        recorder, answers = run(loop, engine, "batch_parts", list(of_many_parts()))
        found["parts"] = {
            "rids": rids,
            "choices": [
                len(json.loads(answers[i].body).get("choices", ())) for i in range(3)
            ],
            "states_left": len(manager.rid_to_state),
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def found(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("job")
    script = directory / "jobs.py"
    script.write_text(RUN_JOBS)
    config = json.dumps({"step_log": str(directory / "steps.csv")})
    done = subprocess.run(
        [
            sys.executable, str(script), str(NUM_REQUESTS), str(MAX_INFLIGHT),
            "--model-path", str(demo_model), "--offline-batch-config", config,
            *SERVER_ARGS,
        ],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    result["steps"] = (directory / "steps.csv").read_text().splitlines()
    return result


@pytest.mark.parametrize("policy", ["dual-scan", "auto"])
def test_a_job_of_unknown_lengths_is_answered_and_planned_again(
    found: dict[str, Any], policy: str
) -> None:
    run = found[policy]
    assert len(run["answers"]) == NUM_REQUESTS
    assert run["sent"] == list(range(NUM_REQUESTS))
    assert len(run["opened"]) >= 2
    assert run["opened"][0] == ("dfs" if policy == "auto" else policy)
    assert run["same"]


def test_the_estimates_come_to_be_those_of_the_answers(found: dict[str, Any]) -> None:
    run = found["dual-scan"]
    steps = [tokens - 1 for tokens in run["answers"].values()]
    true_mean = sum(steps) / len(steps)
    first, *_, last = run["estimates"]
    assert abs(last - true_mean) < 0.3 * true_mean
    assert abs(first - true_mean) > abs(last - true_mean)


def test_both_sides_are_in_the_engine_while_both_have_requests(
    found: dict[str, Any],
) -> None:
    sides = found["dual-scan"]["sides"]
    assert all(left + right <= MAX_INFLIGHT for left, right in sides)
    middle = sides[MAX_INFLIGHT : NUM_REQUESTS // 2]
    # The sample fills the engine first, and it is sent from the left.
    begin = next(i for i, (_, right) in enumerate(middle) if right)
    assert begin < 0.1 * len(middle), middle
    both = [bool(left and right) for left, right in middle[begin:]]
    # Answers that come all at once may leave a side without any for a moment.
    assert sum(both) > 0.75 * len(both), middle


def test_the_parts_of_a_line_have_ids_of_the_job(found: dict[str, Any]) -> None:
    parts = found["parts"]
    assert parts["choices"] == [12, 11, 4]
    assert parts["states_left"] == 0
    prompts = [f"batch_parts-00000000.{i:06d}" for i in range(12)]
    # SGLang computes the prompt of several samples once before them.
    samples = [f"batch_parts-00000001.{i:06d}" for i in range(12)]
    both = [f"batch_parts-00000002.{i:06d}" for i in range(6)]
    assert sorted(parts["rids"]) == sorted([*prompts, *samples, *both])
    assert no_prefixes(parts["rids"])


def test_no_part_is_taken_for_an_online_request(found: dict[str, Any]) -> None:
    names, *rows = (line.split(",") for line in found["steps"])
    online = [names.index(name) for name in ("prefill_online", "decode_online")]
    tokens = sum(int(row[column]) for row in rows for column in online)
    assert tokens < 20  # SGLang's own warm-up at most


def no_prefixes(ids: Iterable[str]) -> bool:
    """Whether no id is the beginning of another: SGLang aborts by prefix."""
    ordered = sorted(ids)
    return not any(b.startswith(a) for a, b in itertools.pairwise(ordered))
