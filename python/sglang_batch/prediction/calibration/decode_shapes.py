"""The batches whose steps are measured: decodes of given lengths, and steps of every mix."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import ConfigError
from .row_share import StepPoint

# Decode steps that run before those that are measured, and the measured ones.
WARM_STEPS = 8
TIMED_STEPS = 32
# Fewer would make the median of a batch a matter of luck.
MIN_TIMED_STEPS = 8
# Steps in which some rows decode and others do not yet, besides those of prompts.
_ARRIVAL_STEPS = 16

MIN_ROWS = 8
# One row keeps 1/w of the device busy, so w is seen only with more rows than that. More
# are rare in a CUDA graph of small batches.
MAX_ROWS = 64
# Enough KV that reading it takes about as long as reading the weights of an 8B model.
MAX_TOKENS = 1 << 16
# On a CPU the prompts take most of the time.
MAX_TOKENS_ON_CPU = 1 << 13
# With fewer in a row the sum would grow by more than a quarter while a batch decodes.
_TOKENS_PER_ROW = 4 * (WARM_STEPS + TIMED_STEPS)
_LEAST_TOKENS_PER_ROW = 8
_KV_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """The limits of an engine, in tokens and requests.

    step_tokens: most prompt tokens in a step.
    on_cpu: whether there is no accelerator.
    """

    kv_capacity_tokens: int
    max_running: int
    context_len: int
    page_size: int
    step_tokens: int
    on_cpu: bool = False


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of all batches.

    rows: requests in a batch.
    tokens: prompt tokens in the larger batches, all requests together.
    new_tokens: tokens that each request generates.
    """

    rows: int
    tokens: int
    new_tokens: int


def chosen_sizes(
    limits: DecodeLimits, rows: int | None = None, tokens: int | None = None
) -> Sizes:
    """The largest batches that are useful and that the engine has room for.

    Args:
        rows, tokens: the user's choice.

    Raises:
        ConfigError: the engine is too small for it, or for any batch.
    """
    if limits.max_running < MIN_ROWS:
        raise ConfigError(
            f"The engine runs at most {limits.max_running} requests at a time, and "
            f"{MIN_ROWS} are needed; raise --max-running-requests."
        )
    most_tokens = tokens or (MAX_TOKENS_ON_CPU if limits.on_cpu else MAX_TOKENS)
    prompt_steps = math.ceil(most_tokens / limits.step_tokens)
    # The first of them is the prompt's.
    new_tokens = 1 + WARM_STEPS + TIMED_STEPS + _ARRIVAL_STEPS + prompt_steps
    if rows is None:
        rows = MAX_ROWS
        while rows > MIN_ROWS and (
            rows > limits.max_running
            or min(most_tokens, _room(limits, rows, new_tokens))
            < rows * _TOKENS_PER_ROW
        ):
            rows //= 2
    if not MIN_ROWS <= rows <= limits.max_running:
        raise ConfigError(
            f"--rows {rows} must be from {MIN_ROWS} to {limits.max_running}, the "
            "engine's most running requests; --max-running-requests changes that."
        )
    room = _room(limits, rows, new_tokens)
    least = rows * _LEAST_TOKENS_PER_ROW
    if room < least:
        raise ConfigError(
            f"{rows} rows need {least:,} tokens, and the engine has room for "
            f"{max(0, room):,}: its KV holds {limits.kv_capacity_tokens:,} and its "
            f"context {limits.context_len:,}. Raise --max-total-tokens or "
            "--context-length, or give fewer --rows."
        )
    if tokens is not None and not least <= tokens <= room:
        raise ConfigError(
            f"--tokens {tokens} must be from {least} to {room} with {rows} rows and this "
            "engine's KV and context."
        )
    return Sizes(rows, min(most_tokens, room), new_tokens)


def _room(limits: DecodeLimits, rows: int, new_tokens: int) -> int:
    """Most prompt tokens in a batch whose longest row has three quarters of them."""
    kv = int(_KV_SHARE * limits.kv_capacity_tokens)
    longest = limits.context_len - new_tokens - 1
    return min(kv - rows * (new_tokens + limits.page_size), longest * 4 // 3)


def shapes(sizes: Sizes) -> list[list[int]]:
    """The prompt lengths of each batch, the longest row first.

    Rows of one length, with a quarter, half and all of the tokens, tell the time of
    the weights and of each token of KV. With all tokens, one row has a quarter, half
    and three quarters of them, and the others have equal parts of the rest.
    """
    rows, tokens = sizes.rows, sizes.tokens
    equal = [_split(tokens * part // 4, rows) for part in (1, 2, 4)]
    uneven = []
    for part in (1, 2, 3):
        longest = tokens * part // 4
        uneven.append([longest, *_split(tokens - longest, rows - 1)])
    return equal + uneven


def step_point(lengths: list[int], seconds: float) -> StepPoint:
    """A measured batch: ``seconds`` of its median step, when rows have grown."""
    grown = WARM_STEPS + (TIMED_STEPS + 1) / 2
    return StepPoint(
        total=sum(lengths) + len(lengths) * grown,
        longest=max(lengths) + grown,
        seconds=seconds,
    )


def _split(tokens: int, rows: int) -> list[int]:
    """``tokens`` in almost equal parts, the larger ones first."""
    each, more = divmod(tokens, rows)
    return [each + 1] * more + [each] * (rows - more)


# The requests whose steps show the costs of an engine: steps of every size and mix.
#
# Prompts from a few tokens to several steps, in small and in large numbers, with answers of
# different lengths: so steps compute prompts alone, decode alone, and mix both, with few rows and
# with many. Each also with a prefix that is in the cache for all but the first.

# Answers of the requests of a mix, in turn.
OUTPUTS = (1, 80, 6, 48, 16, 80)
# Prompts, as shares of the tokens of a step.
_PROMPTS = (1 / 64, 1 / 16, 1 / 4, 1.0, 2.5)
# Prompt tokens of a mix, in steps, and its numbers of requests.
_STEPS = 12
_NUMBERS = (2, 8, 32, 128, 512)
_MIX_KV_SHARE = 0.7
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
    room = int(limits.kv_capacity_tokens * _MIX_KV_SHARE)
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
    tokens = min(limits.kv_capacity_tokens * _MIX_KV_SHARE, _STEPS * limits.step_tokens)
    rows = int((tokens - shared) // (length - shared + output))
    return min(limits.max_running, rows)
