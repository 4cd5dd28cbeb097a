"""Small jobs for the simulator, and a run of it that ends even if the job does not."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.machine_model import EngineLimits
from sglang_batch.planner.ordering.order import Order
from sglang_batch.planner.prefixes.prefix_tree import PrefixTree, build_prefix_tree
from sglang_batch.planner.simulator.simulator import Simulation, simulate

Prompt = tuple[int, ...]
UNLIMITED = 10**9
# A small job takes a millisecond.
PATIENCE_S = 2.0


def build(prompts: Sequence[Prompt]) -> PrefixTree:
    tokens = np.array([token for prompt in prompts for token in prompt], dtype=np.int32)
    offsets = np.cumsum([0, *map(len, prompts)], dtype=np.int64)
    return build_prefix_tree(tokens, offsets, count_media=True)


def unit_cost(**fields: Any) -> CostModel:
    """A token takes a second to compute, its KV ten seconds to read, without overlap."""
    fields = {"interference_exponent": 1.0, **fields}
    return CostModel(token_time_s=1.0, kv_read_time_s=10.0, **fields)


def own_prompts(*lengths: int) -> list[Prompt]:
    """Prompts of these lengths that share nothing."""
    return [(i,) * length for i, length in enumerate(lengths)]


@dataclass(frozen=True)
class Job:
    """Arguments of ``simulate``. ``density`` is for a dual scan."""

    prompts: list[Prompt]
    output_len: list[int]
    limits: EngineLimits
    cost: CostModel
    order: list[int]
    est_output_len: list[float] | None = None
    max_new_tokens: list[int] | None = None
    density: list[float] | None = None
    num_left: int = 0

    @property
    def tree(self) -> PrefixTree:
        return build(self.prompts)

    @property
    def cached_in_order(self) -> list[int]:
        """Tokens of each prompt that an earlier one has, in whole pages, by position."""
        size = self.limits.page_size
        seen: set[Prompt] = {()}
        cached = []
        for prompt in (self.prompts[i] for i in self.order):
            pages = [prompt[:end] for end in range(0, len(prompt) + 1, size)]
            cached.append(max(len(page) for page in pages if page in seen))
            seen.update(pages)
        return cached

    @property
    def lengths(self) -> NDArray[np.int32]:
        return np.array(self.output_len, dtype=np.int32)

    def simulate(self) -> Simulation:
        def floats(values: list[float] | None) -> NDArray[np.float64] | None:
            return None if values is None else np.array(values, dtype=np.float64)

        limit = self.max_new_tokens
        return simulate(
            self.tree,
            self.cost,
            self.limits,
            order=Order(
                np.array(self.order, dtype=np.int64),
                floats(self.density),
                self.num_left,
            ),
            output_len=self.lengths,
            est_output_len=floats(self.est_output_len),
            max_new_tokens=None if limit is None else np.array(limit, dtype=np.int32),
        )


def make_job(
    prompts: Sequence[Prompt],
    output_len: Sequence[int],
    *,
    capacity: int = UNLIMITED,
    cost: CostModel | None = None,
    order: Sequence[int] | None = None,
    est_output_len: Sequence[float] | None = None,
    density: Sequence[float] | None = None,
    num_left: int = 0,
    **limits: Any,
) -> Job:
    """A small job, in input order by default."""
    return Job(
        prompts=list(prompts),
        output_len=list(output_len),
        limits=EngineLimits(capacity, **limits),
        cost=cost or unit_cost(),
        order=list(range(len(prompts)) if order is None else order),
        est_output_len=None if est_output_len is None else list(est_output_len),
        density=None if density is None else list(density),
        num_left=num_left,
    )


def run(job: Job) -> Simulation:
    """Simulate a job. If it hangs, the test fails.

    Compiled code hears no Python signal handler, so it runs in a child process that the
    system's alarm ends.
    """
    load_compiled_code()
    result: Simulation = _in_child(job.simulate)
    return result


_LOADED: list[Simulation] = []
_HUNG: list[int] = []


def load_compiled_code() -> None:
    """Compile here, once, and not under the alarm in every child."""
    if not _LOADED:
        _LOADED.append(make_job([(1,)], [1]).simulate())


def _in_child(work: Callable[[], Any]) -> Any:
    # While hypothesis looks for the smallest job that hangs, each try takes this long.
    patience = PATIENCE_S / 20 if _HUNG else PATIENCE_S
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, patience)
        try:
            answer = True, work()
        except BaseException as error:
            answer = False, error
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        received = pipe.read()
    _, status = os.waitpid(child, 0)
    if not received:
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
            _HUNG.append(status)
            pytest.fail("the simulation does not end")
        pytest.fail(f"the simulation died with wait status {status}")
    succeeded, result = pickle.loads(received)
    if not succeeded:
        raise result
    return result


# --- Random jobs.

EXPONENTS = st.sampled_from([1.0, 1.47, 3.0, np.inf])


@st.composite
def prompt_lists(draw: st.DrawFn, most: int = 30) -> list[Prompt]:
    """Non-empty prompts of two token ids that continue parts of one another."""
    parts = st.tuples(
        st.integers(0, most),
        st.integers(0, 30),
        st.lists(st.integers(0, 1), max_size=8),
        st.sampled_from([0, 0, 20, 80]),
    )
    prompts: list[Prompt] = []
    for source, keep, own, tail in draw(st.lists(parts, min_size=2, max_size=most)):
        before = prompts[source % len(prompts)][:keep] if prompts else ()
        prompts.append((*before, *own, *[len(prompts) + 2] * tail) or (0,))
    return prompts


@st.composite
def jobs(
    draw: st.DrawFn,
    capacities: st.SearchStrategy[int] | None = None,
    dual: bool | None = None,
) -> Job:
    """Jobs of 2 to 30 requests, in any order, on engines with little room.

    capacities: tokens beyond what the largest request needs.
    """
    prompts = draw(prompt_lists())
    n = len(prompts)
    longest = draw(st.sampled_from([1, 6, 40, 40, 1500]))

    def of_each(values: st.SearchStrategy[Any]) -> list[Any]:
        return list(draw(st.lists(values, min_size=n, max_size=n)))

    output_len = of_each(st.integers(1, longest))
    wrong = of_each(st.sampled_from([0.0, 0.02, 0.3, 1.0, 1.0, 4.0, 50.0]))
    if capacities is None:
        capacities = st.sampled_from([0, 0, 1, 7, 30, 200, UNLIMITED])
    page_size = draw(st.sampled_from([1, 1, 2, 16, 64]))
    needed = max(len(p) + d for p, d in zip(prompts, output_len, strict=True))
    needed = -(-needed // page_size) * page_size
    dual = draw(st.booleans()) if dual is None else dual
    density = of_each(st.sampled_from([0.0, 0.1, 1.0, 1.0, 5.0, 1e3, np.inf]))
    beyond = draw(st.none() | st.just(of_each(st.integers(0, 40))))
    limits = EngineLimits(
        kv_capacity_tokens=needed + draw(capacities),
        step_tokens=draw(st.sampled_from([1, 2, 7, 64, 4096])),
        page_size=page_size,
        max_running=draw(st.sampled_from([None, None, 1, 3])),
        min_step_tokens=draw(st.sampled_from([1, 5, 512])),
        closed_loop=draw(st.booleans()),
        plan_aware_eviction=draw(st.booleans()),
    )
    return Job(
        prompts=prompts,
        output_len=output_len,
        limits=limits,
        cost=draw(costs()),
        order=draw(st.permutations(range(n))),
        est_output_len=[
            d * factor for d, factor in zip(output_len, wrong, strict=True)
        ],
        max_new_tokens=beyond
        and [d + more for d, more in zip(output_len, beyond, strict=True)],
        density=sorted(density, reverse=True) if dual else None,
        num_left=draw(st.integers(0, n)) if dual else 0,
    )


@st.composite
def costs(draw: st.DrawFn) -> CostModel:
    return CostModel(
        token_time_s=draw(st.sampled_from([1e-6, 1.0, 100.0])),
        kv_read_time_s=draw(st.sampled_from([0.0, 1e-3, 1.0, 50.0])),
        attention_time_s=draw(st.sampled_from([0.0, 0.0, 0.01])),
        weight_read_time_s=draw(st.sampled_from([0.0, 3.0])),
        shared_kv_read_once=draw(st.booleans()),
        interference_exponent=draw(EXPONENTS),
    )
