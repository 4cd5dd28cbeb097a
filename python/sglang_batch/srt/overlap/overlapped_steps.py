"""Splits mixed steps of a server where that is faster, and runs all others as SGLang does.

The scheduler calls :meth:`OverlappedSteps.announce` with each batch, and SGLang's
``ModelRunner.forward`` is hooked by :func:`overlap_forward`. A fault while a step is split
turns splitting off for the process. The step is then run as one forward, which writes the
same KV to the same places.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunnerOutput

from ..compat.scheduler_types import ScheduleBatch
from .batch_halves import (
    HalfForwards,
    StockForward,
    join,
    split,
    wants_prompt_logprobs,
    why_whole,
)
from .overlap_table import MixedStep, OverlapChoice, OverlapTable

logger = logging.getLogger(__name__)

# The model runner's attribute that the hook looks at.
ATTRIBUTE = "offline_overlap"

Policy = Callable[[MixedStep], OverlapChoice | None]
"""Decides how to split a step, or not to."""


def always(step: MixedStep) -> OverlapChoice | None:
    """The policy that splits every step."""
    return OverlapChoice()


class OverlappedSteps:
    """The mixed steps of one model runner, whose forwards pass this object from now on.

    policy: which steps to split, and how. At first all.
    on_whole: called when a step that was announced as split runs as one forward.
    """

    def __init__(self, model_runner: Any, halves: HalfForwards) -> None:
        self._runner = model_runner
        self.halves = halves
        self.policy: Policy = always
        self.on_whole: Callable[[], None] = lambda: None
        self._next: tuple[int, OverlapChoice] | None = None
        self.counts: Counter[str] = Counter()
        self.fault: str | None = None
        self.table: OverlapTable | None = None
        setattr(model_runner, ATTRIBUTE, self)

    def follow(self, table: OverlapTable) -> None:
        """Split the steps that a trial's table says, and none if it has no such shape."""
        self.table, self.policy = table, table.choose
        if not table.on:
            delattr(self._runner, ATTRIBUTE)

    def announce(self, batch: ScheduleBatch) -> int:
        """Decide about the next forward.

        Returns:
            How many rows, at the end of the batch, are decoded apart. 0 if it runs as a
            whole.
        """
        self._next = None
        if self.fault is not None or not batch.forward_mode.is_mixed():
            return 0
        rows = len(batch.decoding_reqs or ())
        prompt_tokens = int(batch.extend_num_tokens or 0) - rows
        if not rows or prompt_tokens <= 0:
            return 0
        self.counts["mixed"] += 1
        if batch.return_logprob and wants_prompt_logprobs(
            batch.extend_lens, batch.extend_logprob_start_lens
        ):
            return 0
        context = float(batch.seq_lens_cpu[-rows:].sum()) / rows
        choice = self.policy(MixedStep(prompt_tokens, rows, context))
        if choice is None:
            return 0
        self._next = rows, choice
        return rows

    def forward(self, stock: StockForward, batch: ForwardBatch) -> ModelRunnerOutput:
        """A forward of the model runner, split if it was announced as such."""
        announced, self._next = self._next, None
        if announced is None:
            return stock(batch)
        rows, choice = announced
        reason = why_whole(batch, rows)
        if reason is not None:
            if not self.counts["refused"]:
                logger.info("A mixed step runs as one forward, because of %s.", reason)
            self.counts["refused"] += 1
            self.on_whole()
            return stock(batch)
        try:
            output = self.split_forward(stock, batch, rows, choice.sm_share)
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"
            logger.exception(
                "A step could not be split. It runs as one forward, and so do all "
                'others until the server is restarted; "overlap": "off" avoids this.'
            )
            self.on_whole()
            return stock(batch)
        self.counts["split"] += 1
        return output

    def split_forward(
        self, stock: StockForward, batch: ForwardBatch, rows: int, sm_share: int | None
    ) -> ModelRunnerOutput:
        """The output of a mixed batch from two forwards at the same time.

        rows: how many of its rows decode, the last ones.
        sm_share: the SMs that prompts are limited to.
        """
        halves = split(batch, rows, self._runner.kv_index_translator)
        decodes, prompts = self.halves.run(stock, halves, sm_share)
        return ModelRunnerOutput(
            logits_output=join(decodes, prompts), can_run_graph=False
        )

    @property
    def totals(self) -> dict[str, object]:
        """For ``/server_info``: mixed steps, those split, the fault, and the trial."""
        totals: dict[str, object] = {
            "mixed_steps": self.counts["mixed"],
            "split_steps": self.counts["split"],
            "split_fault": self.fault,
        }
        if self.table is not None:
            totals["split_trial"] = [asdict(cell) for cell in self.table.cells]
            totals["split_exponent"] = self.table.exponent
            totals["split_weight_reads"] = 2 if self.table.on else 1
        return totals


def overlap_forward(
    original: Callable[..., ModelRunnerOutput],
    model_runner: Any,
    forward_batch: ForwardBatch,
    *args: Any,
    **options: Any,
) -> ModelRunnerOutput:
    """AROUND hook on ``ModelRunner.forward``."""
    steps: OverlappedSteps | None = getattr(model_runner, ATTRIBUTE, None)
    if steps is None or args or any(value is not None for value in options.values()):
        return original(model_runner, forward_batch, *args, **options)
    return steps.forward(lambda batch: original(model_runner, batch), forward_batch)
