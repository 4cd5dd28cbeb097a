"""Room for offloaded requests on the host: which pages each has, and who must leave.

The pool has a fixed number of pages. When it is full, the requests that are cheapest to
compute again lose their KV: those in the pool, or the one that asks for room. Everything
follows from numbers of tokens and the plan's cost model, so that all ranks decide alike.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from ....scheduling.job_plan import StepCost

Run = tuple[int, int]
"""Consecutive pages: the first one and their number."""


def recompute_time_s(cost: StepCost, num_tokens: int, prefix_len: int) -> float:
    """Seconds to compute ``num_tokens`` of prompt and answer again behind a prefix."""
    attended = num_tokens * (num_tokens + 2 * prefix_len)
    return num_tokens * cost.token_time_s + attended * cost.attention_time_s


@dataclass(frozen=True, slots=True)
class _Held:
    """The pages of a request, and the seconds to compute it again instead."""

    runs: list[Run]
    num_pages: int
    cost_s: float
    number: int


class HostRoom:
    """The pages of a host pool.

    Attributes:
        num_pages: pages in all.
        num_free: pages that nobody has.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self._free: list[Run] = [(0, num_pages)] if num_pages else []
        self._held: dict[str, _Held] = {}
        # (cost, -number, rid), the cheapest first. An entry counts while its request
        # has pages under that number.
        self._by_cost: list[tuple[float, int, str]] = []
        self._number = 0

    def __contains__(self, rid: str) -> bool:
        return rid in self._held

    def runs(self, rid: str) -> list[Run]:
        """The pages of a request that has some."""
        return self._held[rid].runs

    def to_recompute(self, num_pages: int, cost_s: float) -> list[str] | None:
        """The requests that have to give up their pages so that ``num_pages`` are free.

        They are the cheapest to compute again. Among equals, the last to come goes
        first.

        Args:
            cost_s: seconds to compute the request that asks again.

        Returns:
            Their ids, without any if there is room. None if computing the request that
            asks again costs no more than computing those.
        """
        found: list[tuple[float, int, str]] = []
        free, total_s = self.num_free, 0.0
        while free < num_pages and self._by_cost:
            entry = heapq.heappop(self._by_cost)
            held = self._held.get(entry[2])
            if held is None or held.number != -entry[1]:
                continue
            found.append(entry)
            free += held.num_pages
            total_s += held.cost_s
            if total_s >= cost_s:
                break
        for entry in found:  # they have their pages until they give them back
            heapq.heappush(self._by_cost, entry)
        if free < num_pages or (found and total_s >= cost_s):
            return None
        return [rid for _, _, rid in found]

    def take(self, rid: str, num_pages: int, cost_s: float) -> list[Run]:
        """Give a request its pages: in one run if there is one that is long enough.

        Raises:
            ValueError: there are too few, or the request has pages already.
        """
        if num_pages > self.num_free or rid in self._held:
            raise ValueError(
                f"{num_pages} pages for {rid}: {self.num_free} of {self.num_pages} are "
                "free; call to_recompute() first."
            )
        runs = self._take_runs(num_pages)
        self.num_free -= num_pages
        self._number += 1
        self._held[rid] = _Held(runs, num_pages, cost_s, self._number)
        heapq.heappush(self._by_cost, (cost_s, -self._number, rid))
        return runs

    def _take_runs(self, num_pages: int) -> list[Run]:
        long_enough = [run for run in self._free if run[1] >= num_pages]
        # The tightest fit leaves long runs whole. Otherwise few long pieces are best.
        order = (
            [min(long_enough, key=lambda run: (run[1], run[0]))]
            if long_enough
            else sorted(self._free, key=lambda run: (-run[1], run[0]))
        )
        runs: list[Run] = []
        for first, length in order:
            taken = min(length, num_pages)
            if not taken:
                break
            self._free.remove((first, length))
            if taken < length:
                self._free.append((first + taken, length - taken))
            runs.append((first, taken))
            num_pages -= taken
        return runs

    def give_back(self, rid: str) -> None:
        """A request needs its pages no more."""
        held = self._held.pop(rid)
        self.num_free += held.num_pages
        merged: list[Run] = []
        for first, length in sorted([*self._free, *held.runs]):
            if merged and sum(merged[-1]) == first:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((first, length))
        self._free = merged
        if not self._held:
            self._by_cost.clear()
