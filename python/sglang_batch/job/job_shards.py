"""The shards of a running job, one for each replica of the engine.

The first cut has all replicas end together by the estimates so far. Later cuts move requests
that have not been sent, by better estimates, and as replicas get slower, leave and join.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError
from ..planner.compiled import jit
from ..planner.costs.tree_work import LeafWork, leaf_work
from ..planner.machine_model import Machine
from ..planner.output_lengths.estimates import OutputEstimates
from ..planner.plan import Plan
from ..planner.prefixes.prefix_tree import PrefixTree
from ..planner.requests import Bools, Floats, Int32s, Int64s, PlanRequests
from ..planner.sharding.partition import ShardJob, partition, shard_jobs
from ..planner.sharding.rebalance import LeafState, rebalance
from ..planner.sharding.speeds import ShardSpeeds, speeds_for
from ..scheduling.job_plan import JobPlan, job_plan


@dataclass(frozen=True, slots=True)
class JobProgress:
    """Where a running job's requests are, each array by number.

    replica: int32, the replica that each request was sent to, or is planned for. -1 for
        requests that no plan had yet.
    stays: bool, the requests that were sent, or may be before the next plan is in force.
    left: float64, the share of its work that is still to be done, 0 once it is answered.
    whole: whether the next plan is one of all requests of the job.
    """

    replica: Int32s
    stays: Bools
    left: Floats
    whole: bool

    def take(self, numbers: Int64s) -> JobProgress:
        """That of some requests, in the order of ``numbers``."""
        return JobProgress(
            self.replica[numbers], self.stays[numbers], self.left[numbers], self.whole
        )


class JobShards:
    """Cuts the planned requests of a job, which are numbered 0..n-1 here.

    Args:
        tree: the prefix tree of the requests.
        requests: without their prompts.
        replica: int32 ``[n]``, the replica of each request in the last plan, -1 for those
            that it did not have. None if there was none.
        speeds: of the replicas. None: all are as fast, as if none is there.

    Attributes:
        each: the shards.
        speeds: of the replicas when the job was last cut.

    Raises:
        ConfigError: there are not as many speeds as shards, or a request has a replica that
            is none of them.
    """

    def __init__(
        self,
        tree: PrefixTree,
        requests: PlanRequests,
        machine: Machine,
        num_shards: int,
        estimates: OutputEstimates,
        replica: Int32s | None,
        speeds: ShardSpeeds | None = None,
    ) -> None:
        self._tree = tree
        self._requests = requests
        self._machine = machine
        self.speeds = speeds_for(speeds, num_shards)
        n = len(requests)
        # The far end of a shard that has no order yet is that of the tree.
        self._far = tree.position.astype(np.float64)
        self._left_out = np.zeros(n, np.bool_)
        last = -1 if replica is None else int(replica.max(initial=-1))
        if last >= num_shards:
            raise ConfigError(
                f"A request has replica {last}, but there are {num_shards}; replicas keep "
                "their numbers, with a speed of 0 once they have left."
            )
        self.each: list[ShardJob] = []
        if num_shards == 1:
            self._shard = np.zeros(n, np.int32)
            self.each = [ShardJob(np.arange(n), tree, requests)]
            return
        there = self.speeds.there
        self._shard = partition(
            tree,
            machine.cost,
            self._work(estimates),
            num_shards,
            self.speeds if there.any() else None,
        ).shard
        if replica is not None:
            _follow(tree.lcp, tree.order, replica, there, self._shard)
        self.each = self._cut()

    def ordered(self, side: Int64s) -> None:
        """These requests, int64, are a side of a shard, in the order of sending."""
        self._far[side] = (1 + np.arange(len(side))) / max(1, len(side))

    def rebalance(
        self,
        estimates: OutputEstimates,
        progress: JobProgress | None,
        speeds: ShardSpeeds | None = None,
    ) -> None:
        """Move requests so that all shards end together, and cut the job again.

        Args:
            progress: its arrays are by request, ``[n]``. None: all may move.
            speeds: of the replicas now, at least as many as before. None: as before.

        Raises:
            ConfigError: there are speeds of fewer replicas than before.
        """
        if speeds is not None:
            if len(speeds) < len(self.speeds):
                raise ConfigError(
                    f"There are speeds of {len(speeds)} replicas, but the job has "
                    f"{len(self.speeds)} shards; give 0 for those that left."
                )
            self.speeds = speeds
        num_shards = len(self.speeds)
        if num_shards == 1:
            return
        if progress is None:
            n = len(self._shard)
            progress = JobProgress(
                self._shard, np.zeros(n, np.bool_), np.ones(n), whole=False
            )
        by_leaf = self._tree.order
        moved = np.empty_like(self._shard)
        moved[by_leaf] = rebalance(
            self._tree,
            self._machine.cost,
            self._with_weight_reads(self._work(estimates), estimates),
            LeafState(
                self._shard[by_leaf],
                ~progress.stays[by_leaf],
                progress.left[by_leaf],
                self._far[by_leaf],
            ),
            num_shards,
            self.speeds,
        )
        if np.array_equal(moved, self._shard) and len(self.each) == num_shards:
            return
        self._shard = moved
        if progress.whole:
            # Requests that ended are left out of the next plans, which makes these small. The
            # schedulers have forgotten that they ended, so none comes back.
            for members in self._by_shard(self._tree.order):
                # A prefix is one of two requests or more, so a neighbour of each one to
                # come stays, on both sides.
                needed = np.zeros(len(members) + 2, np.bool_)
                stays = progress.left[members] != 0.0
                for shift in range(3):
                    needed[shift : shift + len(members)] |= stays
                self._left_out[members[~needed[1:-1]]] = True
        self.each = self._cut()

    def _cut(self) -> list[ShardJob]:
        """The shards. Those that have the same requests as before are the same."""
        parts = self._by_shard(np.arange(len(self._shard)))
        each = dict(enumerate(self.each))
        changed = [
            shard
            for shard, part in enumerate(parts)
            if shard not in each or not np.array_equal(part, each[shard].index)
        ]
        new = shard_jobs(self._tree, self._requests, [parts[i] for i in changed])
        each.update(zip(changed, new, strict=True))
        return [each[shard] for shard in range(len(parts))]

    def _by_shard(self, requests: Int64s) -> list[Int64s]:
        """Those of the requests that each shard plans, in the same order."""
        shard = np.where(self._left_out, -1, self._shard)[requests]
        ends = np.cumsum(np.bincount(shard + 1, minlength=len(self.speeds) + 1))
        by_shard = requests[np.argsort(shard, kind="stable")]
        return np.split(by_shard, ends[:-1])[1:]

    def _work(self, estimates: OutputEstimates) -> LeafWork:
        return leaf_work(
            self._tree,
            self._machine.cost,
            estimates.est_output_len,
            estimates.est_output_len_sq,
        )

    def _with_weight_reads(
        self, work: LeafWork, estimates: OutputEstimates
    ) -> LeafWork:
        """Add each request's share of the weights that its decode steps read: most of a
        small batch's time."""
        tree, limits = self._tree, self._machine.limits
        lengths = estimates.est_output_len[tree.order]
        own = tree.input_len - tree.depth[tree.leaf_parent]
        kv = float((own + lengths / 2).mean()) if len(own) else 1.0
        rows = max(1.0, limits.kv_capacity_tokens / max(kv, 1.0))
        rows = min(rows, limits.max_running or rows)
        token_s = float(self._machine.cost.weight_read_time_s) / rows
        return work._replace(memory_s=work.memory_s + token_s * lengths)


