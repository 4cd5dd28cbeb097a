"""Searches the best way to run a job on a box of devices.

All possible ways are ranked by the closed form of :mod:`.steady_state` with the job's
means. The best of them are simulated on the job itself, with its sharing and its lengths: one
shard of it, the one with most work, on one replica or attention rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter

import numpy as np

from ...errors import ConfigError
from ..costs.cost_model import CostModel
from ..costs.hardware import Parallelism
from ..costs.step_costs import step_costs
from ..costs.tree_work import leaf_work
from ..machine_model import EngineLimits, Machine, second_pool
from ..ordering.order import OrderSettings
from ..plan import Candidates, best
from ..requests import Int32s, Int64s, PlanRequests
from ..sharding.partition import partition
from ..simulator.simulator import Simulation
from .steady_state import RequestMix, SteadyState, rank_kv_tokens, steady_state
from .ways import MOST_ROWS, STEP_TOKENS, Box, ModelParts, Precision, Way, possible_ways

# Ways that are simulated, of each kind of precision.
SIMULATED = 4
# Orders in which they are.
POLICIES = ("dfs", "dual-scan")


@dataclass(frozen=True, slots=True)
class Outlook:
    """A way by the closed form, and the seconds of the whole job. An impossible one has
    none, for the reason that ``refusal`` gives."""

    way: Way
    steady: SteadyState | None
    seconds: float
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class SimulatedWay:
    """A way with the simulated run of the shard with most work, which is the time of the
    job, in the order that took least."""

    box: Box
    outlook: Outlook
    seconds: float
    policy: str
    simulation: Simulation

    @property
    def way(self) -> Way:
        return self.outlook.way

    @property
    def price(self) -> float | None:
        """Of the whole job, None if that of a device is not known."""
        if self.box.price_per_hour is None:
            return None
        return self.seconds / 3600 * self.box.devices * self.box.price_per_hour

    @property
    def arguments(self) -> list[str]:
        """SGLang's options."""
        return self.way.arguments(self.box.hardware)


@dataclass(frozen=True, slots=True)
class Choices:
    """The findings for one box: simulated ways, fastest first, and the best of each spread and
    precision by the closed form, fastest first, the impossible ones last."""

    box: Box
    simulated: list[SimulatedWay]
    outlooks: list[Outlook]

    @property
    def chosen(self) -> SimulatedWay | None:
        """The fastest way that keeps the checkpoint's answers, or None."""
        return next(
            (x for x in self.simulated if not x.way.precision.changes_answers), None
        )

    @property
    def base(self) -> SimulatedWay | None:
        """The way with which all are compared: the choice, or the fastest without one."""
        return self.chosen or next(iter(self.simulated), None)


