"""A job as the planner sees it, and how it would go under any policy.

Everything that plans or predicts goes through :class:`Candidates`: the job's requests
that fit, their prefix tree, the estimates of their output lengths, and the lengths with
which runs are simulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .cost_model import CostModel
from .order import ORDERS, Order, OrderSettings, make_order
from .output_length import OutputLengthEstimator
from .prefix_tree import build_prefix_tree
from .requests import Int32s, Int64s, PlanRequests
from .simulator import EngineLimits, Simulation, simulate

TIE = 0.002


@dataclass(frozen=True, slots=True)
class Machine:
    """The model on its hardware: what things cost, and how much fits."""

    cost: CostModel
    limits: EngineLimits


@dataclass(frozen=True, slots=True)
class Observed:
    """Answers of a sample: int64 request indices and their output lengths in tokens."""

    requests: Int64s
    output_len: Int32s


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """One policy's order and its simulated run."""

    order: Order
    simulation: Simulation

    @property
    def sent(self) -> Int64s:
        """Requests in the order in which they enter the engine, int64 ``[n]``."""
        if self.order.density is None:
            return self.order.requests
        return self.simulation.admission_order


def best(runs: Mapping[str, Simulation]) -> str:
    """The policy to take: the first of ``ORDERS`` that is as good as the fastest.

    A simulation is no better than its output lengths: what is within ``TIE`` of the
    fastest counts as equal, so that noise does not decide.
    """
    fastest = min(run.seconds for run in runs.values())
    good = {name for name, run in runs.items() if run.seconds <= fastest * (1 + TIE)}
    return next(name for name in ORDERS if name in good)


class Candidates:
    """The requests of a job that fit into a machine, numbered by their place there.

    Attributes:
        fits: int64 ``[n]``, their indices in the job.
        too_large: int64, indices in the job of requests that need more KV than there
            is: their prompt and known output, or one token of it, do not fit.
        requests, tree: those that fit.
        estimates: of their output lengths.
        output_len: int32 ``[n]``, the lengths that runs are simulated with: the true
            ones, or random ones from the estimates' distribution.
    """

    def __init__(
        self,
        requests: PlanRequests,
        machine: Machine,
        settings: OrderSettings,
        *,
        observed: Observed | None = None,
        true_output_len: Int32s | None = None,
        default_output_len: int = 256,
    ) -> None:
        """
        Args:
            observed: answers that the estimates may use.
            true_output_len: int32, of all the job's requests.
            default_output_len: tokens expected of a request while nothing is observed.
        """
        self.machine = machine
        self._settings = settings
        self._runs: dict[str, PolicyRun] = {}
        capacity = machine.limits.kv_capacity_tokens
        known = (
            requests.known_output_len if true_output_len is None else true_output_len
        )
        fitting = requests.input_len + np.maximum(known, 1).astype(np.int64) <= capacity
        self.fits = np.flatnonzero(fitting)
        self.too_large = np.flatnonzero(~fitting)
        self.requests = requests if fitting.all() else requests.take(self.fits)
        self.tree = build_prefix_tree(self.requests.tokens, self.requests.offsets)
        estimator = OutputLengthEstimator(
            self.tree, self.requests, default_output_len=default_output_len
        )
        if observed is not None:
            kept = fitting[observed.requests]
            place = np.cumsum(fitting) - 1
            estimator.observe(place[observed.requests[kept]], observed.output_len[kept])
        self.estimates = estimator.estimates()
        if true_output_len is not None:
            self.output_len = true_output_len[self.fits]
        else:
            drawn = estimator.draw(settings.seed)
            room = capacity - self.requests.input_len.astype(np.int64)
            drawn = np.minimum(drawn, room)
            self.output_len = np.maximum(drawn, 1).astype(np.int32)

    def order(self, policy: str) -> Order:
        """The order of one policy.

        Raises:
            ConfigError: the policy is not known.
        """
        return make_order(
            policy,
            self.tree,
            self.requests,
            self.machine.cost,
            self.estimates.est_output_len,
            self.estimates.est_output_len_sq,
            self._settings,
        )

    def run(self, policy: str) -> PolicyRun:
        """The order of one policy and how the job goes in it; made once.

        Raises:
            ConfigError: the policy is not known.
        """
        if policy not in self._runs:
            order = self.order(policy)
            simulation = simulate(
                self.tree,
                self.machine.cost,
                self.machine.limits,
                order=order.requests,
                output_len=self.output_len,
                estimate=self.estimates.est_output_len,
                estimate_sq=self.estimates.est_output_len_sq,
                max_new_tokens=self.requests.max_new_tokens,
                density=order.density,
                num_left=order.num_left,
            )
            self._runs[policy] = PolicyRun(order, simulation)
        return self._runs[policy]
