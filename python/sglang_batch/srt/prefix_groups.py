"""Which of a step's requests share which prefixes in the KV cache, as a forest.

The plan's prefix tree says which prompts are equal up to where; SGLang's radix cache
holds the KV of an equal prefix once. So two running requests have the first ``n``
tokens in the same slots if the plan has them under one node of depth ``n`` and the
cache holds that much of both: every request's row names the cache's slots for the
tokens that it has locked there. That the engine's prompts are those that were planned
is checked, once for each request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..planner.requests import Int32s
from ..scheduling.job_state import JobState
from ..scheduling.line import Line

if TYPE_CHECKING:
    from .open_jobs import OpenJobs


class PrefixGroups(NamedTuple):
    """A batch's rows and the forest of prefixes that they share; all int32.

    table_row: ``[n]`` rows of SGLang's ``req_to_token``: each request's, and behind them
        those of further beams.
    request_node: ``[n]`` deepest node of each request, -1 for none.
    node_parent: ``[m]`` -1 for a root; parents come before children.
    node_end: ``[m]`` tokens from the start of the prompt to the node's end.
    """

    table_row: Int32s
    request_node: Int32s
    node_parent: Int32s
    node_end: Int32s


NO_GROUPS = PrefixGroups(*(np.zeros(0, np.int32) for _ in range(4)))


class GroupFinder:
    """Finds the groups of one batch after the other, anew only if its requests change."""

    def __init__(self, jobs: OpenJobs) -> None:
        self._jobs = jobs
        self._reqs: list[Any] = []
        self._groups: PrefixGroups | None = None

    def forget(self) -> None:
        """Other batches ran in between: what is found next is found anew."""
        self._groups = None

    def of(self, reqs: list[Any], rows: Int32s, *, decodes: bool) -> PrefixGroups:
        """The groups of a batch; the same object while its requests are the same.

        rows: of ``req_to_token``, at least one for each request, in their order.
        decodes: whether all of them decode. A prompt that is being computed may have
            more in the cache in the next step.
        """
        last = self._groups
        # Requests compare by identity.
        same = last is not None and decodes and reqs == self._reqs
        if same and np.array_equal(last.table_row, rows):  # type: ignore[union-attr]
            return last  # type: ignore[return-value]
        groups = self._find(reqs, rows)
        self._reqs = list(reqs)
        self._groups = groups if decodes else None
        return groups

    def _find(self, reqs: list[Any], rows: Int32s) -> PrefixGroups:
        index: dict[tuple[Any, ...], int] = {}
        parent: list[int] = []
        end: list[int] = []
        nodes = [self._node_of(req, index, parent, end) for req in reqs]
        nodes += [-1] * (len(rows) - len(reqs))
        return PrefixGroups(
            rows,
            np.array(nodes, np.int32),
            np.array(parent, np.int32),
            np.array(end, np.int32),
        )

    def _node_of(
        self,
        req: Any,
        index: dict[tuple[Any, ...], int],
        parent: list[int],
        end: list[int],
    ) -> int:
        """The request's node in the forest, which grows by it if it is new."""
        known = self._jobs.known(req)
        if known is None or known[0] is None or known[1].leaf < 0:
            return -1
        job, line = known
        deepest = _deepest_cached(job, line)
        # Requests of different namespaces share nothing in the cache.
        space = (id(job), req.extra_key, req.cache_salt)
        found = index.get((*space, deepest))
        if found is not None:
            return found
        above = -1
        for node in reversed(job.uses.path(deepest)):
            key = (*space, node)
            if key not in index:
                index[key] = len(parent)
                parent.append(above)
                end.append(int(job.uses.depth[node]))
            above = index[key]
        return above


def _deepest_cached(job: JobState, line: Line) -> int:
    """The deepest node of the plan that the cache holds for a running line; 0: none."""
    if line.cached_node >= 0:
        return line.cached_node
    req = line.req
    held = req.kv.cache_protected_len
    if not line.decoding:
        held = min(held, req.prefix_len)
    path = job.uses.path(line.node)
    deepest = 0
    for node in reversed(path):
        depth = int(job.uses.depth[node])
        if depth > held:
            return deepest
        if not job.uses.is_prompt_of(node, hash(tuple(req.origin_input_ids[:depth]))):
            break  # the engine was given another prompt than was planned
        deepest = node
    if line.decoding:
        line.cached_node = deepest  # there is nothing more to come
    return deepest
