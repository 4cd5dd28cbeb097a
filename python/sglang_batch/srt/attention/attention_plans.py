"""Plans the attention of each step: whether, and how, to read shared prefixes once.

A step runs by its plan if the predicted gain is at least ``MIN_GAIN``. The plan is kept
while the same requests decode and only grow. :class:`Sharing` passes the prefixes that the
requests of a step share from the scheduler to the backends.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sgl_kernel_ext import shared_prefix_attention as kernels
from sgl_kernel_ext.shared_prefix_attention import AttentionPlanner

from ...planner.requests import Int32s
from ..compat.scheduler_types import ScheduleBatch
from .prefix_forest import NO_GROUPS, PrefixForest, PrefixForestBuilder

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# The least ratio of the modelled time without sharing to that with it.
MIN_GAIN = 1.05


class Step(NamedTuple):
    """A plan, and the groups of the batch that it is for."""

    plan: kernels.AttentionPlan
    groups: PrefixForest


# Totals since the start, for ``/server_info``: forwards with decodes, those of them that
# shared, and the KV read in them, in all layers, and not read again.
_TOTALS = (
    "attention_steps", "attention_steps_shared",
    "kv_read_bytes", "kv_read_bytes_saved",
)  # fmt: skip


class StepPlans:
    """Plans the steps of one attention backend.

    decodes: planner for steps that only decode.
    chunks: planner for steps with several tokens of a request, or None if there are none:
        drafts that are verified, or else prompts together with decodes.
    drafts: tokens that a step verifies of each request, one after the other, or 0.
    counts: see ``_TOTALS``.
    """

    def __init__(
        self,
        decodes: AttentionPlanner,
        chunks: AttentionPlanner | None,
        num_layers: int,
        drafts: int = 0,
    ) -> None:
        self.counts = Counter(dict.fromkeys(_TOTALS, 0))
        self._decodes = decodes
        self._chunks = chunks
        self._drafts = drafts
        self._num_layers = num_layers
        self._kept: Step | None = None  # the newest whose requests have as many tokens
        self._judged: PrefixForest = NO_GROUPS
        self._judgement = False
        self._padded_of = self._padded_to = NO_GROUPS
        self._said_too_large = False

    def width(self, mode: ForwardMode) -> int:
        """Tokens of each request in such a forward, 0 where they differ or are a tree."""
        if mode.is_decode():
            return 1
        return self._drafts if mode.is_target_verify() else 0

    def eager(self, groups: PrefixForest, forward_batch: ForwardBatch) -> Step | None:
        """The plan of a step without a CUDA graph, or None if sharing is not faster."""
        kv_len = host_lengths(forward_batch)
        if len(groups.table_row) != len(kv_len):
            return None  # no decodes, or not a batch of the scheduler
        step = self._faster(groups, forward_batch, kv_len)
        self._count(kv_len, step)
        return step

    def pays(self, groups: PrefixForest, forward_batch: ForwardBatch) -> bool:
        """Whether sharing is faster for these decodes, which chooses their graph.

        Decided once for the same groups, whose requests only grow.
        """
        if groups is not self._judged:
            kv_len = host_lengths(forward_batch)
            if len(groups.table_row) != len(kv_len):
                return False
            self._judged = groups
            self._judgement = self._faster(groups, forward_batch, kv_len) is not None
        return self._judgement

    def for_graph(self, groups: PrefixForest, forward_batch: ForwardBatch) -> Step:
        """The plan for the capture or a replay of a decode graph.

        Rows of padding are computed too. Otherwise they would keep earlier values.
        """
        kv_len = host_lengths(forward_batch)
        padded = self._padded(groups, len(kv_len))
        step = self._even_step(padded, forward_batch, kv_len)
        if step is None:
            alone = np.full_like(padded.request_node, -1)
            padded = NO_GROUPS._replace(table_row=padded.table_row, request_node=alone)
            step = self._even_step(padded, forward_batch, kv_len)
        assert step is not None
        if len(groups.table_row):  # no capture
            self._count(kv_len, step)
        return step

    def without_plan(self, groups: PrefixForest, forward_batch: ForwardBatch) -> None:
        """Count decodes whose graph does not share, without rows of padding."""
        self._count(host_lengths(forward_batch)[: len(groups.table_row)], None)

    def _faster(
        self, groups: PrefixForest, forward_batch: ForwardBatch, kv_len: Int32s
    ) -> Step | None:
        """The plan of a step, or None if nothing is shared or that is not faster."""
        step = None
        if not len(groups.node_end):
            return None
        if self.width(forward_batch.forward_mode):
            step = self._even_step(groups, forward_batch, kv_len)
        elif self._chunks is not None:
            q_len = np.array(forward_batch.extend_seq_lens_cpu, np.int32)
            step = self._new(self._chunks, q_len, kv_len, groups)
        return step if step and step.plan.predicted_gain >= MIN_GAIN else None

    def _even_step(
        self, groups: PrefixForest, forward_batch: ForwardBatch, kv_len: Int32s
    ) -> Step | None:
        """The last plan if the same requests decode and only grew, otherwise a new one."""
        width = self.width(forward_batch.forward_mode)
        planner = self._decodes if width == 1 else self._chunks
        assert planner is not None
        kept = self._kept
        if kept is not None and groups is kept.groups:
            plan = kept.plan
            if plan.planner is planner and plan.still_valid(kv_len):
                return kept
        q_len = np.full(len(kv_len), width, np.int32)
        self._kept = self._new(planner, q_len, kv_len, groups)
        return self._kept

    def _new(
        self,
        planner: AttentionPlanner,
        q_len: Int32s,
        kv_len: Int32s,
        groups: PrefixForest,
    ) -> Step | None:
        """A plan, or None if the step exceeds one of the planner's limits."""
        try:
            row, node, parent, end = groups
            plan = planner.plan(q_len, kv_len, row, parent, end, node)
        except kernels.TooLarge as error:
            if not self._said_too_large:
                self._said_too_large = True
                logger.warning("A step too large to share prefixes: %s", error)
            return None
        return Step(plan, groups)

    def _padded(self, groups: PrefixForest, num_rows: int) -> PrefixForest:
        """``groups`` with rows of padding at the end, cached for the last groups."""
        missing = num_rows - len(groups.table_row)
        if not missing:
            return groups
        if self._padded_of is not groups or len(self._padded_to.table_row) != num_rows:
            self._padded_of = groups
            rows = np.pad(groups.table_row, (0, missing))
            nodes = np.pad(groups.request_node, (0, missing), constant_values=-1)
            self._padded_to = groups._replace(table_row=rows, request_node=nodes)
        return self._padded_to

    def _count(self, kv_len: Int32s, step: Step | None) -> None:
        saved = 0
        if step is not None:
            plan = step.plan
            saved = (plan.kv_bytes_unshared - plan.kv_bytes) * self._num_layers
        unshared = int(kv_len.sum()) * self._decodes.token_bytes * self._num_layers
        found = 1, int(saved > 0), unshared - saved, saved
        self.counts.update(dict(zip(_TOTALS, found, strict=True)))


