"""Rollouts for reinforcement learning: groups of samples, planned as one job.

    from sglang_batch.rollout import LengthHistory, RolloutClient, RolloutGroup

See ``docs/python.md``.
"""

from __future__ import annotations

from .length_history import LengthHistory
from .rollout_call import RolloutCall, RolloutGroup, RolloutSample, VersionSpan
from .rollout_client import RolloutClient
from .rollout_results import GroupResult, SampleResult

__all__ = [
    "GroupResult",
    "LengthHistory",
    "RolloutCall",
    "RolloutClient",
    "RolloutGroup",
    "RolloutSample",
    "SampleResult",
    "VersionSpan",
]
