"""A job's plan: from its prompts to the order in which they are sent.

::

    PlanRequests -> prefix_tree -> output_length -> order -> simulator -> Plan

``auto`` simulates every order with random lengths from the estimates' distribution and
takes the fastest. A dual-scan order depends on what the engine does; what is sent to an
engine that only follows an order is the admission order of the simulated run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .bounds import Bounds, lower_bounds
from .cost_model import CostModel
from .order import ORDERS, Order, OrderSettings, make_order
from .output_length import OutputEstimates, OutputLengthEstimator
from .prefix_tree import PrefixTree, build_prefix_tree
from .requests import Bools, Int32s, Int64s, PlanRequests
from .simulator import EngineLimits, Simulation, simulate

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Machine:
    """The model on its hardware: what things cost, and how much fits."""

    cost: CostModel
    limits: EngineLimits


@dataclass(frozen=True, slots=True)
class Plan:
    """What is decided about a job before it runs.

    policy: the order's name; for ``auto`` the one it chose.
    order: int64, the requests in the order in which they are sent. Those in
        ``too_large`` come last: the engine has the last word on them.
    too_large: int64, requests that need more KV than there is.
    scan: the order as the scheduler sees it, without ``too_large``; its requests are
        numbered as in the job.
    estimates: of the requests' output lengths.
    tree: the prefix tree of the requests that fit, numbered by their place among them.
    fits: int64, the requests that fit.
    predicted: by policy, the simulated run; empty unless something was simulated.
    """

    policy: str
    order: Int64s
    too_large: Int64s
    scan: Order
    estimates: OutputEstimates
    tree: PrefixTree
    fits: Int64s
    output_len: Int32s
    predicted: dict[str, Simulation] = field(default_factory=dict)

    def bounds(self, machine: Machine) -> Bounds:
        """Lower bounds by the lengths that were simulated."""
        capacity = machine.limits.kv_capacity_tokens
        return lower_bounds(self.tree, machine.cost, self.output_len, capacity)


@dataclass(frozen=True, slots=True)
class Observed:
    """Answers of a sample: int64 request indices and their output lengths in tokens."""

    requests: Int64s
    output_len: Int32s


def make_plan(
    requests: PlanRequests,
    machine: Machine,
    policy: str = AUTO,
    *,
    settings: OrderSettings | None = None,
    observed: Observed | None = None,
    compare: tuple[str, ...] = (),
) -> Plan:
    """Plan a job.

    Args:
        observed: answers known already; they make the estimates.
        compare: policies to simulate in any case.

    Raises:
        ConfigError: the policy is not known.
    """
    settings = settings or OrderSettings()
    fitting = _fitting(requests, machine.limits.kv_capacity_tokens)
    fits, too_large = np.flatnonzero(fitting), np.flatnonzero(~fitting)
    job = requests if fitting.all() else requests.take(fits)
    tree = build_prefix_tree(job.tokens, job.offsets)
    estimator = OutputLengthEstimator(tree, job)
    if observed is not None:
        place = np.cumsum(fitting) - 1
        kept = fitting[observed.requests]
        estimator.observe(place[observed.requests[kept]], observed.output_len[kept])
    drawn = _drawn(estimator, job, machine.limits.kv_capacity_tokens, settings.seed)
    planner = _Planner(job, tree, machine, estimator.estimates(), drawn, settings)
    candidates = ORDERS if policy == AUTO else (policy,)
    for name in dict.fromkeys((*candidates, *compare)):
        planner.consider(name, simulated=len(candidates) > 1 or name in compare)
    chosen = planner.fastest() if policy == AUTO else policy
    scan = planner.orders[chosen]
    return Plan(
        policy=chosen,
        order=np.concatenate([fits[planner.sent(chosen)], too_large]),
        too_large=too_large,
        scan=scan.renumbered(fits),
        estimates=planner.estimates,
        tree=tree,
        fits=fits,
        output_len=drawn,
        predicted=planner.simulations,
    )


def _fitting(requests: PlanRequests, kv_capacity: int) -> Bools:
    """Which requests can run at all: prompt and known output, or one token, fit."""
    least = np.maximum(requests.known_output_len, 1).astype(np.int64)
    fitting: Bools = requests.input_len + least <= kv_capacity
    return fitting


def _drawn(
    estimator: OutputLengthEstimator, job: PlanRequests, kv_capacity: int, seed: int
) -> Int32s:
    """Random output lengths that could be, int32 ``[n]``."""
    drawn = np.minimum(estimator.draw(seed), kv_capacity - job.input_len)
    lengths: Int32s = np.maximum(drawn, 1).astype(np.int32)
    return lengths


class _Planner:
    """Orders and simulations of one job, each made once."""

    def __init__(
        self,
        job: PlanRequests,
        tree: PrefixTree,
        machine: Machine,
        estimates: OutputEstimates,
        output_len: Int32s,
        settings: OrderSettings,
    ) -> None:
        self.estimates = estimates
        self.orders: dict[str, Order] = {}
        self.simulations: dict[str, Simulation] = {}
        self._job = job
        self._tree = tree
        self._machine = machine
        self._output_len = output_len
        self._settings = settings

    def consider(self, policy: str, *, simulated: bool) -> None:
        order = make_order(
            policy,
            self._tree,
            self._job,
            self._machine.cost,
            self.estimates.est_output_len,
            self.estimates.est_output_len_sq,
            self._settings,
        )
        self.orders[policy] = order
        if simulated or order.density is not None:
            self.simulations[policy] = simulate(
                self._tree,
                self._machine.cost,
                self._machine.limits,
                order=order.requests,
                output_len=self._output_len,
                estimate=self.estimates.est_output_len,
                estimate_sq=self.estimates.est_output_len_sq,
                max_new_tokens=self._job.max_new_tokens,
                density=order.density,
                num_left=order.num_left,
            )

    def fastest(self) -> str:
        return min(self.simulations, key=lambda name: self.simulations[name].seconds)

    def sent(self, policy: str) -> Int64s:
        """The order for an engine that only follows one."""
        if self.orders[policy].density is None:
            return self.orders[policy].requests
        return self.simulations[policy].admission_order
