"""A job's plan: from its prompts to the order in which they are sent.

::

    PlanRequests -> prefix tree -> output lengths -> order -> simulator -> Plan

:class:`Candidates` is a job with everything that is known of it, and its simulated run under
any policy. Plans and predictions are both made from it.

``auto`` simulates every order with random lengths from the estimates' distribution and
takes the fastest. Of equally fast ones it takes the first in ``config.ORDERS``. The
admissions of an order that is taken from both ends depend on the engine, so an engine
that can only follow an order is sent the admission order of the simulated run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..config import AUTO, DENSE_ORDERS, ORDERS, PAGED_ORDERS
from .costs.bounds import Bounds, lower_bounds
from .machine_model import Machine
from .ordering.order import Order, OrderSettings
from .ordering.order_functions import make_order
from .output_lengths.estimates import Observed, OutputEstimates, OutputLengthEstimator
from .prefixes.prefix_tree import PrefixTree, build_prefix_tree
from .requests import Int32s, Int64s, PlanRequests
from .simulator.simulator import Simulation, simulate

TIE = 0.002
# By which lengths may differ from their estimates while there is no answer.
GUESSED_SCALES = (1.0, 0.5, 0.25, 2.0, 0.1)


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """One policy's order and its simulated run."""

    order: Order
    simulation: Simulation

    @property
    def sent(self) -> Int64s:
        """Requests in the order in which they enter the engine, int64 ``[n]``."""
        if not self.order.is_dynamic:
            return self.order.requests
        return self.simulation.admission_order


def orders_for(machine: Machine) -> tuple[str, ...]:
    """The orders among which ``auto`` chooses."""
    return DENSE_ORDERS if machine.limits.dense else PAGED_ORDERS


def best(*draws: Mapping[str, Simulation]) -> str:
    """The policy that ``auto`` takes: the first of ``ORDERS`` as good as the fastest.

    A simulation is no better than its output lengths, so policies within ``TIE`` of the
    best count as equal, and noise does not decide.

    Args:
        draws: the runs of all policies, for each draw of output lengths. With several, the
            policy is taken that loses least to the fastest of each draw, in the mean.
    """
    loss = dict.fromkeys(draws[0], 0.0)
    for runs in draws:
        fastest = min(run.seconds for run in runs.values())
        for name, run in runs.items():
            if fastest:
                loss[name] += (run.seconds / fastest - 1.0) / len(draws)
    least = min(loss.values()) + TIE
    return next(name for name in ORDERS if name in loss and loss[name] <= least)


class Candidates:
    """The requests of a job that fit into a machine, renumbered from 0.

    Attributes:
        fits: int64 ``[n]``, their indices in the job.
        too_large: int64, indices in the job of requests that need more KV than the
            machine has: the prompt and the known output, or one token of it, do not
            fit.
        requests, tree: the requests that fit.
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
        default_output_len: int | None = None,
    ) -> None:
        """
        Args:
            observed: answers that the estimates may use.
            true_output_len: int32, of all requests of the job.
            default_output_len: estimated tokens of a request until an answer was
                observed. None: see :func:`~.output_lengths.estimates.prior_output_len`.

        Raises:
            InputError: ``default_output_len`` is below 1, or an observed length is
                negative.
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
            free = capacity - self.requests.input_len.astype(np.int64)
            self.output_len = np.maximum(np.minimum(drawn, free), 1).astype(np.int32)

    def order(self, policy: str) -> Order:
        """The order of one policy.

        Raises:
            ConfigError: the policy is unknown.
        """
        return make_order(
            policy,
            self.tree,
            self.requests,
            self.machine.cost,
            self.estimates.est_output_len,
            self.estimates.est_output_len_sq,
            self._settings,
            self.machine.limits.kv_capacity_tokens,
        )

    def run(self, policy: str) -> PolicyRun:
        """The order of one policy and the job's simulated run in it, computed once.

        Raises:
            ConfigError: the policy is unknown.
        """
        if policy not in self._runs:
            order = self.order(policy)
            simulation = simulate(
                self.tree,
                self.machine.cost,
                self.machine.limits,
                order=order,
                output_len=self.output_len,
                est_output_len=self.estimates.est_output_len,
                est_output_len_sq=self.estimates.est_output_len_sq,
                max_new_tokens=self.requests.max_new_tokens,
            )
            self._runs[policy] = PolicyRun(order, simulation)
        return self._runs[policy]


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions about a job before it runs.

    policy: the order's name. For ``auto``, the order that it chose.
    order: int64, the requests in the order in which they are sent. Those in
        ``too_large`` come last: the engine decides about them.
    too_large: int64, requests that need more KV than the machine has.
    scan: the order for the scheduler, without ``too_large``. Its requests are numbered
        as in the job.
    estimates: output lengths of the requests that fit.
    tree: the prefix tree of the requests that fit, numbered from 0 among themselves.
    fits: int64, the requests that fit.
    output_len: int32, the lengths that were simulated, of the requests that fit.
    predicted: by policy, the simulated run. Empty unless something was simulated.
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
        """Lower bounds of the makespan for the lengths that were simulated."""
        return lower_bounds(
            self.tree,
            machine.cost,
            self.output_len,
            machine.limits.kv_capacity_tokens,
            as_sglang=machine.limits.as_sglang,
        )


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
        observed: answers that the estimates are learnt from.
        compare: further policies to simulate.

    Raises:
        ConfigError: a policy is unknown.
    """
    job = Candidates(requests, machine, settings or OrderSettings(), observed=observed)
    simulated = orders_for(machine) if policy == AUTO else ()
    names = dict.fromkeys((*simulated, *compare))
    predicted = {name: job.run(name).simulation for name in names}
    chosen = policy
    if policy == AUTO:
        chosen = best({name: predicted[name] for name in simulated})
    scan = job.order(chosen)
    sent = scan.requests
    if scan.is_dynamic:
        predicted[chosen] = job.run(chosen).simulation
        sent = job.run(chosen).sent
    return Plan(
        policy=chosen,
        order=np.concatenate([job.fits[sent], job.too_large]),
        too_large=job.too_large,
        scan=scan.renumbered(job.fits),
        estimates=job.estimates,
        tree=job.tree,
        fits=job.fits,
        output_len=job.output_len,
        predicted=predicted,
    )
