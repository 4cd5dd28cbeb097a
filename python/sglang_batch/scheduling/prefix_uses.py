"""The shared prefixes of a job while it runs: who computes them, who still needs them.

Every node of the job's prefix tree that several requests share is *absent*, being
*computed* by one request, its leader, or *kept* in the engine's cache. A follower, a
request that needs a node another one is computing, waits: so each prefix is computed
once. A kept node is pinned in the cache while requests that need it have not had their
turn. When room is short, the node whose next turn lies furthest ahead is let go first
(Belady's rule: the future is known).
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from ..planner.requests import Int32s, Int64s
from .job_plan import JobPlan
from .line import Line

# A node with more requests than this to come has one of them soon.
_MANY = 4096


class PrefixUses:
    """Nodes by their number in the plan; the root, node 0, is no prefix.

    Attributes:
        computing: by node, the line that computes it.
        pins: by node, what the cache gave for keeping it.
        locked_tokens: tokens of nodes that running requests use.
        idle_tokens: tokens of nodes that are kept for requests to come only.
    """

    def __init__(self, plan: JobPlan, page_size: int) -> None:
        self._parent = plan.parent
        # The cache shares whole pages.
        self.depth: Int32s = plan.depth // page_size * page_size
        above = np.where(plan.parent >= 0, self.depth[plan.parent], 0)
        self._length: Int32s = (self.depth - above).astype(np.int32)
        self._begin, self._end = plan.leaf_begin, plan.leaf_end
        self._uses_left = (plan.leaf_end - plan.leaf_begin).astype(np.int32)
        self._running = np.zeros(len(plan.parent), np.int32)
        self._started = np.zeros(plan.num_requests, np.bool_)
        self._rank = _ranks(plan)
        self._leaves: dict[int, tuple[Int64s, int]] = {}
        # Kept nodes by next use; an entry counts while it is what was noted last.
        self._furthest: list[tuple[int, int, int]] = []
        self._noted: dict[int, int] = {}
        self.computing: dict[int, Line] = {}
        self._tokens: dict[int, int] = {}  # by node, a hash of the tokens up to it
        self.pins: dict[int, Any] = {}
        self.locked_tokens = 0
        self.idle_tokens = 0

    def is_prompt_of(self, node: int, tokens: int) -> bool:
        """Whether a request's tokens up to a node are those of the first that asked.

        tokens: a hash of them.
        """
        return self._tokens.setdefault(node, tokens) == tokens

    def path(self, node: int) -> list[int]:
        """A node and those above it, deepest first, without those that add no page."""
        nodes = []
        while node > 0:
            if self._length[node] > 0:
                nodes.append(node)
            node = int(self._parent[node])
        return nodes

    def blocked_by(self, node: int) -> int:
        """The node on the path that another request is computing; 0 if there is none."""
        if self.computing:
            while node > 0:
                if node in self.computing:
                    return node
                node = int(self._parent[node])
        return 0

    def kept_depth(self, node: int) -> int:
        """Tokens of a node's prefix that the cache holds."""
        for at in self.path(node):
            if self._is_kept(at):
                return int(self.depth[at])
        return 0

    def newly_locked(self, node: int) -> int:
        """Tokens of a node's prefix that no running request uses."""
        tokens = 0
        for at in self.path(node):
            if self._running[at]:
                break
            tokens += int(self._length[at])
        return tokens

    def newly_kept(self, node: int) -> int:
        """Those of them that the cache keeps."""
        tokens = 0
        for at in self.path(node):
            if self._running[at]:
                break
            if at in self.pins:
                tokens += int(self._length[at])
        return tokens

    def _is_kept(self, node: int) -> bool:
        if node in self.pins:
            return True
        return bool(self._running[node]) and node not in self.computing

    # A request's way ------------------------------------------------------------------

    def start(self, line: Line, cached_len: int) -> None:
        """A request is admitted with ``cached_len`` tokens of its prompt in the cache.

        It becomes the leader of what is missing.
        """
        self._started[line.leaf] = True
        for node in self.path(line.node):
            self._uses_left[node] -= 1
            if self._running[node] == 0:
                self.locked_tokens += int(self._length[node])
                if node in self.pins:
                    self.idle_tokens -= int(self._length[node])
            self._running[node] += 1
        self.lead(line, cached_len)

    def lead(self, line: Line, cached_len: int) -> None:
        """A request computes what of its prefixes is not among its first tokens.

        Called again when the cache turns out to hold less than was thought.
        """
        for node in self.path(line.node):
            if self.depth[node] <= cached_len:
                break
            if self._uses_left[node] > 0 and node not in self.computing:
                self.computing[node] = line
                line.leading.append(node)

    def spent(self, line: Line) -> list[int]:
        """Nodes that were kept up to this request and are needed by none after it."""
        return [
            node
            for node in self.path(line.node)
            if node in self.pins and self._uses_left[node] == 0
        ]

    def computed(self, line: Line, num_tokens: int) -> list[int]:
        """The first ``num_tokens`` of a leader's prompt are in the cache.

        Returns the nodes that this completes, deepest first.
        """
        done = [node for node in line.leading if self.depth[node] <= num_tokens]
        for node in done:
            line.leading.remove(node)
            del self.computing[node]
        return done

    def leave(self, line: Line, *, parked: bool) -> list[int]:
        """A running request ended, or gave its KV back and will be back (``parked``).

        Returns the nodes that it was computing, which nobody computes now.
        """
        if parked:
            self._started[line.leaf] = False
        for node in self.path(line.node):
            self._running[node] -= 1
            if self._running[node] == 0:
                self.locked_tokens -= int(self._length[node])
                if node in self.pins:
                    self.idle_tokens += int(self._length[node])
            if parked:
                self._uses_left[node] += 1
                self._leaves.pop(node, None)
            self._note(node)
        left = line.leading
        line.leading = []
        for node in left:
            del self.computing[node]
        return left

    def skip(self, line: Line) -> None:
        """A request will never run here."""
        self.skip_leaf(line.leaf, line.node)

    def skip_leaf(self, leaf: int, node: int) -> None:
        """The same for one that the plan has at ``leaf``, below ``node``."""
        self._started[leaf] = True
        for at in self.path(node):
            self._uses_left[at] -= 1
            self._note(at)

    def reorder(self, plan: JobPlan) -> None:
        """The same requests get another order."""
        self._rank = _ranks(plan)
        self._leaves.clear()
        self._furthest.clear()
        self._noted.clear()
        for node in self.pins:
            self._note(node)

    # What is kept ---------------------------------------------------------------------

    def wanted(self, node: int) -> bool:
        """Whether requests to come need a node that is not kept yet."""
        return self._uses_left[node] > 0 and node not in self.pins

    def pin(self, node: int, lock: Any) -> None:
        self.pins[node] = lock
        if self._running[node] == 0:
            self.idle_tokens += int(self._length[node])
        self._note(node)

    def unpin(self, node: int) -> Any:
        """Forget that a node is kept; returns what :meth:`pin` was given."""
        if self._running[node] == 0:
            self.idle_tokens -= int(self._length[node])
        self._noted.pop(node, None)
        return self.pins.pop(node)

    def forget_pins(self) -> None:
        """The cache was emptied."""
        for node in list(self.pins):
            self.unpin(node)

    def furthest(self) -> int:
        """The kept node, used by none that runs, that is needed last; 0 for none."""
        while self._furthest:
            use, _, node = self._furthest[0]
            if self._noted.get(node) == -use:
                if not self._running[node]:
                    return node
                del self._noted[node]  # it is noted again when its users leave
            heapq.heappop(self._furthest)
        return 0

    def next_use(self, node: int) -> int:
        """How soon a request needs a node: its rank in the order."""
        if self._uses_left[node] > _MANY:
            return 0
        if node not in self._leaves:
            begin, end = int(self._begin[node]), int(self._end[node])
            to_come = begin + np.flatnonzero(~self._started[begin:end])
            by_rank = np.argsort(self._rank[to_come], kind="stable")
            self._leaves[node] = (to_come[by_rank], 0)
        leaves, at = self._leaves[node]
        while at < len(leaves) and self._started[leaves[at]]:
            at += 1
        self._leaves[node] = (leaves, at)
        return int(self._rank[leaves[at]]) if at < len(leaves) else len(self._rank)

    def _note(self, node: int) -> None:
        """A node's next use may have changed. While it is in use that is no matter."""
        if node not in self.pins or self._running[node]:
            return
        use = self.next_use(node)
        if self._noted.get(node) != use:
            self._noted[node] = use
            entry = (-use, -int(self.depth[node]), node)
            heapq.heappush(self._furthest, entry)


def _ranks(plan: JobPlan) -> Int32s:
    """How soon each leaf comes; from both ends, by its distance from the nearer."""
    if plan.density is None:
        return plan.turn
    ranks: Int32s = np.minimum(plan.turn, plan.num_requests - 1 - plan.turn)
    return ranks
