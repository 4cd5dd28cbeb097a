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
    def of_counts(
        cls,
        *,
        completed: int,
        failed: int,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        seconds: float,
        optimal_cached_share: float | None = None,
    ) -> Summary:
        """The summary of a job whose counts are known; rates follow from them."""
        tokens = prompt_tokens + output_tokens
        return cls(
            completed=completed,
            failed=failed,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            seconds=round(seconds, 3),
            tokens_per_second=round(tokens / seconds, 1) if seconds else 0.0,
            cached_share=round(cached_tokens / prompt_tokens, 4)
            if prompt_tokens
            else 0.0,
            optimal_cached_share=optimal_cached_share
            if optimal_cached_share is None
            else round(optimal_cached_share, 4),
        )

    @classmethod
    def of_log(
        cls, log: ResultLog, seconds: float, optimal_cached_share: float | None = None
    ) -> Summary:
        """The summary of a job whose results are in a log."""
        return cls.of_counts(
            completed=log.num_completed,
            failed=log.num_failed,
            prompt_tokens=log.usage.input_tokens,
            cached_tokens=log.usage.cached_tokens,
            output_tokens=log.usage.output_tokens,
            seconds=seconds,
            optimal_cached_share=optimal_cached_share,
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
