"""The jobs of ``sglang-batch simulate``: one function for each option that names a job.

Nothing heavy is imported until a job is made, because the parser of every command
calls them.
"""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..run.option_types import count, number

if TYPE_CHECKING:
    from ..planner.costs.cost_model import CostModel
    from .workloads.mix import Workload

DEFAULT_NUM_REQUESTS = 40_000
TRACES = {1: (1.4, 0.35), 2: (0.9, 0.35), 3: (1.4, 0.05), 4: (0.9, 0.05)}
"""(density, sharing) of BlendServe's four traces, Table 2."""


@dataclass(frozen=True, slots=True)
class SyntheticJob:
    """A job that can be made without a model.

    title: the job's name in the report.
    make: makes it from the number of requests (None: the job's default), the seed, and
        the costs of the machine that it is simulated on. Raises ConfigError if there is
        no such job, and InputError if a file cannot be used.
    """

    title: str
    make: Callable[[int | None, int, CostModel], Workload]


def blend_job(text: str) -> SyntheticJob:
    """``--blend``: BurstGPT, OpenVid and MMLU requests of one density and sharing ratio."""
    values = [number(part) for part in text.split(",")]
    if len(values) != 2 or not all(map(math.isfinite, values)):
        raise ArgumentTypeError(f"{text!r} must be two numbers, such as 1.1,0.25")
    return _blend("blend", *values)


def trace_job(text: str) -> SyntheticJob:
    """``--trace``: one of BlendServe's four traces, numbered as in its Table 2."""
    if text.strip() not in ("1", "2", "3", "4"):
        raise ArgumentTypeError(f"{text!r} must be 1, 2, 3 or 4")
    return _blend(f"trace {int(text)}", *TRACES[int(text)])


def _blend(name: str, density: float, sharing: float) -> SyntheticJob:
    def make(num_requests: int | None, seed: int, cost: CostModel) -> Workload:
        from .workloads.mix import blend

        size = num_requests or DEFAULT_NUM_REQUESTS
        times = cost.token_time_s, cost.kv_read_time_s
        return blend(density, sharing, size, seed, *times)

    return SyntheticJob(f"{name} (density {density:g}, sharing {sharing:g})", make)


def groups_job(text: str) -> SyntheticJob:
    """``--groups``: groups of requests with a common prefix; lengths in tokens."""
    parts = text.split(",")
    if len(parts) != 4:
        raise ArgumentTypeError(
            f"{text!r} must be four numbers, such as 2000,200,16,256"
        )
    prefix_len, distinct_len, degree, output_len = map(count, parts)

    def make(num_requests: int | None, seed: int, cost: CostModel) -> Workload:
        from .workloads.mix import shared_prefix_groups

        size = num_requests or DEFAULT_NUM_REQUESTS
        return shared_prefix_groups(
            size, prefix_len, distinct_len, degree, output_len, seed
        )

    title = (
        f"groups of {degree} with {prefix_len} + {distinct_len} prompt tokens, "
        f"{output_len} output tokens"
    )
    return SyntheticJob(title, make)


def industry_job() -> SyntheticJob:
    """``--industry``: snippets of documents, like BatchLLM's industry workload."""

    def make(num_requests: int | None, seed: int, cost: CostModel) -> Workload:
        from .workloads.mix import industry

        return industry(num_requests or DEFAULT_NUM_REQUESTS, seed)

    return SyntheticJob("snippets of documents (industry)", make)


def lengths_job(paths: Sequence[Path]) -> SyntheticJob:
    """``--lengths``: the first requests of each published trace, as many of each,
    shuffled together. By default all of them."""

    def make(num_requests: int | None, seed: int, cost: CostModel) -> Workload:
        from .workloads.mix import combine
        from .workloads.traces import read_trace

        limit = None
        if num_requests is not None:
            limit = math.ceil(num_requests / len(paths))
        jobs = [read_trace(path, limit=limit, seed=seed) for path in paths]
        if len({job.name for job in jobs}) < len(jobs):
            names = ", ".join(map(str, paths))
            raise ConfigError(f"--lengths {names}: give each file once.")
        return combine(jobs, seed)

    return SyntheticJob(" + ".join(path.name for path in paths), make)
