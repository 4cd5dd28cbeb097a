"""The requests whose steps show the costs of an engine: steps of every size and mix.

Prompts from a few tokens to several steps, in small and in large numbers, with answers of
different lengths: so steps compute prompts alone, decode alone, and mix both, with few rows and
with many.
"""

from __future__ import annotations

from dataclasses import dataclass

from .decode_shapes import DecodeLimits

# Answers of the requests of a mix, in turn.
OUTPUTS = (1, 40, 6, 24, 12, 40)
# Prompts, as shares of the tokens of a step.
_PROMPTS = (1 / 64, 1 / 16, 1 / 4, 1.0, 2.5)
# Prompt tokens of a mix, in steps, and its numbers of requests.
_STEPS = 12
_NUMBERS = (2, 8, 32, 128, 512)
_KV_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests that are sent at the same time.

    lengths, outputs: tokens of each prompt and of each answer.
    """

    lengths: list[int]
    outputs: list[int]


def mixes(limits: DecodeLimits) -> list[Mix]:
    """The mixes that an engine has room for, small ones first."""
    longest = limits.context_len - max(OUTPUTS) - 2
    longest = min(longest, int(limits.kv_capacity_tokens * _KV_SHARE) - max(OUTPUTS))
    found: list[Mix] = []
    for number in _NUMBERS:
        for share in _PROMPTS:
            length = min(longest, max(4, int(share * limits.step_tokens)))
            most_tokens = min(
                limits.kv_capacity_tokens * _KV_SHARE, _STEPS * limits.step_tokens
            )
            rows = min(
                number, limits.max_running, int(most_tokens // (length + max(OUTPUTS)))
            )
            mix = Mix([length] * rows, [OUTPUTS[i % len(OUTPUTS)] for i in range(rows)])
            if rows > 0 and length > 0 and mix not in found:
                found.append(mix)
    return found
