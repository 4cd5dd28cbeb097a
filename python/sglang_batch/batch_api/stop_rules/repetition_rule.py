"""Ends an answer that loops: its last tokens repeat a pattern."""

from __future__ import annotations

import numpy as np

from .rule_settings import Repetition

# Tokens that fit into the array before it is moved.
_ROOM = 1024


class RepetitionRule:
    """Knows, for each size of a pattern, the last token that differed from the one a pattern
    before.

    The last ``min_count`` patterns of a size are equal if as many tokens as all but the first
    of them are. Until the first size can have as many, no token needs a look at all sizes.
    """

    def __init__(self, settings: Repetition) -> None:
        sizes = np.arange(settings.min_pattern_size, settings.max_pattern_size + 1)
        count = np.maximum(settings.min_count, -(-settings.min_tokens // sizes))
        self._needed = sizes * (count - 1)
        self._differed = np.zeros(len(sizes), np.int64)
        self._num_tokens = self._soonest = 0
        self._first = settings.min_pattern_size - 1
        self._last = settings.max_pattern_size
        # The newest token is first, so the one a pattern before is at the pattern's size.
        self._tokens = np.full(self._last + _ROOM, -1, np.int64)
        self._front = _ROOM

    def feed(self, token: int) -> bool:
        """Add a token to the answer. Returns whether it loops."""
        self._num_tokens = number = self._num_tokens + 1
        front = self._front
        before = self._tokens[front + self._first : front + self._last]
        np.copyto(self._differed, number, where=before != token)
        if not front:
            self._tokens[_ROOM:] = self._tokens[: self._last]
            front = _ROOM
        self._front = front = front - 1
        self._tokens[front] = token
        if number < self._soonest:
            return False
        self._soonest = int((self._differed + self._needed).min())
        return number >= self._soonest
