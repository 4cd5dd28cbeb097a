"""``Sample`` of slime, as far as its own function for ``/generate`` uses it.

slime needs torch, ray and Megatron's tools to be imported. This has the fields and the method
of version 0.3.1 that :mod:`sglang_batch.rollout.slime_generate` uses, with its checks.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass
class Sample:
    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    rollout_log_probs: list[float] | None = None
    multimodal_inputs: dict[str, Any] | None = None
    weight_versions: list[str] = field(default_factory=list)
    cached_tokens: int = 0
    status: Status = Status.PENDING

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: list[int],
        log_probs: list[float] | None,
        trainable: bool,
        meta_info: dict[str, Any],
        text: str,
    ) -> None:
        assert args is not None and trainable
        if log_probs is None or len(log_probs) != len(tokens):
            raise ValueError("trainable tokens need log probabilities, one each")
        if self.response_length and self.rollout_log_probs is None:
            raise ValueError("earlier tokens have no log probabilities")
        self.response += text
        self.tokens += tokens
        self.response_length += len(tokens)
        self.rollout_log_probs = [*(self.rollout_log_probs or ()), *log_probs]
        self.cached_tokens += meta_info["cached_tokens"]
        if "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        ends = {
            "length": self.Status.TRUNCATED,
            "abort": self.Status.ABORTED,
            "stop": self.Status.COMPLETED,
        }
        self.status = ends[meta_info["finish_reason"]["type"]]


def slime_args() -> Namespace:
    """Arguments of a slime that asks a router."""
    return Namespace(sglang_router_ip="127.0.0.1", sglang_router_port=1)
