"""The requests of a job, as arrays: the planner's input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

UNKNOWN = -1
# Placeholders of images and sounds among the tokens of a plan, below this number and the next:
# above all vocabularies, and below tokens that stand for anything else.
FIRST_PLACEHOLDER, END_OF_PLACEHOLDERS = 1 << 29, 1 << 30

# The side of a request: from the compute-intensive or from the memory-intensive end of
# the order, or an online request, which is in no order.
LEFT, RIGHT, ONLINE = 0, 1, 2
SIDES = ("left", "right", "online")


def sums_before(values: NDArray[Any]) -> NDArray[Any]:
    """The sum of all values before each index, and of all values, ``[n + 1]``."""
    return np.concatenate([[0], np.cumsum(values)])


@dataclass(frozen=True, slots=True)
class PlanRequests:
    """The ``n`` requests of a job, by index in input order.

    tokens: int32 ``[num_tokens]``, all prompts one after the other. From a token on that
        no other prompt has, nothing is shared.
    offsets: int64 ``[n + 1]``. Prompt ``i`` is ``tokens[offsets[i]:offsets[i + 1]]``.
    max_new_tokens: int32 ``[n]``, most tokens that a request may generate.
    known_output_len: int32 ``[n]``, tokens that a request will generate, if that is
        known beforehand (``ignore_eos``, a fixed generation), else ``UNKNOWN``.
    adapter: int32 ``[n]``, the number of each request's LoRA adapter, 0 for the model alone.
        None if no request has one. Prompts of different adapters begin with different tokens.
    expected_output_len: int32 ``[n]``, tokens by earlier answers to the prompt, else
        ``UNKNOWN``. None if nothing is expected of any.
    """

    tokens: Int32s
    offsets: Int64s
    max_new_tokens: Int32s
    known_output_len: Int32s
    adapter: Int32s | None = None
    expected_output_len: Int32s | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def input_len(self) -> Int32s:
        """Prompt tokens of each request, int32 ``[n]``."""
        return np.diff(self.offsets).astype(np.int32)

    @property
    def without_estimate(self) -> Bools:
        """Requests of which neither the length nor an expectation is known, bool ``[n]``."""
        unknown: Bools = self.known_output_len == UNKNOWN
        if self.expected_output_len is not None:
            unknown &= self.expected_output_len == UNKNOWN
        return unknown

    def take(self, indices: Int64s) -> PlanRequests:
        """Some of the requests, in the order of ``indices``. Their tokens are copied."""
        lengths = self.input_len[indices].astype(np.int64)
        offsets = sums_before(lengths)
        begin = self.offsets[:-1][indices]
        places = np.repeat(begin - offsets[:-1], lengths) + np.arange(offsets[-1])
        return PlanRequests(
            tokens=self.tokens[places],
            offsets=offsets,
            max_new_tokens=self.max_new_tokens[indices],
            known_output_len=self.known_output_len[indices],
            adapter=None if self.adapter is None else self.adapter[indices],
            expected_output_len=(
                None
                if self.expected_output_len is None
                else self.expected_output_len[indices]
            ),
        )
