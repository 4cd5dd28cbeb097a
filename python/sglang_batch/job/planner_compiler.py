"""Compile the planner ahead of the first plan.

numba keeps what it compiles on disk, so this takes long only once per installation.
"""

from __future__ import annotations

import logging
import threading

import numpy as np

from ..config import OfflineBatchConfig
from ..planner.costs.cost_model import CostModel
from ..planner.costs.hardware import hardware
from ..planner.costs.model_spec import TYPICAL_MODEL
from ..planner.machine_model import EngineLimits, Machine
from ..planner.requests import UNKNOWN, PlanRequests
from ..planner.sharding.speeds import ShardSpeeds
from ..policies import POLICY_TABLE
from .job_planner import MIN_SAMPLED, JobPlanner
from .job_shards import JobProgress

logger = logging.getLogger(__name__)

# Loading compiled code takes less than this, in seconds.
_LOADING_S = 5.0


def compile_planner(config: OfflineBatchConfig) -> None:
    """Make all plans of a tiny job: the first, one from answers, and for two engines."""
    if not POLICY_TABLE[config.policy].uses_prompts:
        return
    said = threading.Timer(
        _LOADING_S,
        logger.info,
        ["Compiling the planner, once per installation; the first plan waits for it"],
    )
    said.daemon = True
    said.start()
    try:
        _plan(config)
    finally:
        said.cancel()


def _plan(config: OfflineBatchConfig) -> None:
    num_requests, prompt_len = 2 * MIN_SAMPLED, 8
    # Two families of requests that share half of their prompts.
    prompts = np.arange(num_requests * prompt_len, dtype=np.int32).reshape(
        num_requests, prompt_len
    )
    prompts[::2, :4], prompts[1::2, :4] = 1, 2
    requests = PlanRequests(
        tokens=prompts.ravel(),
        offsets=np.arange(num_requests + 1, dtype=np.int64) * prompt_len,
        max_new_tokens=np.full(num_requests, 16, np.int32),
        known_output_len=np.full(num_requests, UNKNOWN, np.int32),
    )
    cost = CostModel.of(TYPICAL_MODEL, hardware("h100"), attention_flops=True)
    machine = Machine(cost, EngineLimits(kv_capacity_tokens=4096, as_sglang=True))
    numbers = np.arange(num_requests)
    planner = JobPlanner(requests, numbers, machine, config)
    for shard in planner.plans():
        shard.for_scheduler(machine)
    lengths = np.full(num_requests, 4, np.int32)
    lengths[0] = -2  # it still runs
    planner.observe(numbers, lengths)
    planner.plans()
    planner = JobPlanner(requests, numbers, machine, config, 2)
    done, _ = planner.plans()
    # The other one gives requests to the one that has ended.
    has_ended = np.isin(numbers, np.concatenate(done.sides))
    progress = JobProgress(
        np.where(has_ended, 0, 1).astype(np.int32),
        has_ended,
        np.where(has_ended, 0.0, 1.0),
        whole=True,
    )
    planner.plans(progress, ShardSpeeds.equal(2))
