"""A job's progress on a terminal or in a log."""

from __future__ import annotations

from tqdm import tqdm

from .store.result_log import ResultLog

_FORMAT = "{desc}: {percentage:3.0f}% | {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


class Progress:
    """Two bars, one after the other: prompts rendered for the plan, then answers.

    The second shows the rate, the time left and the share of prompt tokens that
    came from the prefix cache.
    """

    def __init__(self, num_requests: int, log: ResultLog) -> None:
        self._num_requests = num_requests
        self._log = log
        self._bar: tqdm[None] | None = None
        self._stage = ""

    def rendered(self) -> None:
        """Another prompt was rendered."""
        self._show("Planning", self._num_requests - self._log.num_done, 0).update()

    def update(self) -> None:
        """Another answer was stored."""
        if self._stage == "Planning" and self._bar and self._bar.n < self._bar.total:
            return  # a request that could not be rendered, while others still are
        bar = self._show("Running", self._num_requests, self._log.num_done - 1)
        bar.set_postfix_str(
            f"cached {self._log.usage.cache_hit_rate:.0%}", refresh=False
        )
        bar.update(self._log.num_done - bar.n)

    def _show(self, stage: str, total: int, initial: int) -> tqdm[None]:
        if self._bar is None or stage != self._stage:
            self._close()
            self._stage = stage
            self._bar = tqdm(
                desc=stage,
                total=total,
                initial=initial,
                unit="req",
                bar_format=_FORMAT,
                dynamic_ncols=True,
            )
        return self._bar

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()
