"""Batches in which lines repeat others."""

from __future__ import annotations

from pathlib import Path

import pytest
from batch_service import (
    custom_ids,
    make_service,
    result_lines,
    running_service,
    submit,
    until_over,
)
from builders import Answers, ids_of, make_body, make_line, make_request, run
from fake_engine import FakeEngine

from sglang_batch.batch_api.protocol import error_body
from sglang_batch.server.batch_run import ALONE, Suspects

pytestmark = pytest.mark.usefixtures("quick_polling")


def lines(texts: str, temperature: float = 0) -> list[str]:
    return [
        make_line(f"r{i}", body=make_body(text, temperature=temperature))
        for i, text in enumerate(texts)
    ]


def test_equal_lines_are_computed_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with running_service(tmp_path, engine) as service:
            batch_id = submit(service, lines("abacab"))
            row = await until_over(service, batch_id)
            assert row["status"] == "completed"
            assert sorted(engine.executed) == ["r0", "r1", "r3"]
            found = result_lines(service, row, "output")
            assert custom_ids(found) == ids_of(range(6))
            merged = {x["custom_id"]: x.get("merged_with") for x in found}
            assert merged == {
                "r0": None, "r1": None, "r2": "r0", "r3": None, "r4": "r0", "r5": "r1",
            }  # fmt: skip
            assert found[2]["response"]["body"] == found[0]["response"]["body"]
            assert row["completed"] == 6
            assert row["optimal_cached_share"] is not None
            # As if each had been computed.
            assert row["output_tokens"] == 6

    run(scenario())


@pytest.mark.parametrize(("temperature", "config"), [(1, {}), (0, {"dedupe": "off"})])
def test_others_are_computed_each(
    temperature: float, config: dict[str, str], tmp_path: Path
) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        async with running_service(tmp_path, engine, **config) as service:
            row = await until_over(service, submit(service, lines("aab", temperature)))
            assert sorted(engine.executed) == ids_of(range(3))
            assert row["completed"] == 3

    run(scenario())


def test_an_error_is_the_answer_of_all(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine(rejected=["r0"])
        async with running_service(tmp_path, engine) as service:
            row = await until_over(service, submit(service, lines("aab")))
            assert (row["completed"], row["failed"]) == (1, 2)
            errors = result_lines(service, row, "error")
            assert custom_ids(errors) == ["r0", "r1"]

    run(scenario())


def test_lines_that_equal_a_suspect_wait_for_it(tmp_path: Path) -> None:
    accepting = make_service(tmp_path)
    batch_id = submit(accepting, lines("babcbc"))
    accepting.store.close()
    folder = tmp_path / "batches" / batch_id
    folder.mkdir(parents=True, exist_ok=True)
    # Line 2 was in the engine when it died, and line 5 was it.
    suspects = Suspects(folder / "suspects.json")
    suspects.blame([5], 1)
    suspects.blame([5], 1)
    suspects.blame([2], 2)
    assert suspects.never() == [5] and suspects._how[2] == ALONE

    async def scenario() -> None:
        engine = FakeEngine()
        async with running_service(tmp_path, engine) as service:
            row = await until_over(service, batch_id)
            assert engine.executed == ["r1", "r2"]
            assert (row["completed"], row["failed"]) == (4, 2)
            errors = result_lines(service, row, "error")
            assert custom_ids(errors) == ["r3", "r5"]
            died = errors[0]["response"]["body"]["error"]
            assert died["code"] == "engine_died"
            assert set(died) == set(error_body("")["error"])

    run(scenario())


def test_equal_calls_of_a_wave_are_one(tmp_path: Path) -> None:
    requests = [make_request(i, text, temperature=0) for i, text in enumerate("abaab")]

    async def scenario() -> None:
        engine = FakeEngine()
        async with running_service(tmp_path, engine) as service:
            answers = Answers()
            async for request, output in service.run_requests("wave_1", requests):
                answers(request, output)
            assert sorted(engine.executed) == ["r0", "r1"]
            assert sorted(answers) == ids_of(range(5))
            assert answers["r3"].body == answers["r0"].body

    run(scenario())
