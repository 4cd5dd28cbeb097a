"""How each step attends: by a plan that reads shared prefixes once, or without one.

A step gets a plan where the plan's predicted gain reaches ``MIN_GAIN``. While the same
requests decode and only grow, their plan is kept.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np

from sgl_kernel_ext.shared_prefix_attention import Plan, Planner, TooLarge

from ..planner.requests import Int32s
from .prefix_groups import NO_GROUPS, PrefixGroups

logger = logging.getLogger(__name__)

# Modelled time without sharing over that with it, from which on a plan is taken.
MIN_GAIN = 1.05


class Step(NamedTuple):
    """A plan, and the lengths that its batch has now.

    q_len, kv_len: int32 ``[n]``, for each row of the batch.
    """

    plan: Plan
    q_len: Int32s
    kv_len: Int32s
    groups: PrefixGroups


class SharingCounts:
    """What sharing has brought so far.

    steps, shared_steps: forwards with decodes, and those that shared.
    kv_bytes, kv_bytes_unshared: read from the KV cache in them, in all layers, and
        what that would have been with every request reading all of its own.
    """

    def __init__(self) -> None:
        self.steps = self.shared_steps = 0
        self.kv_bytes = self.kv_bytes_unshared = 0


class StepPlans:
    """Plans the steps of one attention backend.

    decodes, mixed: planners for steps that only decode and for those with prompts
        beside; None where there are no such.
    token_bytes: K and V of a token in one layer.

    Attributes:
        counts: what was read and saved.
    """

    def __init__(
        self, decodes: Planner, mixed: Planner | None, num_layers: int, token_bytes: int
    ) -> None:
        self.counts = SharingCounts()
        self._decodes = decodes
        self._mixed = mixed
        self._num_layers = num_layers
        self._token_bytes = token_bytes
        self._kept: Step | None = None  # the newest of the decodes' planner
        self._judged: PrefixGroups = NO_GROUPS
        self._judgement = False
        self._padded_of = self._padded_to = NO_GROUPS
        self._said_too_large = False

    def eager(self, groups: PrefixGroups, forward_batch: Any) -> Step | None:
        """The plan of a step that no graph runs; None if it is better off without."""
        kv_len = host_lengths(forward_batch)
        if len(groups.table_row) != len(kv_len):
            return None  # no decodes, or a batch that the scheduler did not make
        step: Step | None = None
        if not len(groups.node_end):
            pass  # nothing is shared
        elif forward_batch.forward_mode.is_decode():
            step = self._decode_step(groups, kv_len)
        elif self._mixed is not None:
            q_len = np.array(forward_batch.extend_seq_lens_cpu, np.int32)
            step = self._new(self._mixed, q_len, kv_len, groups)
        if step is not None and step.plan.predicted_gain < MIN_GAIN:
            step = None
        self._count(kv_len, step)
        return step

    def pays(self, groups: PrefixGroups, forward_batch: Any) -> bool:
        """Whether decodes are to share, which chooses their graph.

        Judged once for the same groups: their requests only grow.
        """
        if not len(groups.node_end):
            return False
        if groups is not self._judged:
            kv_len = host_lengths(forward_batch)
            if len(groups.table_row) != len(kv_len):
                return False
            step = self._decode_step(groups, kv_len)
            self._judgement = step is not None and step.plan.predicted_gain >= MIN_GAIN
            self._judged = groups
        return self._judgement

    def for_graph(self, groups: PrefixGroups, forward_batch: Any) -> Step:
        """The plan of decodes that a captured graph attends for, with padded rows.

        Rows of padding are computed too, or what was there before would go on.
        """
        kv_len = host_lengths(forward_batch)
        groups = self._padded(groups, len(kv_len))
        step = self._decode_step(groups, kv_len)
        if step is None:
            step = self._decode_step(_alone(groups.table_row), kv_len)
        assert step is not None
        self._count(kv_len, step)
        return step

    def for_capture(self, num_rows: int) -> Step:
        """A plan to capture a graph with; each replay brings its own."""
        alone = _alone(np.zeros(num_rows, np.int32))
        step = self._decode_step(alone, np.ones(num_rows, np.int32))
        assert step is not None
        return step

    def without_plan(self, num_rows: int, forward_batch: Any) -> None:
        """Decodes whose graph does not share; padded rows are not counted."""
        self._count(host_lengths(forward_batch)[:num_rows], None)

    def _decode_step(self, groups: PrefixGroups, kv_len: Int32s) -> Step | None:
        """The last plan where the same requests have only grown, else a new one."""
        kept = self._kept
        if kept is not None and groups is kept.groups and kept.plan.still_good(kv_len):
            return kept._replace(kv_len=kv_len)
        q_len = np.ones(len(kv_len), np.int32)
        self._kept = self._new(self._decodes, q_len, kv_len, groups)
        return self._kept

    def _new(
        self, planner: Planner, q_len: Int32s, kv_len: Int32s, groups: PrefixGroups
    ) -> Step | None:
        """None if there is more of anything than the planner has room for."""
        try:
            plan = planner.plan(
                q_len,
                kv_len,
                groups.table_row,
                groups.node_parent,
                groups.node_end,
                groups.request_node,
            )
        except TooLarge as error:
            if not self._said_too_large:
                self._said_too_large = True
                logger.warning("Such steps read shared prefixes alone: %s", error)
            return None
        return Step(plan, q_len, kv_len, groups)

    def _padded(self, groups: PrefixGroups, num_rows: int) -> PrefixGroups:
        """With rows behind that share nothing; the same object for the same groups."""
        missing = num_rows - len(groups.table_row)
        if not missing:
            return groups
        if self._padded_of is not groups or len(self._padded_to.table_row) != num_rows:
            self._padded_of = groups
            self._padded_to = groups._replace(
                table_row=np.pad(groups.table_row, (0, missing)),
                request_node=np.pad(
                    groups.request_node, (0, missing), constant_values=-1
                ),
            )
        return self._padded_to

    def _count(self, kv_len: Int32s, step: Step | None) -> None:
        saved = 0
        if step is not None:
            plan = step.plan
            saved = (plan.kv_bytes_unshared - plan.kv_bytes) * self._num_layers
        unshared = int(kv_len.sum()) * self._token_bytes * self._num_layers
        counts = self.counts
        counts.steps += 1
        counts.shared_steps += saved > 0
        counts.kv_bytes += unshared - saved
        counts.kv_bytes_unshared += unshared


def _alone(table_row: Int32s) -> PrefixGroups:
    """Groups of requests that share nothing."""
    alone = np.full(len(table_row), -1, np.int32)
    return PrefixGroups(table_row, alone, NO_GROUPS.node_parent, NO_GROUPS.node_end)


def host_lengths(forward_batch: Any) -> Int32s:
    """KV tokens of each row; ``[batch_size]``."""
    lengths: Int32s = forward_batch.seq_lens_cpu.numpy().astype(np.int32)
    return lengths
