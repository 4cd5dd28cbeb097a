"""Rows that wait on the host while a batch of other lengths runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import pytest
from scheduling_jobs import arrive_all, plan_of

from sglang_batch.planner.kv_lengths.batch_state import GROUPS, MAX_MIXED, TREE
from sglang_batch.planner.kv_lengths.length_groups import PARKS_FROM
from sglang_batch.scheduling.job_state import JobState
from sglang_batch.scheduling.kv_accounting import KvAccounting
from sglang_batch.scheduling.length_backlog import LengthBacklog, LengthBacklogs
from sglang_batch.scheduling.next_step import EngineNow, choose
from sglang_batch.scheduling.open_jobs import ScanPace
from sglang_batch.scheduling.scheduled_request import ScheduledRequest

CAPACITY, ROWS, STEPS = 4000, 24, 30


@dataclass
class Run:
    """A job of prompts of many lengths, in an engine that only counts."""

    rule: int
    row_share: float
    host_room: int
    ended: list[int] = field(default_factory=list)
    parked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        random = Random(1)
        lengths = [int(random.lognormvariate(4, 1.2)) + 2 for _ in range(150)]
        plan = plan_of(
            [(number,) * length for number, length in enumerate(lengths)],
            est_decode_steps=STEPS,
        )
        cost = replace(plan.cost, row_share=self.row_share)
        plan = replace(
            plan,
            cost=cost,
            length_rule=self.rule,
            length_key=plan.input_len,
            family=np.full(len(lengths), -1, np.int32),
        )
        self.accounting = KvAccounting(CAPACITY)
        self.accounting.extend_forecast(4 * STEPS)
        self.backlogs = LengthBacklogs(self.accounting)
        self.backlogs.host_room = self.host_room
        self.job = JobState("job", plan, 1, self.backlogs)
        arrive_all(self.job, STEPS)

    def run(self) -> Run:
        while self.job.backlog.count or self.accounting.num_running:
            self._step()
        return self

    def _step(self) -> None:
        accounting, job = self.accounting, self.job
        assert isinstance(job.backlog, LengthBacklog)
        for request in job.backlog.to_park():
            self.parked.append(request.number)
            self._remove(request)
            request.on_host = True
            job.backlog.add(request)
        for request in self._choice():
            request.on_host = False
            accounting.begin_decoding(request)
        accounting.count_decode_step()
        job.backlog.tick()
        for request in accounting.requests:
            if not request.takes_steps(accounting.clock):
                self._remove(request)
                job.forget(request)
                self.ended.append(request.number)

    def _choice(self) -> list[ScheduledRequest]:
        now = EngineNow(
            step_tokens=2048,
            decode_rows=sum(self.accounting.decoding),
            chunk=None,
            chunk_left=0,
            rows=ROWS - self.accounting.num_running,
            room=CAPACITY - sum(self.accounting.kv),
            page_size=1,
        )
        choice = choose([self.job], self.accounting, now, ScanPace())
        return [*choice.requests, *choice.from_host]

    def _remove(self, request: ScheduledRequest) -> None:
        self.accounting.remove(request)
        self.job.leave(request, offloaded=False)


def mixed_share(run: Run) -> float:
    backlog = run.job.backlog
    assert isinstance(backlog, LengthBacklog)
    return int(backlog._batches.state[0]["mixed_ticks"]) / run.accounting.clock


def test_the_old_batch_is_parked_where_long_rows_hold_up_the_others() -> None:
    run = Run(TREE, PARKS_FROM, 1 << 30).run()
    assert sorted(run.ended) == list(range(150))
    assert len(run.parked) > 20
    # The check comes before the step that passes the share.
    assert mixed_share(run) <= MAX_MIXED + 1 / run.accounting.clock


@pytest.mark.parametrize(
    ("rule", "row_share", "host_room"),
    [
        (TREE, PARKS_FROM - 1, 1 << 30),
        (TREE, 0.0, 1 << 30),
        (TREE, PARKS_FROM, 0),
        (GROUPS, PARKS_FROM, 1 << 30),
    ],
)
def test_nobody_is_parked_in_vain(rule: int, row_share: float, host_room: int) -> None:
    run = Run(rule, row_share, host_room).run()
    assert sorted(run.ended) == list(range(150))
    assert not run.parked


def test_rows_are_parked_only_while_the_host_has_room_for_all() -> None:
    run = Run(TREE, PARKS_FROM, 1 << 30)
    room = 0
    while run.job.backlog.count or run.accounting.num_running:
        room = (room + 701) % 4096
        run.backlogs.host_room = room
        held, before = run.backlogs.rows().total, len(run.parked)
        run._step()
        assert len(run.parked) == before or held <= room
    assert run.parked
