"""The jobs of ``sglang-batch simulate``: one class for each option that names a job.

Nothing heavy is imported until a job is made, because the parser of every command
builds these classes.
"""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..errors import ConfigError
from ..run.option_types import count, number

if TYPE_CHECKING:
    from ..planner.costs.cost_model import CostModel
    from .workloads.mix import Workload

DEFAULT_NUM_REQUESTS = 40_000


class SyntheticJob(Protocol):
    """A job that can be made without a model."""

    @property
    def title(self) -> str:
        """The job's name in the report."""
        ...

    def make(self, num_requests: int | None, seed: int, cost: CostModel) -> Workload:
        """Make the job.

        Args:
            num_requests: None for the job's default.
            cost: of the machine that the job is simulated on.

        Raises:
            ConfigError: there is no such job.
            InputError: a file cannot be used.
        """
        ...


@dataclass(frozen=True, slots=True)
class BlendJob:
    """BurstGPT, OpenVid and MMLU requests of one compute density and sharing ratio."""

    density: float
    sharing: float
    name: str = "blend"

    @classmethod
    def parse(cls, text: str) -> BlendJob:
        """Parse the value of ``--blend``."""
        values = [number(part) for part in text.split(",")]
        if len(values) != 2 or not all(map(math.isfinite, values)):
            raise ArgumentTypeError(f"{text!r} must be two numbers, such as 1.1,0.25")
        return cls(values[0], values[1])

    @property
    def title(self) -> str:
        return f"{self.name} (density {self.density:g}, sharing {self.sharing:g})"

    def make(self, num_requests: int | None, seed: int, cost: CostModel) -> Workload:
        from .workloads.mix import blend

        return blend(
            self.density,
            self.sharing,
            num_requests or DEFAULT_NUM_REQUESTS,
            seed,
            cost.token_time_s,
            cost.kv_read_time_s,
        )


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One of BlendServe's four traces, numbered as in its Table 2."""

    number: int

    @classmethod
    def parse(cls, text: str) -> TraceJob:
        """Parse the value of ``--trace``."""
        if text.strip() not in ("1", "2", "3", "4"):
            raise ArgumentTypeError(f"{text!r} must be 1, 2, 3 or 4")
        return cls(int(text))

    @property
    def _blend(self) -> BlendJob:
        from .workloads.mix import TRACES

        return BlendJob(*TRACES[self.number], name=f"trace {self.number}")

    @property
    def title(self) -> str:
        return self._blend.title

    def make(self, num_requests: int | None, seed: int, cost: CostModel) -> Workload:
        return self._blend.make(num_requests, seed, cost)


@dataclass(frozen=True, slots=True)
class GroupsJob:
    """Groups of ``degree`` requests with a common prefix; lengths in tokens."""

    prefix_len: int
    distinct_len: int
    degree: int
    output_len: int

    @classmethod
    def parse(cls, text: str) -> GroupsJob:
        """Parse the value of ``--groups``."""
        parts = text.split(",")
        if len(parts) != 4:
            raise ArgumentTypeError(
                f"{text!r} must be four numbers, such as 2000,200,16,256"
            )
        return cls(*map(count, parts))

    @property
    def title(self) -> str:
        return (
            f"groups of {self.degree} with {self.prefix_len} + {self.distinct_len} "
            f"prompt tokens, {self.output_len} output tokens"
        )

    def make(self, num_requests: int | None, seed: int, cost: CostModel) -> Workload:
        from .workloads.mix import shared_prefix_groups

        return shared_prefix_groups(
            num_requests or DEFAULT_NUM_REQUESTS,
            self.prefix_len,
            self.distinct_len,
            self.degree,
            self.output_len,
            seed,
        )


@dataclass(frozen=True, slots=True)
class IndustryJob:
    """Snippets of documents, like BatchLLM's industry workload."""

    @property
    def title(self) -> str:
        return "snippets of documents (industry)"

    def make(self, num_requests: int | None, seed: int, cost: CostModel) -> Workload:
        from .workloads.mix import industry

        return industry(num_requests or DEFAULT_NUM_REQUESTS, seed)


@dataclass(frozen=True, slots=True)
class LengthsJob:
    """Published traces of lengths, shuffled together."""

    paths: Sequence[Path]

    @property
    def title(self) -> str:
        return " + ".join(path.name for path in self.paths)

    def make(self, num_requests: int | None, seed: int, cost: CostModel) -> Workload:
        """The first requests of each file, the same number of each.

        By default all of them.
        """
        from .workloads.mix import combine
        from .workloads.traces import read_trace

        limit = None
        if num_requests is not None:
            limit = math.ceil(num_requests / len(self.paths))
        jobs = [read_trace(path, limit=limit, seed=seed) for path in self.paths]
        if len({job.name for job in jobs}) < len(jobs):
            names = ", ".join(map(str, self.paths))
            raise ConfigError(f"--lengths {names}: give each file once.")
        return combine(jobs, seed)
