"""A job of any size: families of many kinds, in random order.

Every prompt begins with the same 4 tokens. Behind them, a quarter of the requests each:

* chats: one of 8 system prompts of 8 to 64 tokens, and 8 to 39 of their own;
* few-shot: a system prompt, one of 2,000 templates of 8 to 39 tokens, most requests with
  few of them, and 6 to 21 of their own. Answers of 4 tokens, known beforehand;
* documents: one of so many that each has 8 questions on average, with 24 to 71 tokens, and
  questions of 6 to 21 tokens. Short answers;
* others: 16 to 79 tokens, shared with nobody.

A token is a hash of its owner and of its place there. So a job is a function of its
seed, and any part of it can be made alone.
"""

from __future__ import annotations

import numpy as np

from sglang_batch.planner.compiled import jit_without_gil
from sglang_batch.planner.requests import UNKNOWN, Int32s, Int64s, PlanRequests

_VOCAB_SIZE = np.uint64(128_000)
_HEAD_LEN = 4
_NUM_SYSTEMS, _NUM_TEMPLATES, _QUESTIONS = 8, 2000, 8
_CHAT, _FEW_SHOT, _DOCUMENT = 0, 1, 2
_LIMITS = np.array([512, 4, 64, 1024], np.int32)
_KNOWN = np.array([UNKNOWN, 4, UNKNOWN, UNKNOWN], np.int32)


def job_part(begin: int, end: int, num_requests: int, seed: int) -> PlanRequests:
    """The requests ``begin`` to ``end`` of a job."""
    kind, parts = _parts(begin, end, num_requests, np.uint64(seed))
    offsets = np.zeros(end - begin + 1, np.int64)
    np.cumsum(parts[:, :, 1].sum(axis=1), out=offsets[1:])
    tokens = np.empty(int(offsets[-1]), np.int32)
    _fill(tokens, parts, np.uint64(seed))
    return PlanRequests(tokens, offsets, _LIMITS[kind], _KNOWN[kind])


@jit_without_gil
def _parts(
    begin: int, end: int, num_requests: int, seed: np.uint64
) -> tuple[Int32s, Int64s]:
    """The kind of each request, and its prompt's parts: key and length, ``[n, 4, 2]``."""
    kinds = np.empty(end - begin, np.int32)
    parts = np.zeros((end - begin, 4, 2), np.int64)
    for i in range(end - begin):
        number = np.uint64(begin + i)
        drawn = _hash(seed * np.uint64(0x9E37) + number)
        kind = drawn & np.uint64(3)
        # The lower of two numbers: system prompts are not used equally often.
        system = min(
            drawn >> np.uint64(2) & np.uint64(7), drawn >> np.uint64(5) & np.uint64(7)
        )
        share = np.float64(drawn >> np.uint64(40)) / (1 << 24)
        own = np.int64(drawn >> np.uint64(8) & np.uint64(63))
        kinds[i] = kind
        parts[i, 0] = 0, _HEAD_LEN
        parts[i, 3] = 4 * number + 4, 6 + own // 4
        if kind == _CHAT:
            parts[i, 1] = 4 * system + 1, 8 * (system + 1)
            parts[i, 3, 1] = 8 + own // 2
        elif kind == _FEW_SHOT:
            template = np.uint64(share**3 * _NUM_TEMPLATES)
            of_template = _hash(template + np.uint64(1 << 50))
            system = of_template & np.uint64(7)
            parts[i, 1] = 4 * system + 1, 8 * (system + 1)
            parts[i, 2] = 4 * template + 2, 8 + (of_template >> np.uint64(8)) % 32
        elif kind == _DOCUMENT:
            document = np.uint64(share * max(num_requests // (4 * _QUESTIONS), 1))
            length = 24 + _hash(document + np.uint64(1 << 51)) % np.uint64(48)
            parts[i, 2] = 4 * document + 3, length
        else:
            parts[i, 3, 1] = 16 + own
    return kinds, parts


@jit_without_gil
def _fill(tokens: Int32s, parts: Int64s, seed: np.uint64) -> None:
    at = 0
    for i in range(len(parts)):
        for j in range(parts.shape[1]):
            counter = _hash(seed ^ _hash(np.uint64(parts[i, j, 0])))
            for _ in range(parts[i, j, 1]):
                counter += np.uint64(0x9E3779B97F4A7C15)
                high = _hash(counter) >> np.uint64(32)
                tokens[at] = high * _VOCAB_SIZE >> np.uint64(32)
                at += 1


@jit_without_gil
def _hash(x: np.uint64) -> np.uint64:
    """The mixing function of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
