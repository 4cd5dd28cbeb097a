"""Lengths of the answers to each prompt, learnt over the steps of a training run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..planner.output_lengths.estimates import completed
from .rollout_call import GroupResult, RolloutGroup

# Tokens still to come of an answer, while none to its prompt has ended.
DEFAULT_EXCESS = 256.0


class LengthHistory:
    """Expects of a prompt's answers the mean length of its last ones.

    Answers that were aborted count as longer than they are (Kaplan-Meier, see
    :mod:`sglang_batch.planner.output_lengths.estimates`). Otherwise groups that end with their
    ``k``-th sample would teach that all answers are short.

    Args:
        keep: answers to each prompt that count, the newest ones.
        most_prompts: prompts that are remembered, those seen last.

    Raises:
        ConfigError: one of them is below 1.
    """

    def __init__(self, keep: int = 32, most_prompts: int = 1 << 20) -> None:
        for name, value in (("keep", keep), ("most_prompts", most_prompts)):
            if value < 1:
                raise ConfigError(f"{name}={value!r} must be 1 or more.")
        self._keep = keep
        self._most_prompts = most_prompts
        # Lengths by prompt, negated for answers that were aborted.
        self._lengths: dict[str, list[int]] = {}

    def expected(self, group: RolloutGroup) -> float | None:
        """Tokens that an answer to a group's prompt is expected to have, or None."""
        found = self._lengths.get(_key(group))
        if not found:
            return None
        length = np.abs(np.array(found, np.int64))
        mean, _ = completed(length, np.array(found) < 0, DEFAULT_EXCESS)
        return max(1.0, float(mean.mean()))

    def expecting(self, groups: Iterable[RolloutGroup]) -> list[RolloutGroup]:
        """The groups, with what is expected of those that do not say it themselves."""
        return [
            group
            if group.expected_tokens is not None
            else group.model_copy(update={"expected_tokens": self.expected(group)})
            for group in groups
        ]

    def observe(self, group: RolloutGroup, result: GroupResult) -> None:
        """Learn from the answers to a group. Failed samples and empty ones say nothing."""
        new = [
            len(each.output_ids) * (-1 if each.status == "aborted" else 1)
            for each in result.samples
            if each.status != "failed" and each.output_ids
        ]
        if not new:
            return
        key = _key(group)
        lengths = [*self._lengths.pop(key, ()), *new]
        self._lengths[key] = lengths[-self._keep :]
        if len(self._lengths) > self._most_prompts:
            del self._lengths[next(iter(self._lengths))]

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, as plain values for a checkpoint."""
        return {"lengths": {key: list(each) for key, each in self._lengths.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self._lengths = {key: list(each) for key, each in state["lengths"].items()}


def _key(group: RolloutGroup) -> str:
    """The group's id, or else its prompt."""
    if group.id is not None:
        return f"id {group.id}"
    if group.input_ids is None:
        prompt = (group.text or "").encode()
    else:
        prompt = np.array(group.input_ids, np.int32).tobytes()
    return hashlib.sha256(prompt).hexdigest()[:32]
