"""The life of shared prefixes against sets and loops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from random import Random

import numpy as np
import pytest
from scheduling_jobs import arrive_all, job_of, plan_of, random_prompts

from sglang_batch.scheduling import prefix_uses
from sglang_batch.scheduling.job_plan import JobPlan
from sglang_batch.scheduling.prefix_uses import PrefixUses
from sglang_batch.scheduling.scheduled_request import ScheduledRequest


class Model:
    """The same bookkeeping, slow and obvious, by leaf."""

    def __init__(self, plan: JobPlan, page_size: int) -> None:
        self.plan = plan
        depth = [int(d) // page_size * page_size for d in plan.depth]
        self.depth = depth
        self.length = [
            depth[node] - (depth[plan.parent[node]] if node else 0)
            for node in range(len(depth))
        ]
        self.to_come = set(range(plan.num_requests))
        self.running: set[int] = set()
        self.pins: set[int] = set()
        self.computing: dict[int, int] = {}

    def below(self, node: int) -> set[int]:
        return set(range(self.plan.leaf_begin[node], self.plan.leaf_end[node]))

    def path(self, leaf: int) -> list[int]:
        nodes = [
            node
            for node in range(1, len(self.depth))
            if leaf in self.below(node) and self.length[node] > 0
        ]
        return sorted(nodes, key=lambda node: -self.depth[node])

    def users(self, node: int) -> set[int]:
        return self.below(node) & self.running

    def uses_left(self, node: int) -> int:
        return len(self.below(node) & self.to_come)

    def rank(self, leaf: int) -> int:
        position, n = int(self.plan.position[leaf]), self.plan.num_requests
        return (
            position if self.plan.density is None else min(position, n - 1 - position)
        )

    def next_use(self, node: int) -> int:
        ranks = [self.rank(leaf) for leaf in self.below(node) & self.to_come]
        if len(ranks) > prefix_uses._MANY:
            return 0
        return min(ranks, default=self.plan.num_requests)

    def furthest(self) -> int:
        return self._furthest_of(node for node in self.pins if not self.users(node))

    def furthest_in_use(self) -> int:
        return self._furthest_of(node for node in self.pins if self.users(node))

    def _furthest_of(self, nodes: Iterable[int]) -> int:
        return max(
            nodes, key=lambda n: (self.next_use(n), self.depth[n], -n), default=0
        )

    def tokens(self, nodes: list[int]) -> int:
        return sum(self.length[node] for node in nodes)

    def kept_depth(self, leaf: int) -> int:
        for node in self.path(leaf):
            computed = bool(self.users(node)) and node not in self.computing
            if node in self.pins or computed:
                return self.depth[node]
        return 0


class Drive:
    """Random steps of a scheduler, in both worlds."""

    def __init__(self, random: Random, page_size: int, *, dual: bool) -> None:
        self.random, self.dual, self.page_size = random, dual, page_size
        self.prompts = random_prompts(random, random.randint(1, 14), page_size)
        plan = self.new_plan()
        self.requests = {
            request.leaf: request for request in arrive_all(job_of(plan, page_size))
        }
        self.uses = PrefixUses(plan, page_size)
        self.model = Model(plan, page_size)

    def new_plan(self) -> JobPlan:
        position = list(range(len(self.prompts)))
        self.random.shuffle(position)
        density = [1.0] * len(position) if self.dual else None
        return plan_of(self.prompts, position=position, density=density)

    def start(self) -> None:
        ready = [
            leaf
            for leaf in sorted(self.model.to_come)
            if not self.uses.blocked_by(self.requests[leaf].node)
        ]
        if not ready:
            return
        leaf, model, uses = self.random.choice(ready), self.model, self.uses
        request, path = self.requests[leaf], self.model.path(leaf)
        assert uses.path(request.node) == path
        kept = uses.kept_depth(request.node)
        assert kept == model.kept_depth(leaf)
        new = [node for node in path if not model.users(node)]
        assert uses.newly_locked(request.node) == model.tokens(new)
        kept_now = [node for node in new if node in model.pins]
        assert uses.newly_locked(request.node, pinned=True) == model.tokens(kept_now)
        uses.start(request, kept)
        model.to_come.remove(leaf)
        model.running.add(leaf)
        for node in path:
            if model.depth[node] > kept and model.uses_left(node):
                model.computing.setdefault(node, leaf)
        self.keep([n for n in path if model.depth[n] <= kept])
        self.let_go_of_spent(request)

    def keep(self, nodes: list[int]) -> None:
        for node in nodes:
            wanted = self.model.uses_left(node) > 0 and node not in self.model.pins
            assert self.uses.wanted(node) == wanted
            if wanted:
                self.uses.pin(node, f"lock {node}")
                self.model.pins.add(node)

    def let_go_of_spent(self, request: ScheduledRequest) -> None:
        model = self.model
        spent = [n for n in model.path(request.leaf) if not model.uses_left(n)]
        spent = [n for n in spent if n in model.pins]
        assert self.uses.spent(request) == spent
        for node in spent:
            self.unpin(node)

    def unpin(self, node: int) -> None:
        assert self.uses.unpin(node) == f"lock {node}"
        self.model.pins.remove(node)

    def compute(self) -> None:
        leaders = sorted(set(self.model.computing.values()))
        if not leaders:
            return
        request = self.requests[self.random.choice(leaders)]
        tokens = self.random.randint(0, request.input_len)
        done = [
            node
            for node in self.model.path(request.leaf)
            if self.model.computing.get(node) == request.leaf
            and self.model.depth[node] <= tokens
        ]
        assert self.uses.computed(request, tokens) == done
        for node in done:
            del self.model.computing[node]
        self.keep(done)

    def leave(self) -> None:
        if not self.model.running:
            return
        leaf = self.random.choice(sorted(self.model.running))
        offloaded = self.random.random() < 0.4
        left = self.uses.leave(self.requests[leaf], offloaded=offloaded)
        led = [n for n in self.model.path(leaf) if self.model.computing.get(n) == leaf]
        assert left == led
        assert self.requests[leaf].leading == []
        for node in led:
            del self.model.computing[node]
        self.model.running.remove(leaf)
        if offloaded:
            self.model.to_come.add(leaf)

    def skip(self) -> None:
        if self.model.to_come:
            leaf = self.random.choice(sorted(self.model.to_come))
            self.uses.skip(leaf, self.requests[leaf].node)
            self.model.to_come.remove(leaf)
            self.let_go_of_spent(self.requests[leaf])

    def reorder(self) -> None:
        self.model.plan = self.new_plan()
        self.uses.reorder(self.model.plan)

    def let_go(self) -> None:
        node = self.uses.furthest()
        assert node == self.model.furthest()
        in_use = self.uses.furthest_in_use()
        assert in_use == self.model.furthest_in_use()
        if node or in_use:
            self.unpin(node or in_use)

    def forget(self) -> None:
        self.uses.forget_pins()
        self.model.pins.clear()

    def check(self) -> None:
        uses, model = self.uses, self.model
        nodes = [n for n in range(1, len(model.depth)) if model.length[n]]
        for node in nodes:
            assert uses.uses_left[node] == model.uses_left(node)
            if model.uses_left(node):
                assert uses.next_use(node) == model.next_use(node)
        locked = [node for node in nodes if model.users(node)]
        assert uses.locked_tokens == model.tokens(locked)
        idle = [node for node in model.pins if not model.users(node)]
        assert uses.idle_tokens == model.tokens(idle)
        leaders = {node: request.leaf for node, request in uses.computing.items()}
        assert leaders == model.computing
        assert set(uses.pins) == model.pins

    def steps(self) -> list[Callable[[], None]]:
        often = [self.start, self.start, self.compute, self.compute, self.leave]
        return [*often, self.skip, self.reorder, self.let_go, self.forget]


@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("many", "awaited"), [(4096, 1), (3, 1), (4096, 3)])
def test_like_sets_and_loops(
    page_size: int,
    dual: bool,
    many: int,
    awaited: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_uses, "_MANY", many)
    monkeypatch.setattr(prefix_uses, "SHORTEST_AWAITED", awaited)
    for seed in range(60):
        random = Random(seed)
        drive = Drive(random, page_size, dual=dual)
        weights = [9, 9, 9, 9, 6, *(random.choice([0, 1, 4]) for _ in range(4))]
        for _ in range(80):
            random.choices(drive.steps(), weights)[0]()
            drive.check()
            if random.random() < 0.3:
                assert drive.uses.furthest() == drive.model.furthest()


def pinned(positions: list[int]) -> tuple[PrefixUses, list[ScheduledRequest]]:
    """Pairs of requests, each with a prefix that is kept."""
    prompts = [(pair, pair, i) for pair in range(len(positions) // 2) for i in (0, 1)]
    job = job_of(plan_of(prompts, position=positions))
    requests = arrive_all(job)
    for node in range(1, len(positions) // 2 + 1):
        job.uses.pin(node, node)
    return job.uses, requests


def test_a_skipped_request_does_not_hide_a_kept_prefix() -> None:
    uses, requests = pinned([0, 1, 2, 3])
    uses.skip(requests[2].leaf, requests[2].node)  # the next of the second pair
    assert uses.furthest() == 2


def test_a_skipped_request_changes_what_is_needed_last() -> None:
    uses, requests = pinned([0, 3, 1, 2])
    assert uses.furthest() == 2
    uses.skip(requests[0].leaf, requests[0].node)
    assert uses.furthest() == 1


def test_asking_for_the_furthest_changes_nothing() -> None:
    uses, _ = pinned([0, 1, 2, 3])
    assert [uses.furthest(), uses.furthest()] == [2, 2]


def test_no_page_no_prefix() -> None:
    job = job_of(plan_of([(1, 2, 3, i) for i in range(4)]), page_size=4)
    requests = arrive_all(job)
    assert job.uses.path(requests[0].node) == []
    assert requests[0].own == 4
    job.uses.start(requests[0], 0)
    assert job.uses.computing == {}
    assert job.uses.locked_tokens == 0


def test_nodes_in_use_do_not_slow_the_search_down() -> None:
    """One prompt for all: its prefix is always in use, and noted at every start."""
    n = 20_000
    prompts = [(1, 2, 3 + i // 2, i) for i in range(n)]
    job = job_of(plan_of(prompts))
    requests = arrive_all(job)
    uses = job.uses
    for node in range(1, len(uses.depth)):
        uses.pin(node, node)
    for request in requests[: n // 2]:
        uses.start(request, request.input_len)
        for node in uses.spent(request):
            uses.unpin(node)
    begin = time.process_time()
    found = [uses.furthest() for _ in range(100)]
    cost = (time.process_time() - begin) / 100
    assert set(found) == {int(np.argmax(job.plan.leaf_begin))}
    assert len(uses._furthest) < 2 * n
    # Measured: microseconds.
    assert cost < 1e-3
