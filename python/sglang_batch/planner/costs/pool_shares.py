"""The second pool of a model that keeps more than plain KV, in scheduler and simulator.

Of it a request holds a share that stops growing: the KV of sliding-window layers ends at the
window, and a recurrent state is as large after one token as after a million. So each running
request is charged the most that it will hold, from the start, and each shared prefix in use
what makes it usable: the window before its end, or one state.
"""

from __future__ import annotations

from typing import NamedTuple

from ..compiled import jit


class PoolShares(NamedTuple):
    """Who holds how much.

    capacity: units that requests and prefixes may hold together, tokens or states. 0: the
        model has no such pool.
    row_units: units of each running request besides those of its tokens.
    prompt_tokens: most tokens of a request's own prompt that it holds KV of.
    answer_tokens: the same for its answer.
    prefix_tokens: the same for a shared prefix.
    prefix_units: units of each shared prefix besides those of its tokens: 1 if it can be
        used only at a token whose state is kept.
    """

    capacity: int
    row_units: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    prefix_tokens: int = 0
    prefix_units: int = 0


NO_POOL = PoolShares(0)


def of_states(states: int) -> PoolShares:
    """A pool of recurrent states.

    A running request has one, and one that it took up or left in the cache is locked.
    """
    # One more while a prompt is put into the cache, before its last state is unlocked.
    return PoolShares(max(1, states - 1), row_units=2, prefix_units=1)


def of_windows(
    capacity: int, window: int, page_size: int, step_tokens: int, late: int
) -> PoolShares:
    """A pool of KV of sliding-window layers.

    Args:
        capacity: tokens in it.
        window: tokens before the end of a prefix that make it usable, in whole pages.
        late: decode steps after which the engine frees what has left a window. What a
            prompt leaves behind is freed after the step that computes it.
    """
    return PoolShares(
        capacity - min(step_tokens, capacity // 2),
        row_units=page_size,
        prompt_tokens=window,
        answer_tokens=window + late,
        prefix_tokens=window,
    )


@jit
def share(pool: PoolShares, own: int, decode_steps: int) -> int:
    """The most that a request holds: ``own`` prompt tokens and so many steps."""
    prompt = min(own, pool.prompt_tokens)
    return int(pool.row_units + prompt + min(decode_steps, pool.answer_tokens))


@jit
def has_room(
    pool: PoolShares, held: int, units: int, num_prefixes: int, margin: float
) -> bool:
    """Whether a waiting request fits.

    Args:
        held: units of running requests.
        units: the share of the request.
        num_prefixes: shared prefixes in use once it has joined.
        margin: share of the pool to leave free.
    """
    if pool.capacity == 0:
        return True
    prefixes = num_prefixes * (pool.prefix_units + pool.prefix_tokens)
    return bool(held + prefixes + units <= pool.capacity * (1.0 - margin))
