"""How long a job takes under each policy: what ``plan`` and ``simulate`` predict.

Every policy is simulated, with the true output lengths where they are known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from ..errors import InputError
from ..planner.bounds import Bounds, lower_bounds
from ..planner.candidates import Candidates, Machine, Observed, PolicyRun, best
from ..planner.density import LeafWork, leaf_densities, leaf_work, root_density
from ..planner.order import OrderSettings
from ..planner.output_length import choose_sample
from ..planner.prefix_tree import PrefixTree, build_prefix_tree
from ..planner.requests import Floats, Int32s, Int64s, PlanRequests


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
class Forecast:
    """A job of ``n`` requests that fit, and its run under each policy.

    too_large: int64, indices in the job of requests that no KV cache of this size can
        hold; they are not part of what follows.
    requests, tree: those that fit, numbered by their place among them.
    output_len: int32 ``[n]``, the lengths that were simulated.
    num_sampled: requests whose true lengths made the estimates.
    work: expected work at the leaves, by true lengths where they are known.
    kv_read_s, kv_read_shared_s: time to read the KV of all decodes, with every request
        reading all of its own and with shared prefixes read once.
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
    kv_read_s: float
    kv_read_shared_s: float
    densities: Floats
    density: float
    bounds: Bounds
    runs: dict[str, PolicyRun]

    @property
    def ranking(self) -> list[str]:
        """The policies, fastest first."""
        return sorted(self.runs, key=lambda name: self.runs[name].simulation.seconds)

    @property
    def best(self) -> str:
        """The policy that ``auto`` takes among these."""
        return best({name: run.simulation for name, run in self.runs.items()})


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
    observed = None
    if lengths.true is not None and lengths.sample_share > 0:
        observed = _sample(requests, lengths.true, lengths.sample_share, settings.seed)
    job = Candidates(
        requests,
        machine,
        settings,
        observed=observed,
        true_output_len=lengths.true,
        default_output_len=lengths.default,
    )
    if len(job.fits) == 0 < len(requests):
        raise InputError(
            "No request fits into a KV cache of "
            f"{machine.limits.kv_capacity_tokens:,} tokens: the shortest prompt has "
            f"{requests.input_len.min():,}. Give the engine more memory."
        )
    runs = {policy: job.run(policy) for policy in policies}
    estimate = job.estimates.est_output_len
    estimate_sq = job.estimates.est_output_len_sq
    if lengths.true is not None:
        estimate = job.output_len.astype(np.float64)
        estimate_sq = estimate**2
    work = leaf_work(job.tree, machine.cost, estimate, estimate_sq)
    capacity = machine.limits.kv_capacity_tokens

    def kv_read_s(shared: bool) -> float:
        cost = replace(machine.cost, shared_kv_read_once=shared)
        return float(leaf_work(job.tree, cost, estimate, estimate_sq).memory_s.sum())

    return Forecast(
        machine=machine,
        too_large=job.too_large,
        requests=job.requests,
        tree=job.tree,
        output_len=job.output_len,
        expected_output_tokens=float(estimate.sum()),
        num_sampled=0 if observed is None else len(observed.requests),
        work=work,
        kv_read_s=kv_read_s(False),
        kv_read_shared_s=kv_read_s(True),
        densities=leaf_densities(job.tree, machine.cost, work),
        density=root_density(job.tree, machine.cost, work),
        bounds=lower_bounds(job.tree, machine.cost, job.output_len, capacity),
        runs=runs,
    )


def _sample(requests: PlanRequests, true: Int32s, share: float, seed: int) -> Observed:
    """The true lengths of a share of the requests."""
    tree = build_prefix_tree(requests.tokens, requests.offsets)
    sample = choose_sample(tree, requests, share=share, seed=seed)
    return Observed(sample, true[sample])