def host_lengths(forward_batch: ForwardBatch) -> Int32s:
    """KV tokens of each row, with drafts that are verified, int32 ``[batch_size]``."""
    lengths: Int32s = forward_batch.seq_lens_cpu.numpy().astype(np.int32)
    if forward_batch.forward_mode.is_target_verify():
        lengths += forward_batch.spec_info.draft_token_num
    return lengths


def sharing_backends(used: Any, mode: ForwardMode | None = None) -> list[Any]:
    """A backend and those that SGLang has combined in it, if they share prefixes.

    mode: leave out the one for prompts or for decodes, if the other runs such forwards.
    """
    names = ["full_attn_backend", "decode_backend", "prefill_backend"]
    if mode is not None:
        # SGLang verifies drafts as prompts, unless --speculative-attention-mode says otherwise.
        decodes = mode.is_decode() or getattr(used, "spec_attn_is_decode", False)
        names.remove("prefill_backend" if decodes else "decode_backend")
    found = [used] if getattr(used, "shares_prefixes", False) else []
    for part in filter(None, (getattr(used, name, None) for name in names)):
        found += sharing_backends(part, mode)
    return found


class Sharing:
    """The scheduler's part of attention that reads shared prefixes once.

    backends: those that share prefixes, empty if none does.
    """

    def __init__(self, model_runner: ModelRunner, jobs: Any) -> None:
        self.backends = sharing_backends(model_runner.attn_backend)
        self._finder = PrefixForestBuilder(jobs)

    def show(self, batch: ScheduleBatch, decoded_apart: int = 0) -> None:
        """Set a batch's groups on the backends, right before the batch runs.

        decoded_apart: rows at its end that decode in a forward of their own.
        """
        mode = batch.forward_mode
        if batch.reqs and (mode.is_decode() or mode.is_mixed()):
            rows = batch.req_pool_indices_cpu.numpy().astype(np.int32)
            decodes = mode.is_decode() or decoded_apart > 0
            reqs = batch.reqs[-decoded_apart:]
            groups = self._finder.of(reqs, rows[-decoded_apart:], decodes=decodes)
        else:
            self._finder.forget()
            groups = NO_GROUPS
        self._set(groups)

    def show_nothing(self) -> None:
        """Have the next forward share nothing: it is not the one that was shown."""
        self._finder.forget()
        self._set(NO_GROUPS)

    def _set(self, groups: PrefixForest) -> None:
        for backend in self.backends:
            backend.groups = groups

    @property
    def totals(self) -> dict[str, int]:
        """Counters for ``/server_info``, empty if prefixes are not shared."""
        totals: Counter[str] = Counter()
        for backend in self.backends:
            totals.update(backend.plans.counts)
        return totals
