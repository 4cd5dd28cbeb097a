"""How long a job takes under each policy: what ``plan`` and ``simulate`` predict.

The pieces are those of :func:`.planner.plan.make_plan`. Here every policy is simulated,
with the true output lengths where they are known, and seen from outside while it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .errors import InputError
from .planner.bounds import Bounds, lower_bounds
from .planner.density import LeafWork, leaf_densities, leaf_work, root_density
from .planner.order import Order, OrderSettings, make_order
from .planner.output_length import (
    OutputEstimates,
    OutputLengthEstimator,
    choose_sample,
)
from .planner.plan import Machine
from .planner.prefix_tree import PrefixTree, build_prefix_tree
from .planner.requests import Floats, Int32s, Int64s, PlanRequests
from .planner.simulator import Simulation, simulate


@dataclass(frozen=True, slots=True)
class Lengths:
    """What is known of the output lengths.

    true: int32 ``[n]``, what the engine will find out; None where nobody knows, and
        lengths are drawn from the estimates' distribution.
    sample_share: share of the requests whose true lengths the estimates may see.
    default: E[d] in tokens where nothing is known.
    """

    true: Int32s | None = None
    sample_share: float = 0.0
    default: int = 256


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


@dataclass(frozen=True, slots=True)
class Forecast:
    """A job of ``n`` requests that fit, and its run under each policy.

    too_large: int64, indices in the job of requests that no KV cache of this size can
        hold; they are not part of what follows.
    requests, tree: those that fit, numbered by their place among them.
    output_len: int32 ``[n]``, the lengths that were simulated.
    num_sampled: requests whose true lengths made the estimates.
    work: expected work at the leaves, by true lengths where they are known.
    densities: float64 ``[n]``, compute density of each request at a leaf of the tree.
    """

    machine: Machine
    too_large: Int64s
    requests: PlanRequests
    tree: PrefixTree
    output_len: Int32s
    expected_output_tokens: float
    num_sampled: int
    work: LeafWork
    densities: Floats
    density: float
    bounds: Bounds
    runs: dict[str, PolicyRun]

    @property
    def ranking(self) -> list[str]:
        """The policies, fastest first."""
        return sorted(self.runs, key=lambda name: self.runs[name].simulation.seconds)


def forecast(
    requests: PlanRequests,
    machine: Machine,
    policies: Iterable[str],
    lengths: Lengths,
    settings: OrderSettings,
) -> Forecast:
    """Simulate a job under each of the policies, which may be a progress bar.

    Raises:
        ConfigError: a policy is not known.
        InputError: no request fits into the machine, or a setting is out of range.
    """
    capacity = machine.limits.kv_capacity_tokens
    true = lengths.true
    fitting = _needed(requests, true) <= capacity
    too_large = np.flatnonzero(~fitting)
    if len(too_large):
        if not fitting.any():
            raise InputError(
                f"No request fits into a KV cache of {capacity:,} tokens: the smallest "
                f"needs {_needed(requests, true).min():,}. Give the engine more memory."
            )
        fits = np.flatnonzero(fitting)
        requests = requests.take(fits)
        true = None if true is None else true[fits]
    tree = build_prefix_tree(requests.tokens, requests.offsets)
    estimator = OutputLengthEstimator(
        tree, requests, default_output_len=lengths.default
    )
    num_sampled = 0
    if true is not None and lengths.sample_share > 0:
        share, seed = lengths.sample_share, settings.seed
        sample = choose_sample(tree, requests, share=share, seed=seed)
        estimator.observe(sample, true[sample])
        num_sampled = len(sample)
    estimates = estimator.estimates()
    output_len = true
    if output_len is None:
        output_len = _possible(estimator.draw(settings.seed), requests, capacity)
    runs = {
        policy: _run(policy, requests, tree, machine, estimates, output_len, settings)
        for policy in policies
    }
    estimate, estimate_sq = estimates.est_output_len, estimates.est_output_len_sq
    if true is not None:
        estimate = true.astype(np.float64)
        estimate_sq = estimate**2
    work = leaf_work(tree, machine.cost, estimate, estimate_sq)
    return Forecast(
        machine=machine,
        too_large=too_large,
        requests=requests,
        tree=tree,
        output_len=output_len,
        expected_output_tokens=float(estimate.sum()),
        num_sampled=num_sampled,
        work=work,
        densities=leaf_densities(tree, machine.cost, work),
        density=root_density(tree, machine.cost, work),
        bounds=lower_bounds(tree, machine.cost, output_len, capacity),
        runs=runs,
    )


def _run(
    policy: str,
    requests: PlanRequests,
    tree: PrefixTree,
    machine: Machine,
    estimates: OutputEstimates,
    output_len: Int32s,
    settings: OrderSettings,
) -> PolicyRun:
    estimate, estimate_sq = estimates.est_output_len, estimates.est_output_len_sq
    order = make_order(
        policy, tree, requests, machine.cost, estimate, estimate_sq, settings
    )
    simulation = simulate(
        tree,
        machine.cost,
        machine.limits,
        order=order.requests,
        output_len=output_len,
        estimate=estimate,
        estimate_sq=estimate_sq,
        max_new_tokens=requests.max_new_tokens,
        density=order.density,
        num_left=order.num_left,
    )
    return PolicyRun(order, simulation)


def _needed(requests: PlanRequests, true: Int32s | None) -> Int64s:
    """KV tokens that each request needs at least, int64 ``[n]``."""
    known = requests.known_output_len if true is None else true
    needed: Int64s = requests.input_len.astype(np.int64) + np.maximum(known, 1)
    return needed


def _possible(drawn: Int32s, requests: PlanRequests, capacity: int) -> Int32s:
    """Drawn lengths, cut to what the KV cache can hold."""
    cut = np.minimum(drawn, capacity - requests.input_len)
    lengths: Int32s = np.maximum(cut, 1).astype(np.int32)
    return lengths
