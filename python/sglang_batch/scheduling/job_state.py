"""A job inside the scheduler: its plan, what waits of it, and its shared prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .backlog import Backlog
from .job_plan import JobPlan
from .line import Line
from .prefix_uses import PrefixUses
from .work_left import WorkLeft

# Turns of requests that the plan does not know: after all others, as they come.
UNPLANNED_TURN = 1 << 40
# Decode steps expected of a request that nothing is known of.
DEFAULT_STEPS = 256


class JobState:
    """One open job.

    Attributes:
        uses: its shared prefixes.
        backlog: lines that may be admitted.
        work: compute and KV reads that are left of it.
        num_followers: lines set aside until a prefix is computed.
        pace, left_blocked, saved_tokens: of the dual scanner.
        priority: among open jobs, higher goes first.
        served: tokens of it that were admitted; of jobs of one priority the one that
            was served least is next.
    """

    def __init__(self, job_id: str, plan: JobPlan, page_size: int) -> None:
        self.job_id = job_id
        self.plan = plan
        self.uses = PrefixUses(plan, page_size)
        self.backlog = Backlog(plan.num_left, both_ends=plan.density is not None)
        self._followers: dict[int, list[Line]] = {}
        self.num_followers = 0
        self._lines: dict[str, Line] = {}  # by request id, until they end
        self.work = WorkLeft(plan)
        self.pace = 1.0
        self.left_blocked = False
        self.saved_tokens = 0
        self.priority = 0
        self.served = 0

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def num_waiting(self) -> int:
        return self.backlog.count + self.num_followers

    @property
    def waiting_tokens(self) -> int:
        return self.backlog.tokens + sum(line.input_len for line in self.followers())

    @property
    def dual(self) -> bool:
        return self.plan.density is not None

    def waiting(self) -> Iterator[Line]:
        """All that wait, followers included."""
        yield from self.backlog
        yield from self.followers()

    def followers(self) -> Iterator[Line]:
        for lines in self._followers.values():
            yield from lines

    # Lines ----------------------------------------------------------------------------

    def add(
        self, req: Any, number: int, input_len: int, max_steps: int, *, part: int = 0
    ) -> Line:
        """A request of this job arrived; it waits from now on.

        number: its number in the job; -1 if that is not known.
        part: which of the request's sequences it is. A plan has one for each; the
            others have its turn.
        """
        plan = self.plan
        leaf = int(plan.leaf[number]) if 0 <= number < len(plan.leaf) else -1
        turn = int(plan.turn[leaf]) if leaf >= 0 else UNPLANNED_TURN
        if part:
            leaf = -1
        if leaf >= 0 and plan.input_len[leaf] != input_len:
            # The engine sees another prompt than was planned.
            self.uses.skip_leaf(leaf, int(plan.node[leaf]))
            leaf = -1
        if leaf < 0:
            expected = min(max_steps, DEFAULT_STEPS)
            line = Line(
                req, -1, 0, turn, input_len, input_len, max_steps, expected
            )  # fmt: skip
        else:
            node = int(plan.node[leaf])
            line = Line(
                req=req,
                leaf=leaf,
                node=node,
                turn=turn,
                input_len=input_len,
                own=input_len - int(self.uses.depth[node]),
                max_steps=max_steps,
                estimate=self._estimate(leaf, max_steps),
                read_len=int(plan.read_len[leaf]),
            )
        self._lines[req.rid] = line
        self.backlog.add(line)
        return line

    def forget(self, line: Line) -> None:
        """A line ended, or was aborted."""
        self._lines.pop(line.req.rid, None)

    def density_at(self, line: Line | None) -> float:
        density = self.plan.density
        if density is None or line is None or line.leaf < 0:
            return 1.0
        return float(density[line.turn])

    # Followers ------------------------------------------------------------------------

    def follow(self, line: Line, node: int) -> None:
        """Set a waiting line aside until ``node`` is computed."""
        self.backlog.remove(line)
        self._followers.setdefault(node, []).append(line)
        self.num_followers += 1

    def release_followers(self, nodes: list[int]) -> None:
        """Nobody computes ``nodes`` any more: who waited for them may go on."""
        for node in nodes:
            for line in self._followers.pop(node, []):
                self.num_followers -= 1
                self.backlog.add(line)

    def take(self, line: Line) -> None:
        """Remove a line from where it waits."""
        if line.waiting:
            self.backlog.remove(line)
            return
        for lines in self._followers.values():
            if line in lines:
                lines.remove(line)
                self.num_followers -= 1
                return

    # A new plan -----------------------------------------------------------------------

    def replan(self, plan: JobPlan) -> None:
        """Another order and other estimates of the same requests, the same tree.

        Lines that run keep what they were admitted with.
        """
        self.plan = plan
        self.uses.reorder(plan)
        self.work.replan(plan)
        for line in self._lines.values():
            if line.leaf < 0:
                continue
            line.turn = int(plan.turn[line.leaf])
            if not line.running and line.steps == 0:
                line.estimate = self._estimate(line.leaf, line.max_steps)
        self.backlog.reorder(plan.num_left, both_ends=plan.density is not None)

    def _estimate(self, leaf: int, max_steps: int) -> int:
        """Decode steps that the plan expects of a line."""
        return min(int(float(self.plan.steps[leaf]) + 0.5), max_steps)
