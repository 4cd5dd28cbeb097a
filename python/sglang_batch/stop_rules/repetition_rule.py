"""Ends an answer that loops: its last tokens repeat a pattern."""

from __future__ import annotations

import numpy as np

from .rule_settings import Repetition

# Tokens that fit into the array before it is moved.
_ROOM = 1024


class RepetitionRule:
    """Counts, for each size of a pattern, the tokens that equal the one a pattern before.

    The last ``min_count`` patterns of a size are equal if as many tokens as all but the first
    of them are.
    """

    def __init__(self, settings: Repetition) -> None:
        sizes = np.arange(settings.min_pattern_size, settings.max_pattern_size + 1)
        count = np.maximum(settings.min_count, -(-settings.min_tokens // sizes))
        self._needed = (sizes * (count - 1)).astype(np.int32)
        self._run = np.zeros(len(sizes), np.int32)
        self._first = settings.min_pattern_size - 1
        self._last = settings.max_pattern_size
        # The newest token is first, so the one a pattern before is at the pattern's size.
        self._tokens = np.full(self._last + _ROOM, -1, np.int64)
        self._front = _ROOM

    def feed(self, token: int) -> bool:
        """Add a token to the answer. Returns whether it loops."""
        front = self._front
        before = self._tokens[front + self._first : front + self._last]
        run = self._run
        run += 1
        run *= before == token
        if not front:
            self._tokens[_ROOM:] = self._tokens[: self._last]
            front = _ROOM
        self._front = front = front - 1
        self._tokens[front] = token
        return bool((run >= self._needed).any())
