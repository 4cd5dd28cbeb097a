"""Rollouts for reinforcement learning: groups of samples, planned as one job.

    from sglang_batch.rollout import LengthHistory, RolloutClient, RolloutGroup

See ``docs/python.md``.
"""

from __future__ import annotations

from .rollout_call import (
    GroupResult,
    RolloutCall,
    RolloutGroup,
    RolloutSample,
    SampleResult,
    VersionSpan,
)
from .rollout_client import LengthHistory, RolloutClient

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
