"""Predicts how long a job takes under each policy, for ``plan`` and ``simulate``.

Every policy is simulated, with the true output lengths if they are known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from ..errors import InputError
from ..planner.costs.bounds import Bounds, lower_bounds
from ..planner.costs.tree_work import LeafWork, leaf_densities, leaf_work, root_density
from ..planner.machine_model import Machine
from ..planner.ordering.order import OrderSettings
from ..planner.output_lengths.estimates import Observed
from ..planner.output_lengths.sample import choose_sample
from ..planner.plan import Candidates, PolicyRun, best
from ..planner.prefixes.prefix_tree import PrefixTree, build_prefix_tree
from ..planner.requests import Floats, Int32s, Int64s, PlanRequests


@dataclass(frozen=True, slots=True)
class Lengths:
    """The output lengths that are known.

    true: int32 ``[n]``, the lengths to simulate with. None to draw them from the
        estimates' distribution.
    sample_share: share of the requests from whose true lengths the estimates are
        learnt.
    default: E[d] in tokens for requests of unknown length. None: see
        :func:`~..planner.output_lengths.estimates.prior_output_len`.
    """

    true: Int32s | None = None
    sample_share: float = 0.0
    default: int | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """A job of ``n`` requests that fit into the KV cache, and its run per policy.

    too_large: int64, indices in the job of the requests that do not fit. They count
        nowhere else.
    requests, tree: the requests that fit, renumbered from 0.
    output_len: int32 ``[n]``, the lengths that were simulated.
    output_tokens: sum of the true output lengths, or of their estimates.
    num_sampled: requests from whose true lengths the estimates were learnt.
    work: estimated work of each leaf, from true lengths if they are known.
    kv_read_s, kv_read_shared_s: seconds to read the KV of all decodes, if every request
        reads all of its own, and if shared prefixes are read once.
    densities: float64 ``[n]``, compute density of the request at each leaf.
    density: compute density of the whole job.
    """

    machine: Machine
    too_large: Int64s
    requests: PlanRequests
    tree: PrefixTree
    output_len: Int32s
    output_tokens: float
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
        """The policy that ``auto`` takes among all that were simulated."""
        return self.best_of(self.runs)

    def best_of(self, policies: Iterable[str]) -> str:
        """The policy that ``auto`` takes among these."""
        return best({name: self.runs[name].simulation for name in policies})


def forecast(
    requests: PlanRequests,
    machine: Machine,
    policies: Iterable[str],
    lengths: Lengths,
    settings: OrderSettings,
) -> Forecast:
    """Simulate a job under each policy. ``policies`` may be a progress bar.

    Raises:
        ConfigError: a policy is unknown.
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
    est_output_len = job.estimates.est_output_len
    est_output_len_sq = job.estimates.est_output_len_sq
    if lengths.true is not None:
        est_output_len = job.output_len.astype(np.float64)
        est_output_len_sq = est_output_len**2
    work = leaf_work(job.tree, machine.cost, est_output_len, est_output_len_sq)

    def kv_read_s(shared: bool) -> float:
        cost = replace(machine.cost, shared_kv_read_once=shared)
        return float(
            leaf_work(job.tree, cost, est_output_len, est_output_len_sq).memory_s.sum()
        )

    return Forecast(
        machine=machine,
        too_large=job.too_large,
        requests=job.requests,
        tree=job.tree,
        output_len=job.output_len,
        output_tokens=float(est_output_len.sum()),
        num_sampled=0 if observed is None else len(observed.requests),
        work=work,
        kv_read_s=kv_read_s(False),
        kv_read_shared_s=kv_read_s(True),
        densities=leaf_densities(job.tree, machine.cost, work),
        density=root_density(job.tree, machine.cost, work),
        bounds=lower_bounds(
            job.tree,
            machine.cost,
            job.output_len,
            machine.limits.kv_capacity_tokens,
            as_sglang=machine.limits.as_sglang,
        ),
        runs=runs,
    )


def _sample(requests: PlanRequests, true: Int32s, share: float, seed: int) -> Observed:
    """The true lengths of a sample of the requests."""
    tree = build_prefix_tree(requests.tokens, requests.offsets)
    sample = choose_sample(tree, requests, share=share, seed=seed)
    return Observed(sample, true[sample])
