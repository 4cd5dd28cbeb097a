"""The priority of a job reaches its rows in the dense engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from sglang_batch.dense.row_request import DenseRequest, Stopping
from sglang_batch.request import engine_request_id
from sglang_batch.srt.dense.engine import DenseEngine, OpenPlans

# SGLang answers errors with a class that its web framework wants to drop.
pytestmark = pytest.mark.filterwarnings("ignore:ORJSONResponse")


class Rows:
    """A worker that notes which rows get another priority."""

    def __init__(self, rids: list[str]) -> None:
        self.priorities = dict.fromkeys(rids, 0)

    def revise(self, revised: Callable[[DenseRequest], DenseRequest]) -> None:
        for rid, priority in self.priorities.items():
            row = DenseRequest(rid, [1], Stopping(1), priority=priority)
            self.priorities[rid] = revised(row).priority


def test_open_rows_of_a_job_and_no_others_get_its_priority() -> None:
    ours = [engine_request_id("batch_7", 0), engine_request_id("batch_7", 31)]
    ours += [f"{ours[1]}.try000002.1"]
    others = [engine_request_id("batch_77", 0), "batch_7", "a call"]
    engine = DenseEngine.__new__(DenseEngine)  # of a model, it would need a checkpoint
    engine._plans, rows = OpenPlans(), Rows([*ours, *others])
    engine._worker = rows  # type: ignore[assignment]
    asyncio.run(engine.set_priority("batch_7", 5))
    assert rows.priorities == {**dict.fromkeys(ours, 5), **dict.fromkeys(others, 0)}
    # Later ones get it from the plan.
    assert engine._plans.of(engine_request_id("batch_7", 40))[1] == 5
