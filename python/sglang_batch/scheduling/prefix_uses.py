"""The shared prefixes of a running job: which request computes them, which need them.

Every node of the prefix tree that several requests share is *absent*, being *computed* by
one request, its leader, or *kept* in the engine's cache. A follower needs a node while
another request computes it, and waits, so that each prefix is computed once. A kept node is
pinned until all requests that need it have started. When KV is short, the node whose next
use is furthest away is unpinned first (Belady's rule, since the future is known).
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from ..planner.admission_rules.followers import SHORTEST_AWAITED, WORTH_A_STATE
from ..planner.requests import Int32s, Int64s
from .job_plan import JobPlan
from .scheduled_request import ScheduledRequest

# A node that more requests than this still need is used soon.
_MANY = 4096


class PrefixUses:
    """The state of each node, by its number in the plan: ``m`` nodes, ``n`` planned requests.
    Node 0, the root, is no prefix.

    Attributes:
        parent: int32 ``[m]``, the node above.
        depth, length: int32 ``[m]``, tokens from the root and from the node above, whole
            pages.
        begin, end: int32 ``[m]``, the range of the leaves below.
        uses_left, running: int32 ``[m]``, requests that are still to start, and those that
            run.
        started: bool ``[n]`` by leaf, whether a request has started or never will.
        rank: int32 ``[n]`` by leaf, the order of use.
        computing: by node, the request that computes it.
        pins: by node, the cache's lock on it.
        locked_tokens: tokens of nodes that running requests use.
        num_locked: the number of these nodes.
        idle_tokens: tokens of nodes that are pinned for later requests only.
    """

    def __init__(self, plan: JobPlan, page_size: int) -> None:
        self._open_ended = plan.open_ended
        self.parent = plan.parent
        self._node = plan.node
        # The cache shares whole pages.
        self.depth: Int32s = plan.depth // page_size * page_size
        above = np.where(plan.parent >= 0, self.depth[plan.parent], 0)
        self.length: Int32s = (self.depth - above).astype(np.int32)
        self.begin, self.end = plan.leaf_begin, plan.leaf_end
        self.uses_left = (plan.leaf_end - plan.leaf_begin).astype(np.int32)
        self.running = np.zeros(len(plan.parent), np.int32)
        self.started = np.zeros(plan.num_requests, np.bool_)
        # Whether a prompt ends at a node.
        self._is_end = np.zeros(len(plan.parent), np.bool_)
        self._is_end[plan.node[plan.input_len <= self.depth[plan.node]]] = True
        self.rank = _ranks(plan)
        self._leaves: dict[int, tuple[Int64s, int]] = {}
        # Pinned nodes by next use. An entry counts while it is the last one noted.
        self._furthest: list[tuple[int, int, int]] = []
        self._noted: dict[int, int] = {}
        self.computing: dict[int, ScheduledRequest] = {}
        self._tokens: dict[int, int] = {}  # by node, a hash of the tokens up to it
        self.pins: dict[int, Any] = {}
        self.locked_tokens = 0
        self.num_locked = 0
        self.idle_tokens = 0

    @property
    def num_idle(self) -> int:
        """Nodes that are pinned for later requests only."""
        return sum(not self.running[node] for node in self.pins)

    def is_prompt_of(self, node: int, tokens: int) -> bool:
        """Whether a request's tokens up to a node, by their hash, equal those of the first
        request."""
        return self._tokens.setdefault(node, tokens) == tokens

    def path(self, node: int) -> list[int]:
        """A node and those above it, deepest first, without nodes that add no page."""
        nodes = []
        while node > 0:
            if self.length[node] > 0:
                nodes.append(node)
            node = int(self.parent[node])
        return nodes

    def leaves(self, node: int) -> range:
        return range(int(self.begin[node]), int(self.end[node]))

    def blocked_by(self, node: int) -> int:
        """The deepest node on the path that another request is computing, or 0 if too
        little is missing to wait for it."""
        at = node if self.computing else 0
        while at > 0 and at not in self.computing:
            at = int(self.parent[at])
        if at and self.depth[at] - self.kept_depth(node) < SHORTEST_AWAITED:
            return 0
        return at

    def kept_depth(self, node: int) -> int:
        """Tokens of a node's prefix that the cache holds."""
        for at in self.path(node):
            if self._is_kept(at):
                return int(self.depth[at])
        return 0

    def newly_locked(self, node: int, *, pinned: bool = False) -> int:
        """Tokens of a node's prefix that no running request uses, or those of them that
        are pinned."""
        tokens = 0
        for at in self.path(node):
            if self.running[at]:
                break
            if not pinned or at in self.pins:
                tokens += int(self.length[at])
        return tokens

    def num_newly_locked(self, node: int) -> int:
        """Nodes of a node's prefix that no running request uses."""
        return sum(not self.running[at] for at in self.path(node))

    def _is_kept(self, node: int) -> bool:
        if node in self.pins:
            return True
        return bool(self.running[node]) and node not in self.computing

    # Requests start and leave ---------------------------------------------------------

    def start(self, request: ScheduledRequest, cached_len: int) -> None:
        """A request is admitted with ``cached_len`` tokens of its prompt in the cache. It
        becomes the leader of the missing nodes."""
        self.started[request.leaf] = True
        for node in self.path(request.node):
            self.uses_left[node] -= 1
            if self.running[node] == 0:
                self.num_locked += 1
                self.locked_tokens += int(self.length[node])
                if node in self.pins:
                    self.idle_tokens -= int(self.length[node])
            self.running[node] += 1
        self.lead(request, cached_len)

    def lead(self, request: ScheduledRequest, cached_len: int) -> None:
        """A request computes those of its prefixes that the cache does not hold. Called
        again when the cache turns out to hold less than expected."""
        for node in self.path(request.node):
            if self.depth[node] <= cached_len:
                break
            if self.uses_left[node] > 0 and node not in self.computing:
                self.computing[node] = request
                request.leading.append(node)

    def stops(self, request: ScheduledRequest) -> list[int]:
        """Where a leader computes prefixes for others, ascending, but for those that are
        hardly longer than another."""
        stops: list[int] = []
        for node in sorted(request.leading, key=self.depth.__getitem__):
            end = self.state_end(node)
            last = stops[-1] if stops else int(self.depth[self.parent[node]])
            if (end - last) * int(self.uses_left[node]) >= WORTH_A_STATE:
                stops.append(end)
        return stops

    def state_end(self, node: int) -> int:
        """Tokens behind which a node's recurrent state is kept.

        A request computes at least its last token. So where a prompt ends at the node, as
        several samples of one prompt do, the state is that before the node's last token.
        """
        return int(self.depth[node] - self._is_end[node])

    def leads(self, request: ScheduledRequest, cached_len: int) -> bool:
        """Whether a waiting request would compute prefixes for others."""
        return any(
            self.depth[node] > cached_len
            and self.uses_left[node] > 1
            and node not in self.computing
            for node in self.path(request.node)
        )

    def await_node(self, node: int, leader: ScheduledRequest) -> None:
        """A request of another job computes a node. Nobody waits for it if it is in the
        cache already, or computed here."""
        if not self._is_kept(node):
            self.computing.setdefault(node, leader)

    def spent(self, request: ScheduledRequest) -> list[int]:
        """Pinned nodes of a request that no later request needs."""
        if self._open_ended:
            return []
        return [
            node
            for node in self.path(request.node)
            if node in self.pins and self.uses_left[node] == 0
        ]

    def computed(self, request: ScheduledRequest, num_tokens: int) -> list[int]:
        """The first ``num_tokens`` of a leader's prompt are in the cache. Returns the nodes
        that this completes, deepest first."""
        done = [node for node in request.leading if self.depth[node] <= num_tokens]
        for node in done:
            request.leading.remove(node)
            del self.computing[node]
        return done

    def leave(self, request: ScheduledRequest, *, offloaded: bool) -> list[int]:
        """A running request ended, or gave its KV back and will return (``offloaded``).
        Returns the nodes that it was computing, which no request computes now."""
        if offloaded:
            self.started[request.leaf] = False
        for node in self.path(request.node):
            self.running[node] -= 1
            if self.running[node] == 0:
                self.num_locked -= 1
                self.locked_tokens -= int(self.length[node])
                if node in self.pins:
                    self.idle_tokens += int(self.length[node])
            if offloaded:
                self.uses_left[node] += 1
                self._leaves.pop(node, None)
            self._note(node)
        left = request.leading
        request.leading = []
        for node in left:
            del self.computing[node]
        return left

    def skip(self, leaf: int, node: int) -> None:
        """The request that the plan has at ``leaf``, below ``node``, will never run here."""
        self.started[leaf] = True
        for at in self.path(node):
            self.uses_left[at] -= 1
            self._note(at)

    def expect_again(self, request: ScheduledRequest) -> None:
        """A request that was not to run any more will run after all."""
        self.started[request.leaf] = False
        for node in self.path(request.node):
            self.uses_left[node] += 1
            self._leaves.pop(node, None)
            self._note(node)

    def reorder(self, plan: JobPlan) -> None:
        """Take another order of the same requests."""
        self.rank = _ranks(plan)
        self._leaves.clear()
        self._furthest.clear()
        self._noted.clear()
        for node in self.pins:
            self._note(node)

    # A plan of other requests ---------------------------------------------------------

    def extended(
        self, plan: JobPlan, page_size: int, moved: Int32s, over: Int32s
    ) -> tuple[PrefixUses, list[Any]]:
        """The uses of a plan that covers more requests, or no longer all of them.

        Running requests have to be added with :meth:`resume`, then :meth:`settle`.

        Args:
            moved: int32 ``[n]``, the new leaf of each leaf, -1 for none.
            over: new leaves of further requests that will never run.

        Returns:
            The new uses, and the locks on prefixes that the new plan does not share.
        """
        uses = PrefixUses(plan, page_size)
        uses.started[moved[self.started & (moved >= 0)]] = True
        uses.started[over] = True
        released: list[Any] = []
        # The first leaf from each on that the new plan has.
        kept = np.where(moved >= 0, np.arange(len(moved)), len(moved))
        kept = np.minimum.accumulate(kept[::-1])[::-1]
        for node, lock in self.pins.items():
            begin, end = int(self.begin[node]), int(self.end[node])
            leaf = int(kept[begin]) if begin < end else end
            at = uses._at_depth(int(moved[leaf]), self.depth[node]) if leaf < end else 0
            if at and at not in uses.pins:
                uses.pins[at] = lock
            else:
                released.append(lock)
        return uses, released

    def _at_depth(self, leaf: int, depth: int) -> int:
        """The node above a leaf that ends in the cache at ``depth`` tokens, or 0."""
        for node in self.path(int(self._node[leaf])):
            if self.depth[node] <= depth:
                return node if self.depth[node] == depth else 0
        return 0

    def resume(self, request: ScheduledRequest) -> None:
        """A request was running when the plan was extended."""
        self.started[request.leaf] = True
        for node in self.path(request.node):
            self.running[node] += 1

    def settle(self) -> list[Any]:
        """All requests are added. Returns the locks on prefixes no longer needed."""
        to_come = np.zeros(len(self.started) + 1, np.int32)
        np.cumsum(~self.started, out=to_come[1:])
        self.uses_left = to_come[self.end] - to_come[self.begin]
        spent = [
            node
            for node in self.pins
            if self.uses_left[node] == 0 and not self._open_ended
        ]
        released = [self.pins.pop(node) for node in spent]
        self.locked_tokens = int(self.length[self.running > 0].sum(dtype=np.int64))
        self.num_locked = int(((self.running > 0) & (self.length > 0)).sum())
        self.idle_tokens = sum(
            int(self.length[node]) for node in self.pins if not self.running[node]
        )
        for node in self.pins:
            self._note(node)
        return released

    # Pins -----------------------------------------------------------------------------

    def wanted(self, node: int) -> bool:
        """Whether later requests need a node that is not pinned yet, or may need it."""
        if node in self.pins:
            return False
        return self._open_ended or bool(self.uses_left[node] > 0)

    def pin(self, node: int, lock: Any) -> None:
        self.pins[node] = lock
        if self.running[node] == 0:
            self.idle_tokens += int(self.length[node])
        self._note(node)

    def unpin(self, node: int) -> Any:
        """Forget a pin; returns the lock that :meth:`pin` was given."""
        if self.running[node] == 0:
            self.idle_tokens -= int(self.length[node])
        self._noted.pop(node, None)
        return self.pins.pop(node)

    def forget_pins(self) -> None:
        """The cache was emptied."""
        for node in list(self.pins):
            self.unpin(node)

    def furthest(self) -> int:
        """The pinned node, not used by running requests, whose next use is furthest away,
        or 0."""
        while self._furthest:
            use, _, node = self._furthest[0]
            if self._noted.get(node) == -use:
                if not self.running[node]:
                    return node
                del self._noted[node]  # noted again when its users leave
            heapq.heappop(self._furthest)
        return 0

    def furthest_in_use(self) -> int:
        """The same of the nodes that running requests use."""
        in_use = [node for node in self.pins if self.running[node]]
        return max(
            in_use,
            key=lambda node: (self.next_use(node), self.depth[node], -node),
            default=0,
        )

    def next_use(self, node: int) -> int:
        """The rank of the next request that needs a node, in the order of use. Above all
        ranks if no request is known to need it."""
        if self.uses_left[node] > _MANY:
            return 0
        if node not in self._leaves:
            begin, end = int(self.begin[node]), int(self.end[node])
            to_come = begin + np.flatnonzero(~self.started[begin:end])
            by_rank = np.argsort(self.rank[to_come], kind="stable")
            self._leaves[node] = (to_come[by_rank], 0)
        leaves, at = self._leaves[node]
        while at < len(leaves) and self.started[leaves[at]]:
            at += 1
        self._leaves[node] = (leaves, at)
        if at < len(leaves):
            return int(self.rank[leaves[at]])
        # Nobody is known to need it. Of groups that may still grow, the one that most
        # requests were in is the most likely to be complete.
        return len(self.rank) + len(self.started[self.begin[node] : self.end[node]])

    def _note(self, node: int) -> None:
        """A node's next use may have changed. This does not matter while it is in use."""
        if node not in self.pins or self.running[node]:
            return
        use = self.next_use(node)
        if self._noted.get(node) != use:
            self._noted[node] = use
            entry = (-use, -int(self.depth[node]), node)
            heapq.heappush(self._furthest, entry)


def _ranks(plan: JobPlan) -> Int32s:
    """The order of use by leaf: positions, or the distances from the nearer end."""
    if plan.density is None:
        return plan.position
    ranks: Int32s = np.minimum(plan.position, plan.num_requests - 1 - plan.position)
    return ranks
