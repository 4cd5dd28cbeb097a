"""The prefixes that a step's requests share in the KV cache, as a forest.

SGLang's radix cache keeps the KV of a common prefix once. So the first ``n`` tokens of two
running requests have the same slots if both are under one node of depth ``n`` in the plan and
the cache has ``n`` tokens of both. Each request's prompt is compared with the planned one, once.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ...planner.requests import Int32s
from ...scheduling.job_state import JobState
from ...scheduling.scheduled_request import ScheduledRequest
from ..compat.scheduler_types import Req

NodeKey: TypeAlias = tuple[int, str | None, str | None, int]
"""A job, a namespace of the cache (``extra_key``, ``cache_salt``) and a node."""


class PrefixForest(NamedTuple):
    """A batch's rows and the forest of prefixes that they share, all int32.

    table_row: ``[n]`` rows of SGLang's ``req_to_token``: one for each request, then those
        of further beams.
    request_node: ``[n]`` deepest node of each row's request, -1 for none.
    node_parent: ``[m]`` parent of each node, which comes before it, -1 for a root.
    node_end: ``[m]`` tokens from the start of the prompt to the node's end.
    """

    table_row: Int32s
    request_node: Int32s
    node_parent: Int32s
    node_end: Int32s


NO_GROUPS = PrefixForest(*(np.zeros(0, np.int32) for _ in range(4)))


class PrefixForestBuilder:
    """Builds the forest of each batch, anew only if its requests change.

    jobs: the scheduler's registry of requests.
    """

    def __init__(self, jobs: Any) -> None:
        self._jobs = jobs
        self._reqs: list[Req] = []
        self._groups: PrefixForest | None = None

    def forget(self) -> None:
        """Build the next forest anew, because other batches have run."""
        self._groups = None

    def of(self, reqs: list[Req], rows: Int32s, *, decodes: bool) -> PrefixForest:
        """The forest of a batch, the same object while its requests are the same.

        rows: see :class:`PrefixForest`.
        decodes: whether all requests decode. A prompt that is being computed may have
            more tokens in the cache in the next step.
        """
        last = self._groups
        # Requests compare by identity.
        same = decodes and reqs == self._reqs
        if last is not None and same and np.array_equal(last.table_row, rows):
            return last
        index: dict[NodeKey, int] = {}
        parent: list[int] = []
        end: list[int] = []
        nodes = [self._node_of(req, index, parent, end) for req in reqs]
        nodes += [-1] * (len(rows) - len(reqs))
        forest = (np.array(each, np.int32) for each in (nodes, parent, end))
        groups = PrefixForest(rows, *forest)
        self._reqs = list(reqs)
        self._groups = groups if decodes else None
        return groups

    def _node_of(
        self, req: Req, index: dict[NodeKey, int], parent: list[int], end: list[int]
    ) -> int:
        """The request's node in the forest, which is added if it is new."""
        planned = self._jobs.planned(req)
        if planned is None or planned[1].leaf < 0:
            return -1
        job, request = planned
        deepest = _deepest_cached(job, request)
        # Requests in different namespaces share no KV.
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


def _deepest_cached(job: JobState, request: ScheduledRequest) -> int:
    """The deepest node of the plan in the cache for a running request, 0 for none."""
    if request.cached_node >= 0:
        return request.cached_node
    req = request.req
    held = req.kv.cache_protected_len
    if not request.decoding:
        held = min(held, req.prefix_len)
    path = job.uses.path(request.node)
    deepest = 0
    for node in reversed(path):
        depth = int(job.uses.depth[node])
        if depth > held:
            return deepest
        if not job.uses.is_prompt_of(node, hash(tuple(req.origin_input_ids[:depth]))):
            break  # the engine's prompt differs from the planned one
        deepest = node
    if request.decoding:
        request.cached_node = deepest  # it is final
    return deepest
