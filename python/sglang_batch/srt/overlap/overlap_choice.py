"""Whether a server splits mixed steps: by its settings, its model, and a trial."""

from __future__ import annotations

import logging
from typing import Any

from .half_forwards import HalfForwards, StreamedHalves, ThreadedHalves
from .overlap_limits import why_never
from .overlap_table import OverlapTable
from .overlap_trial import OverlapTrial
from .overlapped_steps import OverlappedSteps

logger = logging.getLogger(__name__)

# SMs that prompts are limited to in a trial, besides no limit.
SM_SHARES = (72, 88, 104, 120)


def overlap_by_default(scheduler: Any) -> OverlappedSteps | None:
    """The splitting of a scheduler's mixed steps, or None if all run as one forward.

    Args:
        scheduler: SGLang's, with its memory pools and CUDA graphs.
    """
    runner = scheduler.tp_worker.model_runner
    setting = runner.server_args.offline_config.overlap
    if setting == "off" or not scheduler.is_mixed_chunk:
        return None
    if setting == "auto" and runner.device != "cuda":
        return None
    reason = why_never(runner)
    if reason is not None:
        log = logger.warning if setting == "on" else logger.info
        log("Mixed steps run as one forward, because of %s.", reason)
        return None
    try:
        return _set_up(scheduler, trial=setting == "auto")
    except Exception:
        logger.exception("Mixed steps run as one forward: they could not be split.")
        return None


def _set_up(scheduler: Any, *, trial: bool) -> OverlappedSteps | None:
    runner = scheduler.tp_worker.model_runner
    steps = OverlappedSteps(runner, halves_of(runner, SM_SHARES if trial else ()))
    if not trial:
        logger.info("Mixed steps run as two forwards at the same time.")
        return steps
    try:
        table = OverlapTrial(scheduler, steps).run()
    except Exception:
        steps.follow(OverlapTable([]))
        raise
    steps.follow(table)
    on, tried = len(table.on), len({(c.prompt_tokens, c.rows) for c in table.cells})
    logger.info(
        "Trial of mixed steps as two forwards at the same time: %d of %d shapes are "
        "faster; exponent %.2f.", on, tried, table.exponent,
    )  # fmt: skip
    return steps


def halves_of(model_runner: Any, sm_shares: tuple[int, ...] = ()) -> HalfForwards:
    """What runs the halves of a step on this machine.

    Args:
        sm_shares: limits of SMs for prompts to prepare, besides none.
    """
    if model_runner.device != "cuda":
        return ThreadedHalves(model_runner)
    from .cuda_lanes import lanes_by_share

    return StreamedHalves(model_runner, lanes_by_share(sm_shares))
