"""What batches cost, and options that save some of it."""

from __future__ import annotations

import random
import time
from itertools import product
from pathlib import Path

import pytest
from batch_service import (
    batch_row,
    check_results,
    custom_ids,
    result_lines,
    running_service,
    submit,
    until_over,
)
from builders import ids_of, make_body, make_line, make_lines, run
from fake_engine import FakeEngine

from sglang_batch.batch_api.objects import batch_object
from sglang_batch.config import OfflineBatchConfig
from sglang_batch.job.answer_cache import ModelAnswers
from sglang_batch.job.engine_time import KEPT_S, Account, EngineTime
from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.request import Work
from sglang_batch.server.access.usage import cost_object, costs_by_label, usage_since

pytestmark = pytest.mark.usefixtures("quick_polling")


def test_a_batch_ends_when_enough_of_its_lines_have_an_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(failing={"r1": 400})
        engine.hold(["r8", "r9"])
        async with running_service(tmp_path, engine, max_inflight=4) as service:
            # 8 of the 9 that do not fail would be too many.
            batch_id = submit(service, make_lines(10), enough=0.7)
            row = await until_over(service, batch_id)
            outputs, errors = check_results(service, row)
            assert row["status"] == "completed"
            assert len(outputs) >= 7
            assert (row["total"], row["failed"]) == (10, 1)
            given_up = [line for line in errors if line["custom_id"] != "r1"]
            assert {"r8", "r9"} <= set(custom_ids(given_up))
            assert given_up[0]["error"] == {
                "code": "enough_answers",
                "message": "This request was given up because enough of the others had "
                "an answer (0.7 of all).",
            }
            assert set(engine.aborted) <= {"r8", "r9"} | set(custom_ids(given_up))
            shown = batch_object(row)
            assert shown["enough"] == 0.7
            assert shown["request_counts"]["total"] == 10

    run(scenario())


