"""What a job came to: the numbers every front door ends with."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from .store.result_log import ResultLog


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts of a finished job.

    seconds: wall time of this run of the job, from the first request rendered to
        the last answer stored; loading the model is not in it.
    tokens_per_second: prompt and output tokens over ``seconds``.
    optimal_cached_share: share of the prompt tokens that a perfect prefix cache
        would have saved; None if the policy did not look.
    """

    completed: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float
    tokens_per_second: float
    cached_share: float
    optimal_cached_share: float | None = None

    @classmethod
    def of(
        cls,
        log: ResultLog,
        seconds: float,
        optimal_prefix_sharing_ratio: float | None = None,
    ) -> Summary:
        usage = log.usage
        tokens = usage.input_tokens + usage.output_tokens
        return cls(
            completed=log.num_completed,
            failed=log.num_failed,
            prompt_tokens=usage.input_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            seconds=round(seconds, 3),
            tokens_per_second=round(tokens / seconds, 1) if seconds else 0.0,
            cached_share=round(usage.cache_hit_rate, 4),
            optimal_cached_share=None
            if optimal_prefix_sharing_ratio is None
            else round(optimal_prefix_sharing_ratio, 4),
        )

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def as_json(self) -> str:
        """The summary as one line of JSON, for scripts."""
        return json.dumps(self.as_dict())

    def as_table(self) -> str:
        """The summary for people."""
        possible = (
            ""
            if self.optimal_cached_share is None
            else f" (possible: {self.optimal_cached_share:.1%})"
        )
        rows = (
            ("requests completed", f"{self.completed:,}"),
            ("requests failed", f"{self.failed:,}"),
            ("prompt tokens", f"{self.prompt_tokens:,}"),
            (
                "cached tokens",
                f"{self.cached_tokens:,} = {self.cached_share:.1%}{possible}",
            ),
            ("output tokens", f"{self.output_tokens:,}"),
            ("seconds", f"{self.seconds:,.1f}"),
            ("tokens per second", f"{self.tokens_per_second:,.0f}"),
        )
        return "\n".join(f"{name:<20} {value}" for name, value in rows)
