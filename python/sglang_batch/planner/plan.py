"""A job's plan: from its prompts to the order in which they are sent.

::

    PlanRequests -> prefix tree -> output lengths -> order -> simulator -> Plan

:class:`Candidates` is a job with everything that is known of it, and its simulated run under
any policy, for predictions. ``job.job_planner`` makes the plans of a running job.

``auto`` simulates each order of :func:`orders_for` with draws of random lengths from the
estimates' distribution and takes the one that loses least, in the mean over the draws. Of equally
fast ones it takes the first in ``config.ORDERS``. It chooses again as answers arrive. The
admissions of an order that is taken from both ends depend on the engine, so an engine
that can only follow an order is sent the admission order of the simulated run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ..config import DENSE_ORDERS, ORDERS, PAGED_ORDERS, POLICY_TABLE
from .machine_model import Machine
from .ordering.order import Order, OrderSettings
from .ordering.order_functions import make_order
from .output_lengths.estimates import Observed, OutputEstimates, OutputLengthEstimator
from .prefixes.prefix_tree import PrefixTree, build_prefix_tree
from .requests import Int32s, PlanRequests
from .simulator.simulator import Simulation, simulate

TIE = 0.001
# Shares of time: by which another order is better than that of a running job where it takes its
# place, and by which an order loses in the first draws where it is not simulated with others.
STAY = 0.01
HOPELESS = 0.2
# By which lengths may differ from their estimates while there is no answer.
GUESSED_SCALES = (1.0, 0.5, 0.25, 2.0, 0.1)


def orders_for(machine: Machine) -> tuple[str, ...]:
    """The orders among which ``auto`` chooses."""
    if machine.limits.dense:
        return DENSE_ORDERS
    if machine.cost.row_share > 1 or machine.cost.padded:
        return PAGED_ORDERS
    # A row is never longer than all together, so that no step is faster for similar lengths.
    return tuple(name for name in PAGED_ORDERS if not POLICY_TABLE[name].by_length)


def choose(
    orders: Mapping[str, Order],
    draws: Iterable[Int32s],
    run: Callable[[Order, Int32s], Simulation],
    present: str | None = None,
) -> str:
    """The policy of :func:`best`. Equal orders are simulated once, and those that lose too much
    with the first draws not with the others.

    Args:
        orders: of all policies, the simplest first.
        draws: output lengths to simulate with, int32 ``[n]`` each.
        run: simulates an order with output lengths.
        present: as of :func:`best`.
    """
    left: dict[str, Order] = {}
    known: dict[bytes, str] = {}
    for name, order in orders.items():
        key = order.requests.tobytes()
        if order.is_dynamic or known.setdefault(key, name) == name:
            left[name] = order
        elif name == present:
            present = known[key]
    runs: list[dict[str, Simulation]] = []
    for lengths in draws:
        runs.append({name: run(order, lengths) for name, order in left.items()})
        loss = losses(*({name: each[name] for name in left} for each in runs))
        least = min(loss.values()) + HOPELESS
        left = {x: left[x] for x in left if loss[x] <= least or x == present}
    return best(
        *({name: each[name] for name in left} for each in runs), present=present
    )


def losses(*draws: Mapping[str, Simulation]) -> dict[str, float]:
    """The share of time that each policy loses to the fastest of each draw, in the mean."""
    loss = dict.fromkeys(draws[0], 0.0)
    for runs in draws:
        fastest = min(run.seconds for run in runs.values())
        for name, run in runs.items():
            if fastest:
                loss[name] += (run.seconds / fastest - 1.0) / len(draws)
    return loss


def best(*draws: Mapping[str, Simulation], present: str | None = None) -> str:
    """The policy that ``auto`` takes: the first of ``ORDERS`` within ``TIE`` of the fastest, as a
    simulation is no better than its output lengths.

    Args:
        draws: the runs of all policies, for each draw of output lengths. With several, the
            policy is taken that loses least to the fastest of each draw, in the mean.
        present: the policy by which the job runs. It stays unless another gains ``STAY``.
    """
    loss = losses(*draws)
    if present in loss and loss[present] <= min(loss.values()) + STAY:
        return present
    least = min(loss.values()) + TIE
    return next(name for name in ORDERS if name in loss and loss[name] <= least)


class Candidates:
    """The requests of a job that fit into a machine, renumbered from 0.

    Attributes:
        fits, too_large: int64, indices in the job of those that fit, and of those whose prompt
            and known output, or one token of it, need more KV than the machine has.
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
        """Args:
            observed: answers that the estimates may use.
            true_output_len: int32, of all requests of the job.
            default_output_len: as of :class:`OutputLengthEstimator`.

        Raises:
            InputError: ``default_output_len`` is below 1, or a length is negative.
        """
        self.machine = machine
        self._settings = settings
        capacity = machine.limits.kv_capacity_tokens
        known = (
            requests.known_output_len if true_output_len is None else true_output_len
        )
        fitting = requests.input_len + np.maximum(known, 1).astype(np.int64) <= capacity
        self.fits = np.flatnonzero(fitting)
        self.too_large = np.flatnonzero(~fitting)
        self.requests = requests if fitting.all() else requests.take(self.fits)
        self.tree = build_prefix_tree(
            self.requests.tokens,
            self.requests.offsets,
            count_media=machine.cost.encoder_token_time_s > 0,
        )
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
        """The order of one policy. Raises ConfigError if it is unknown."""
        return make_order(
            policy,
            self.tree,
            self.requests,
            self.machine.cost,
            self.estimates,
            self._settings,
            self.machine.limits.kv_capacity_tokens,
        )

    def run(self, policy: str) -> Simulation:
        """The job's simulated run in the order of one policy, or ConfigError as of :meth:`order`."""
        return simulate(
            self.tree,
            self.machine.cost,
            self.machine.limits,
            order=self.order(policy),
            output_len=self.output_len,
            est_output_len=self.estimates.est_output_len,
            est_output_len_sq=self.estimates.est_output_len_sq,
            max_new_tokens=self.requests.max_new_tokens,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The order of requests that are numbered from 0, for the scheduler.

    policy: the order's name. For ``auto``, of the order that it chose.
    estimates, tree: output lengths and prefix tree of the requests.
    """

    policy: str
    scan: Order
    estimates: OutputEstimates
    tree: PrefixTree
