"""Costs from the steps that an engine's first scheduler has timed, now and in earlier runs."""

from __future__ import annotations

import hashlib
import logging
from datetime import UTC, datetime
from typing import cast

import torch

from ....errors import StoreWriteError
from ....planner.costs.cost_model import CostModel
from ....planner.costs.model_spec import ModelSpec
from ....planner.steps.parallelism import Parallelism
from ....planner.steps.step_law import StepLaw, fit_step_law, samples_array
from ....planner.steps.step_sample import StepSample
from ....scheduling.reports.step_samples import KeptSamples
from ....store.measured.timed_steps_file import (
    TimedSteps,
    TimedStepsKey,
    keep_steps,
    kept_steps,
)
from ...compat.job_control import StepsQuery, StepsQueryOutput, channel_of
from ...compat.server_types import SchedulerState, TokenizerManager
from ...compat.support import STATE_KEY

logger = logging.getLogger(__name__)

_WIDTH = len(StepSample._fields)


def timed_steps_key(
    device: str | None, state: SchedulerState, spec: ModelSpec, parallel: Parallelism
) -> TimedStepsKey:
    """What the steps of this engine hold for.

    Args:
        device: the driver's name, None for a CPU.
    """
    backend = state.get("decode_attention_backend") or state.get("attention_backend")
    spread = f"TP{parallel.tp} ranks{parallel.attention_ranks} EP{parallel.ep}"
    return TimedStepsKey(
        device=device or f"cpu, {torch.get_num_threads()} threads",
        model=hashlib.sha256(repr(spec).encode()).hexdigest()[:16],
        attention_backend=backend or "unknown",
        parallelism=spread,
        mixed=bool(state[STATE_KEY]["mixed_chunk"]),
    )


def timed_cost(cost: CostModel, key: TimedStepsKey) -> CostModel:
    """The costs by the steps that were kept for this engine, or as they are."""
    law = kept_law(cost, key)
    if law is None:
        return cost
    logger.info(
        "Planning with the costs of %d timed steps, half of which are within %.0f %%",
        law.num_samples,
        100 * law.noise,
    )
    return law.applied(cost)


def kept_law(cost: CostModel, key: TimedStepsKey) -> StepLaw | None:
    """The law of the steps that were kept for this engine. None if they are too few.

    Args:
        cost: of the engine by its datasheet.
    """
    kept = kept_steps(key)
    if kept is None:
        return None
    samples = [StepSample(*each) for each in kept.samples if len(each) == _WIDTH]
    return fit_step_law(samples_array(samples), cost)


async def keep_timed_steps(manager: TokenizerManager, key: TimedStepsKey) -> int:
    """Ask the first scheduler for its steps and keep them, with earlier ones.

    Returns:
        Steps that are kept in all. 0 if the scheduler has timed none, or the file cannot be
        written, which is logged.
    """
    channel = channel_of(manager, StepsQueryOutput)
    answers = cast(list[StepsQueryOutput], await channel(StepsQuery()))
    found = next((answer.samples for answer in answers if answer.samples), [])
    if not found:
        return 0
    before = kept_steps(key)
    known = KeptSamples(
        StepSample(*each)
        for each in (before.samples if before is not None else [])
        if len(each) == _WIDTH
    )
    for begin in range(0, len(found), _WIDTH):
        known.add(StepSample(*found[begin : begin + _WIDTH]))
    entry = TimedSteps(
        key=key,
        samples=[list(map(float, sample)) for sample in known.samples],
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    try:
        keep_steps(entry)
    except StoreWriteError as error:
        logger.warning("Timed steps are not kept: %s", error)
        return 0
    return len(entry.samples)
