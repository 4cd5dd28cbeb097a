"""A shape in one order, simulated as a job that learns from its answers; and the best guess."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from sglang_batch.config import AUTO, OfflineBatchConfig
from sglang_batch.job.answer_feedback import AnswerFeedback
from sglang_batch.job.job_planner import JobPlanner
from sglang_batch.job.job_shards import JobProgress
from sglang_batch.planner.ordering.order import Order
from sglang_batch.planner.output_lengths.estimates import OutputEstimates
from sglang_batch.planner.plan import Plan, orders_for
from sglang_batch.planner.requests import UNKNOWN, Int32s
from sglang_batch.planner.simulator.simulator import Simulation, simulate

from .shapes import Shape


def measure(shape: Shape) -> tuple[dict[str, float], float, str, float]:
    """Simulated seconds of each order and of `auto`, its choice, seconds of planning."""
    began = time.perf_counter()
    auto = planned(shape, AUTO)
    took = time.perf_counter() - began
    runs = {
        policy: seconds(shape, planned(shape, policy).scan, auto.estimates)
        for policy in orders_for(shape.machine)
    }
    return runs, seconds(shape, auto.scan, auto.estimates), auto.policy, took


def best_guess(
    shape: Shape, runs: dict[str, float], seed: tuple[int, ...], redraws: int
) -> str:
    """The order that takes least in the mean of other lengths drawn in the same way."""
    if shape.known == "all":
        return min(runs, key=lambda policy: runs[policy])
    known = shape.requests.known_output_len
    total = dict.fromkeys(runs, 0.0)
    for number in range(redraws):
        drawn = shape.answers.draw(np.random.default_rng((*seed, number)))
        drawn = np.where(known == UNKNOWN, drawn, known).astype(np.int32)
        room = shape.machine.limits.kv_capacity_tokens - 64 - shape.requests.input_len
        other = replace(shape, true_output_len=np.minimum(drawn, room))
        for policy in runs:
            plan = planned(other, policy)
            total[policy] += seconds(other, plan.scan, plan.estimates)
    return min(total, key=lambda policy: total[policy])


def planned(shape: Shape, policy: str) -> Plan:
    """The last plan of a job, with its order from the first request to the last."""
    n = len(shape.requests)
    planner = JobPlanner(
        shape.requests,
        np.arange(n),
        shape.machine,
        OfflineBatchConfig(policy=policy),
    )
    feedback = AnswerFeedback(planner.sample, planner.num_unknown)
    (last,) = planner.plans()
    plan = last.plan
    left = np.ones(n)
    while planner.num_unknown:
        run = simulated(shape, plan.scan, plan.estimates)
        if not answers_until_due(feedback, run, shape.true_output_len, left):
            break
        planner.observe(*feedback.pop_answers())
        begun = np.flatnonzero(left < 1)
        begun = begun[np.argsort(run.prompt_step[begun], kind="stable")]
        replica, whole = np.zeros(n, np.int32), True
        (last,) = planner.plans(JobProgress(replica, left < 1, left.copy(), whole))
        scan = last.plan.scan.beginning_with(begun)
        if scan.is_dynamic:
            # The simulator takes it from its ends from the first step on.
            run = simulated(shape, scan, last.plan.estimates)
            scan = Order(run.admission_order).beginning_with(begun)
        plan = replace(last.plan, scan=scan)
    return plan


def answers_until_due(
    feedback: AnswerFeedback, run: Simulation, output_len: Int32s, left: np.ndarray
) -> bool:
    """Pass on the answers of a run, by its steps, until a new plan is due. False if none is.

    Args:
        left: float64 ``[n]``, of ``JobProgress``, is changed. What began stays as it is.
    """
    n = len(left)
    steps = np.concatenate([run.prompt_step, run.last_step])
    for event in np.argsort(steps, kind="stable").tolist():
        number = event % n
        if event < n and left[number] == 1.0:
            left[number] = 0.5
            feedback.add_started(0, number)
        elif event >= n and left[number] > 0.0:
            left[number] = 0.0
            feedback.add_answer(number, int(output_len[number]))
            if feedback.is_due:
                return True
    return False


def seconds(shape: Shape, order: Order, estimates: OutputEstimates) -> float:
    """The simulated run of an order.

    Args:
        estimates: by which requests are admitted. The scheduler learns them under any policy,
            so all runs have the same.
    """
    return simulated(shape, order, estimates).seconds


def simulated(shape: Shape, order: Order, estimates: OutputEstimates) -> Simulation:
    requests = shape.requests
    return simulate(
        shape.tree,
        shape.machine.cost,
        shape.machine.limits,
        order=order,
        output_len=shape.true_output_len,
        est_output_len=estimates.est_output_len,
        est_output_len_sq=estimates.est_output_len_sq,
        max_new_tokens=requests.max_new_tokens,
    )
