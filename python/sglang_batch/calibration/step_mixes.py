"""The requests whose steps show the costs of an engine: steps of every size and mix.

Prompts from a few tokens to several steps, in small and in large numbers, with answers of
different lengths: so steps compute prompts alone, decode alone, and mix both, with few rows and
with many. Each also with a prefix that is in the cache for all but the first.
"""

from __future__ import annotations

from dataclasses import dataclass

from .decode_shapes import DecodeLimits

# Answers of the requests of a mix, in turn.
OUTPUTS = (1, 80, 6, 48, 16, 80)
# Prompts, as shares of the tokens of a step.
_PROMPTS = (1 / 64, 1 / 16, 1 / 4, 1.0, 2.5)
# Prompt tokens of a mix, in steps, and its numbers of requests.
_STEPS = 12
_NUMBERS = (2, 8, 32, 128, 512)
_KV_SHARE = 0.7
# Requests for each that runs at a time: the others join while some decode.
_TURNS = 2
# Shorter prompts share nothing.
_LEAST_SHARED = 32


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests of a job, some of which join as others end.

    lengths, outputs: tokens of each prompt and of each answer.
    shared: tokens that all prompts begin with, which the first one leaves in the cache.
    """

    lengths: list[int]
    outputs: list[int]
    shared: int = 0


def mixes(limits: DecodeLimits, vocab_size: int) -> list[Mix]:
    """The mixes that an engine has room for, small ones first.

    Their own parts of prompts can all begin differently, with a token of the vocabulary.
    """
    room = int(limits.kv_capacity_tokens * _KV_SHARE)
    most = max(1, min(max(OUTPUTS), limits.context_len // 4, room // 4))
    longest = min(limits.context_len - 2, room) - most
    found: list[Mix] = []
    for number in _NUMBERS:
        for share in _PROMPTS:
            length = min(longest, max(4, int(share * limits.step_tokens)))
            if length <= 0:
                continue
            own = max(2, length // 8)
            for shared in (0, length - own):
                rows = min(
                    number,
                    vocab_size // _TURNS,
                    _most_rows(limits, length, shared, most),
                )
                if rows <= 0 or (shared and (rows <= 2 or length < _LEAST_SHARED)):
                    continue
                total = _TURNS * rows
                outputs = [min(most, OUTPUTS[i % len(OUTPUTS)]) for i in range(total)]
                mix = Mix([length] * total, outputs, shared)
                if mix not in found:
                    found.append(mix)
    return found


def _most_rows(limits: DecodeLimits, length: int, shared: int, output: int) -> int:
    """Requests that run at the same time. What they share is there once, so that they
    may read more KV than there is room for."""
    tokens = min(limits.kv_capacity_tokens * _KV_SHARE, _STEPS * limits.step_tokens)
    rows = int((tokens - shared) // (length - shared + output))
    return min(limits.max_running, rows)