class Chooser:
    """The ways to run one job.

    Args:
        default_output_len: as of :class:`~..candidates.Candidates`.
        output_len: int32 ``[n]``, the true lengths if they are known.

    Attributes:
        prompt_tokens, output_tokens: of the whole job, the latter as simulated.
    """

    def __init__(
        self,
        requests: PlanRequests,
        settings: OrderSettings,
        *,
        default_output_len: int | None = None,
        output_len: Int32s | None = None,
        interference_exponent: float = 1.0,
    ) -> None:
        self._requests = requests
        self._settings = settings
        self._default = default_output_len
        self._true = output_len
        self._exponent = interference_exponent
        # Costs of any machine give the same tree and the same lengths.
        self._job = self._candidates(requests, output_len, _ANY_MACHINE)
        tree, n = self._job.tree, max(1, self._job.tree.num_requests)
        lengths = self._job.output_len.astype(np.float64)
        mean = float(lengths.mean())
        # A shared prefix is held once by those that share it. Long answers are held longer:
        # by steps, not by requests.
        own = float(np.mean(tree.input_len - tree.depth[tree.leaf_parent]))
        held = own + float((lengths**2).mean()) / max(mean, 1.0) / 2
        computed = tree.num_unique_tokens / n
        self._mix = RequestMix(tree.num_tokens / n, mean, computed=computed, held=held)
        self.prompt_tokens = tree.num_tokens
        self.output_tokens = int(self._job.output_len.sum(dtype=np.int64))
        self._shards: dict[int, Int64s] = {}

    def _candidates(
        self, requests: PlanRequests, output_len: Int32s | None, machine: Machine
    ) -> Candidates:
        return Candidates(
            requests,
            machine,
            self._settings,
            true_output_len=output_len,
            default_output_len=self._default,
        )

    def outlooks(
        self, box: Box, parts: ModelParts, precisions: Sequence[Precision]
    ) -> list[Outlook]:
        """Every spread and precision with its best size of steps, fastest first."""
        found: dict[tuple[Parallelism, str], Outlook] = {}
        for way in possible_ways(box, parts, precisions):
            outlook = self._outlook(way, box, parts)
            key = way.parallel, str(way.precision)
            if key not in found or outlook.seconds < found[key].seconds:
                found[key] = outlook
        return sorted(found.values(), key=lambda x: (x.seconds, x.way.parallel))

    def _outlook(self, way: Way, box: Box, parts: ModelParts) -> Outlook:
        refusal = parts.refusal(way.parallel)
        if refusal is not None:
            return Outlook(way, None, np.inf, refusal)
        n = self._job.tree.num_requests
        shards = way.parallel.replicas * way.parallel.attention_ranks
        try:
            # CUDA graphs of more rows leave less memory for KV.
            for _ in range(2):
                steady = steady_state(
                    way.precision.model,
                    box.hardware,
                    way.parallel,
                    self._mix,
                    step_tokens=way.step_tokens,
                    max_rows=max(1.0, min(MOST_ROWS, n / shards)),
                    mem_fraction=way.mem_fraction(box.hardware),
                )
                way = way.with_rows(steady.rows)
        except ConfigError as error:
            return Outlook(way, None, np.inf, str(error))
        # The last answers run out while nobody joins.
        longest = float(self._job.output_len.max(initial=0))
        tail = longest / 2 * float(steady.step.total_s) / 2
        return Outlook(way, steady, n / steady.requests_per_s + tail)

    def choose(
        self,
        box: Box,
        parts: ModelParts,
        precisions: Sequence[Precision],
        *,
        watched: Callable[[Iterable[Outlook]], Iterable[Outlook]] = iter,
    ) -> Choices:
        """Simulate the best ways.

        Args:
            watched: passes on the ways that are simulated, such as a progress bar.
        """
        outlooks = self.outlooks(box, parts, precisions)
        tried: list[Outlook] = []
        for changes in (False, True):
            possible = (
                x
                for x in outlooks
                if x.steady is not None and x.way.precision.changes_answers == changes
            )
            tried += islice(possible, SIMULATED)
        simulated = [self._simulated(box, outlook) for outlook in watched(tried)]
        for changes in (False, True):
            kind = [x for x in simulated if x.way.precision.changes_answers == changes]
            if kind:
                fastest = min(kind, key=attrgetter("seconds"))
                simulated.remove(fastest)
                simulated.append(self._in_other_steps(box, parts, fastest))
        return Choices(box, sorted(simulated, key=attrgetter("seconds")), outlooks)

    def _in_other_steps(
        self, box: Box, parts: ModelParts, choice: SimulatedWay
    ) -> SimulatedWay:
        """The same way with the size of steps that takes least time on the job.

        The closed form knows the memory that a size takes, and not how evenly prompts are
        spread over steps.
        """
        found = [choice]
        for step_tokens in STEP_TOKENS:
            if step_tokens != choice.way.step_tokens:
                way = replace(choice.way, step_tokens=step_tokens)
                outlook = self._outlook(way, box, parts)
                if outlook.steady is not None:
                    found.append(self._simulated(box, outlook))
        fastest = min(found, key=attrgetter("seconds"))
        return replace(fastest, outlook=replace(choice.outlook, way=fastest.way))

    def _simulated(self, box: Box, outlook: Outlook) -> SimulatedWay:
        way = outlook.way
        machine = self.machine(box, way)
        shard = self._largest_shard(
            way.parallel.replicas * way.parallel.attention_ranks, machine.cost
        )
        true = None if self._true is None else self._true[shard]
        job = self._candidates(self._requests.take(shard), true, machine)
        policies = POLICIES if self._exponent > 1 else POLICIES[:1]
        runs = {policy: job.run(policy) for policy in policies}
        policy = best(runs)
        return SimulatedWay(box, outlook, runs[policy].seconds, policy, runs[policy])

    def machine(self, box: Box, way: Way) -> Machine:
        """One replica, or one attention rank, of a way."""
        model, parallel = way.precision.model, way.parallel
        capacity = rank_kv_tokens(
            model, box.hardware, parallel, way.mem_fraction(box.hardware)
        )
        pool, most = second_pool(
            model, capacity, way.step_tokens, parallel.attention_tp
        )
        cost = step_costs(
            model, box.hardware, parallel, interference_exponent=self._exponent
        )
        return Machine(
            cost,
            EngineLimits(
                capacity,
                way.step_tokens,
                max_running=min(way.rows, most or way.rows),
                as_sglang=True,
                second_pool=pool,
            ),
        )

    def _largest_shard(self, number: int, cost: CostModel) -> Int64s:
        """The requests of the shard with most work, by index in the job."""
        if number not in self._shards:
            tree, estimates = self._job.tree, self._job.estimates
            lengths = estimates.est_output_len
            squares = estimates.est_output_len_sq
            if self._true is not None:
                lengths = self._job.output_len.astype(np.float64)
                squares = lengths**2
            work = leaf_work(tree, cost, lengths, squares)
            found = partition(tree, cost, work, min(number, max(1, tree.num_requests)))
            seconds = cost.step_time_s(found.compute_s, found.memory_s)
            largest = int(np.argmax(seconds))
            self._shards[number] = self._job.fits[found.requests_of(largest)]
        return self._shards[number]


