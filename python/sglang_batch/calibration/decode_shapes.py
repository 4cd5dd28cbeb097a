"""The batches whose decode steps are measured: sums of lengths and longest rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ConfigError
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
