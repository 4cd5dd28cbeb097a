"""The machine that a job is planned for: costs of the model on it, and its limits."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from ..errors import ConfigError
from .compiled import jit
from .costs.cost_model import CostModel, num_states, num_window_tokens
from .costs.model_spec import ModelSpec


class PoolShares(NamedTuple):
    """Who holds how much of a pool.

    capacity: tokens or states of requests and prefixes together. 0: there is no such pool.
    row_units: units of each running request besides those of its tokens.
    prompt_tokens, answer_tokens: most tokens of a request's own prompt, and of its answer, that
        it holds KV of.
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
    """A pool of recurrent states: a running request has one, and one that it took up or left in
    the cache is locked."""
    # One more while a prompt is put into the cache, before its last state is unlocked.
    return PoolShares(max(1, states - 1), row_units=2, prefix_units=1)


def of_windows(
    capacity: int, window: int, page_size: int, step_tokens: int, late: int
) -> PoolShares:
    """A pool of KV of sliding-window layers.

    Args:
        capacity: tokens in it.
        window: tokens before the end of a prefix that make it usable, in whole pages.
        late: decode steps after which the engine frees tokens that have left a window.
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
        held, units: units of running requests, and the share of the request.
        num_prefixes: shared prefixes in use once it has joined.
        margin: share of the pool to leave free.
    """
    if pool.capacity == 0:
        return True
    prefixes = num_prefixes * (pool.prefix_units + pool.prefix_tokens)
    return bool(held + prefixes + units <= pool.capacity * (1.0 - margin))


# SGLang runs one request for so many states, and frees tokens that have left a window after so many
# decode steps, by default.
STATES_PER_ROW = 3
WINDOW_EVICTION_STEPS = 128

# Where steps are small, the requests that start the right side must not fill them.
_MIN_STEP_TOKENS = 512


def min_step_tokens(step_tokens: int) -> int:
    """``EngineLimits.min_step_tokens`` of SGLang, for so many tokens in a step."""
    return min(_MIN_STEP_TOKENS, max(1, step_tokens // 8))


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Settings of the simulated engine.

    kv_capacity_tokens: KV cache size in tokens.
    step_tokens: most tokens in a step, prompts and decodes together
        (``chunked_prefill_size`` of SGLang when chunks are mixed).
    page_size: tokens in a page, the unit in which KV is allocated and prefixes are shared.
    max_running: most requests running at once. None: as many as the KV cache holds.
    min_step_tokens: prompt tokens that the dual scanner may always compute in a step,
        whatever the density, so that the right side gets started.
    closed_loop: whether the dual scanner's prefill budget follows the needs of each
        step. False: the average of BlendServe's Algorithm 3.
    plan_aware_eviction: evict the prefix whose next use is furthest away. False: evict
        the least recently used.
    as_sglang: simulate SGLang with the offline scheduler. False: a textbook engine,
        where each output token takes a decode step, siblings share a prefix in the step
        that computes it, and a retracted request computes its KV again. In SGLang the
        first output token comes with the prompt, and siblings wait for the following step.
        A request holds its KV for one step after its last one, and decodes in that step
        too unless it ended by its limit. KV is allocated as prompts are computed. At
        most one prompt is partly computed, and it is continued first. Retracted requests
        are offloaded. The free KV margin and the estimates adapt to observed lengths.
    dense: whether KV is as many rows times the longest of them, as in dense batches.
    prefetches: whether KV on the host comes back while steps run (``prefetch_bytes``).
        SGLang parks rows in a switch of batches only then.
    overlapped: whether SGLang schedules a step while the last one runs, and so learns one
        step late that a request has ended.
    second_pool: of a model with sliding windows or recurrent states, the pool that keeps
        them. With ``as_sglang`` and ``plan_aware_eviction``, prompts of models with states
        are cut where a state is kept. Other engines have states everywhere.

    Raises:
        ConfigError: a number is below 1.
    """

    kv_capacity_tokens: int
    step_tokens: int = 2048
    page_size: int = 1
    max_running: int | None = None
    min_step_tokens: int = 512
    closed_loop: bool = True
    plan_aware_eviction: bool = True
    as_sglang: bool = False
    dense: bool = False
    prefetches: bool = False
    overlapped: bool = True
    second_pool: PoolShares = NO_POOL

    @property
    def keeps_states(self) -> bool:
        """Whether a prefix can be used only at a token whose recurrent state was kept."""
        by_plan = self.as_sglang and self.plan_aware_eviction
        return by_plan and self.second_pool.prefix_units > 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_number = value is not None and not isinstance(value, bool | PoolShares)
            if is_number and value < 1:
                raise ConfigError(f"{field.name}={value!r} must be 1 or more.")


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on its hardware: how long work takes, and how much fits.

    datasheet: costs before any step was timed. None if ``cost`` is of a datasheet itself.
    """

    cost: CostModel
    limits: EngineLimits
    datasheet: CostModel | None = None


def second_pool(
    model: ModelSpec, kv_tokens: int, step_tokens: int, tp: int = 1
) -> tuple[PoolShares, int | None]:
    """The pool for states or windows that SGLang makes next to so many tokens of KV, and the most
    requests that run at once. None: as many as the KV holds."""
    states = num_states(model, kv_tokens, tp)
    if states:
        return of_states(states), max(1, states // STATES_PER_ROW)
    tokens = num_window_tokens(model, kv_tokens)
    if not tokens:
        return NO_POOL, None
    window = model.window + 1
    return of_windows(tokens, window, 1, step_tokens, WINDOW_EVICTION_STEPS), None
