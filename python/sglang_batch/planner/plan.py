"""A job's plan: from its prompts to the order in which they are sent.

::

    PlanRequests -> prefix_tree -> output_length -> order -> simulator -> Plan

``auto`` simulates every order with random lengths from the estimates' distribution and
takes the fastest; of equal ones the first in ``order.ORDERS``. A dual-scan order depends on what the engine does; what is sent to an
engine that only follows an order is the admission order of the simulated run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .bounds import Bounds, lower_bounds
from .candidates import Candidates, Machine, Observed, best
from .order import ORDERS, Order, OrderSettings
from .output_length import OutputEstimates
from .prefix_tree import PrefixTree
from .requests import Int32s, Int64s, PlanRequests
from .simulator import Simulation

__all__ = ["AUTO", "Machine", "Observed", "Plan", "make_plan"]

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is decided about a job before it runs.

    policy: the order's name; for ``auto`` the one it chose.
    order: int64, the requests in the order in which they are sent. Those in
        ``too_large`` come last: the engine has the last word on them.
    too_large: int64, requests that need more KV than there is.
    scan: the order as the scheduler sees it, without ``too_large``; its requests are
        numbered as in the job.
    estimates: of the output lengths of the requests that fit.
    tree: the prefix tree of the requests that fit, numbered by their place among them.
    fits: int64, the requests that fit.
    output_len: int32, the lengths that were simulated, of the requests that fit.
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
    job = Candidates(requests, machine, settings or OrderSettings(), observed=observed)
    names = dict.fromkeys((*(ORDERS if policy == AUTO else ()), *compare))
    predicted = {name: job.run(name).simulation for name in names}
    chosen = policy
    if policy == AUTO:
        chosen = best({name: predicted[name] for name in ORDERS})
    scan = job.order(chosen)
    sent = scan.requests
    if scan.density is not None:
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
