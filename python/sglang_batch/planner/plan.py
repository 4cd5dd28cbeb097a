"""A job's plan: from its prompts to the order in which they are sent.

::

    PlanRequests -> prefix tree -> output lengths -> order -> simulator -> Plan

``auto`` simulates every order with random lengths from the estimates' distribution and
takes the fastest. Of equally fast ones it takes the first in ``policies.ORDERS``. The
admissions of an order that is taken from both ends depend on the engine, so an engine
that can only follow an order is sent the admission order of the simulated run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..policies import AUTO
from .candidates import Candidates, best, orders_for
from .costs.bounds import Bounds, lower_bounds
from .lengths.output_length import Observed, OutputEstimates
from .machine_model import Machine
from .ordering.order import Order, OrderSettings
from .prefixes.prefix_tree import PrefixTree
from .requests import Int32s, Int64s, PlanRequests
from .simulator.simulator import Simulation


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