@jit
def _follow(
    lcp: Int32s, order: Int64s, replica: Int32s, there: Bools, shard: Int32s
) -> None:
    """Keep requests in the shards that they were in, and put others with their siblings.

    Args:
        replica: int32 by request, -1 for those that follow the request that has most of their
            prompt, if any shares some.
        there: bool by replica. Nobody follows to one that is not there.
        shard: int32 by request, is changed.
    """
    n = len(lcp)
    most = np.zeros(n, np.int32)
    for direction in (1, -1):
        sibling, common = -1, 0
        for i in range(n):
            leaf = i if direction == 1 else n - 1 - i
            # What it shares with the leaf before it in this direction.
            at = leaf if direction == 1 else leaf + 1
            common = min(common, lcp[at]) if at < n else 0
            request = order[leaf]
            if replica[request] >= 0:
                shard[request] = replica[request]
                if there[replica[request]]:
                    sibling = replica[request]
                    common = np.iinfo(np.int32).max
            elif common > most[leaf]:
                most[leaf] = common
                shard[request] = sibling


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The requests that one replica runs, and their order.

    plan: refers to its requests by their positions in ``numbers``.
    numbers: int64 ``[n]``, the number of each request in the job.
    too_large: int64, numbers of requests that need more KV than the replica has.
    """

    plan: Plan
    numbers: Int64s
    too_large: Int64s

    @property
    def both_ends(self) -> bool:
        """Whether requests are taken from both ends of the order."""
        return self.plan.scan.density is not None

    @property
    def sides(self) -> tuple[Int64s, Int64s]:
        """Numbers of the left and the right side, int64, each in the order of sending. An
        order that is not taken from both ends is all left."""
        scan = self.plan.scan
        order = self.numbers[scan.requests]
        num_left = scan.num_left if self.both_ends else len(order)
        return order[:num_left], order[num_left:][::-1]

    def for_scheduler(self, machine: Machine) -> JobPlan:
        return job_plan(self.plan, self.numbers, machine)