_ANY_MACHINE = Machine(
    CostModel(token_time_s=1e-5, kv_read_time_s=1e-8),
    EngineLimits(np.iinfo(np.int32).max),
)


def time_by_limit(outlook: Outlook) -> dict[str, float]:
    """Device seconds of a request in the closed form, by the limits of its steps."""
    steady, parallel = outlook.steady, outlook.way.parallel
    assert steady is not None, "an impossible way takes no time"
    device_s = parallel.devices / steady.requests_per_s / float(steady.step.total_s)
    parts = steady.step.by_limit
    return {name: float(seconds) * device_s for name, seconds in parts.items()}


def reason(outlook: Outlook, choice: Outlook, *, slower: bool | None = None) -> str:
    """Why a way takes longer than the choice, or less long: the part of a request's time in the
    closed form that differs most, as a share of the choice's whole time.

    Args:
        slower: whether it does take longer. None: by the closed form.
    """
    if outlook.steady is None:
        return outlook.refusal
    ours, theirs = time_by_limit(choice), time_by_limit(outlook)
    total = sum(ours.values())
    more = {name: (theirs[name] - ours[name]) / total for name in ours}
    if slower is None:
        slower = sum(more.values()) > 0
    name = (max if slower else min)(more, key=lambda each: more[each])
    rows = f"{outlook.steady.rows:,.0f} rows at once"
    if abs(more[name]) < 0.005 or (more[name] > 0) != slower:
        return f"alike but for its beginning and end; {rows}"
    return f"{name} {more[name]:+.0%}; {rows}"


def for_deadline(choice: SimulatedWay, deadline_s: float) -> int:
    """Boxes of this kind that end a job in time, each with an equal part of it."""
    return max(1, int(np.ceil(choice.seconds / deadline_s)))