def test_the_next_server_ends_a_batch_that_had_enough(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold(ids_of(range(2, 6)))
        async with running_service(tmp_path, engine) as service:
            batch_id = submit(service, make_lines(6))
            await engine.until_stalled(2, 4)
        # It had not noticed.
        again = FakeEngine()
        again.hold(ids_of(range(2, 6)))
        service_of_next = running_service(tmp_path, again)
        async with service_of_next as service:
            row = batch_row(service, batch_id)
            assert row["completed"] == 2
            service.store.update_batch(batch_id, enough=0.3)
        last = FakeEngine()
        async with running_service(tmp_path, last) as service:
            row = await until_over(service, batch_id)
            assert (row["status"], row["completed"]) == ("completed", 2)
            assert last.executed == []

    run(scenario())


@pytest.mark.parametrize(("own", "executed"), [("off", 4), ("auto", 1)])
def test_a_batch_has_its_own_setting_for_equal_lines(
    own: str, executed: int, tmp_path: Path
) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        other = {"off": "auto", "auto": "off"}[own]
        async with running_service(tmp_path, engine, dedupe=other) as service:
            body = make_body("a", temperature=0)
            same = [make_line(f"r{i}", body=body) for i in range(4)]
            row = await until_over(service, submit(service, same, dedupe=own))
            assert len(engine.executed) == executed
            assert row["merged"] == 4 - executed
            merged = row["merged_input_tokens"] + row["merged_output_tokens"]
            assert merged * 4 == (4 - executed) * (
                row["input_tokens"] + row["output_tokens"]
            )
            usage = batch_object(row, price=7200.0)["usage"]
            assert usage.get("merged_requests") == ((4 - executed) or None)
            assert usage["dollars"] == pytest.approx(2 * row["engine_s"], abs=1e-6)

    run(scenario())


def test_costs_are_summed_by_a_label_and_by_owner(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with running_service(tmp_path, engine) as service:
            labels = [
                {"project": "a"},
                {"project": "b", "x": "a"},
                {"project": "a"},
                None,
            ]
            for number, metadata in enumerate(labels):
                batch_id = submit(
                    service, make_lines(2), metadata=metadata, owner=f"o{number % 2}"
                )
                row = await until_over(service, batch_id)
            rows = costs_by_label(service.store, "project", 0, None)
            found = {row["value"]: cost_object(row, None) for row in rows}
            assert {key: each["batches"] for key, each in found.items()} == {
                None: 1, "a": 2, "b": 1,
            }  # fmt: skip
            assert found["a"]["requests"] == 4
            assert found["a"]["computed_output_tokens"] == 2 * row["output_tokens"]
            assert found["a"]["dollars"] is None
            [own] = costs_by_label(service.store, "project", 0, "o0")
            assert (own["value"], own["batches"]) == ("a", 2)
            assert not costs_by_label(service.store, "project", 1 << 40, None)
            used = usage_since(service.store, "", "o0")
            assert used[0]["engine_s"] == pytest.approx(own["engine_s"])
            assert used[0]["engine_s"] > 0

    run(scenario())


COST = CostModel(token_time_s=1e-3, kv_read_time_s=1e-5, attention_time_s=1e-6)
LONG_PROMPT, LONG_ANSWER = Work.of_sequence(400, 0, 2), Work.of_sequence(20, 0, 300)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_seconds_are_divided_by_the_work_that_was_done() -> None:
    clock = Clock()
    time = EngineTime(lambda: 2, lambda: COST, clock)
    a, b = Account(time), Account(time)
    clock.now = 5.0  # without lines
    a.enter()
    b.enter()
    clock.now = 6.0
    assert a.seconds == 0.0  # of which nothing is known yet
    a.leave(Work(tokens=300))
    assert (a.seconds, b.seconds) == (2.0, 0.0)
    clock.now = 9.0
    b.leave(Work(tokens=100))
    clock.now = 100.0
    for _ in range(3):  # lines that only waited
        b.enter()
        b.leave(None)
    assert (a.seconds, b.seconds) == (pytest.approx(6.0), pytest.approx(2.0))


def test_what_ended_long_ago_changes_no_more() -> None:
    clock = Clock()
    time = EngineTime(lambda: 1, lambda: COST, clock)
    a, b = Account(time), Account(time)
    for account, seconds in ((a, 2.0), (b, 4.0)):
        account.enter()
        clock.now += seconds
        account.leave(Work(tokens=10))
        account.ended()
    assert (a.seconds, b.seconds, a.closed) == (3.0, 3.0, False)
    clock.now += KEPT_S
    assert a.closed and b.closed
    c = Account(time)
    c.enter()
    clock.now += 8.0
    c.leave(Work(tokens=1))
    assert [each.seconds for each in (a, b, c)] == [3.0, 3.0, 8.0]


@pytest.mark.parametrize("orders", list(product(("late", "early", "mixed"), repeat=2)))
@pytest.mark.parametrize("num_first", [0, 50])
def test_equal_work_costs_the_same(orders: tuple[str, str], num_first: int) -> None:
    """Two tenants in an engine that gets slower and faster, one of them later."""
    clock, chance = Clock(), random.Random(7)
    time = EngineTime(lambda: 1, lambda: COST, clock)
    accounts = [Account(time), Account(time)]
    queues = []
    for order in orders:
        work = [LONG_PROMPT] * 30 + [LONG_ANSWER] * 30
        if order == "late":
            work.reverse()
        if order == "mixed":
            chance.shuffle(work)
        queues.append(work)
    for account, queue in zip(accounts, queues, strict=True):
        for _ in queue:  # all are queued at once
            account.enter()
        if account is accounts[0]:
            while len(queue) > 60 - num_first:
                clock.now += chance.uniform(0.1, 9.0)
                account.leave(queue.pop())
    while any(queues):
        which = chance.choice([i for i in (0, 1) if queues[i]])
        clock.now += chance.uniform(0.1, 2.0)
        accounts[which].leave(queues[which].pop())
    one, other = (account.seconds for account in accounts)
    assert one == pytest.approx(other, rel=1e-9)
    assert one + other == pytest.approx(clock.now)


def test_tenants_side_by_side_pay_the_same_for_equal_work(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with running_service(tmp_path, engine, max_inflight=8) as service:
            names = ("ann", "bob", "ann", "bob")
            began = time.monotonic()
            batches = [
                submit(service, make_lines(40 if i < 2 else 80), owner=name)
                for i, name in enumerate(names)
            ]
            rows = [await until_over(service, batch_id) for batch_id in batches]
            took_s = time.monotonic() - began
            rows = [batch_row(service, row["id"]) for row in rows]
            found = [row["engine_s"] for row in rows]
            assert found[0] == pytest.approx(found[1], rel=0.05)
            assert found[2] == pytest.approx(found[3], rel=0.05)
            assert found[2] == pytest.approx(2 * found[0], rel=0.1)
            assert 0 < sum(found) <= took_s
            used = {row["name"]: row for row in usage_since(service.store, "")}
            assert used["ann"]["engine_s"] == pytest.approx(found[0] + found[2])
            assert used["bob"]["engine_s"] == pytest.approx(found[1] + found[3])

    run(scenario())


def test_a_later_batch_has_the_answers_of_an_earlier_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = OfflineBatchConfig(answer_cache=str(tmp_path / "answers"))
        answers = ModelAnswers(config, "org/model", {})
        engine = FakeEngine()
        async with running_service(tmp_path, engine, answers=answers) as service:
            lines = [
                make_line(f"r{i}", body=make_body(text, temperature=0))
                for i, text in enumerate("abab")
            ]
            for run_number in range(2):
                row = await until_over(service, submit(service, lines))
                assert row["completed"] == 4
                assert row["merged"] == (4 if run_number else 2)
                assert sorted(engine.executed) == ["r0", "r1"]
            found = result_lines(service, row, "output")
            assert all(line["from_cache"] for line in found)
            assert found[2]["merged_with"] == "r0"
            # Another owner's are computed.
            await until_over(service, submit(service, lines[:1], owner="bob"))
            assert sorted(engine.executed) == ["r0", "r0", "r1"]

    run(scenario())
