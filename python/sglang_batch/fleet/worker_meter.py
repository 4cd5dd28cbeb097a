"""How fast a worker works, compared with what its costs predict."""

from __future__ import annotations

from ..planner.costs.cost_model import CostModel
from ..request import Usage

# A measurement needs so many answers in so many busy seconds, and is then started anew.
_MIN_ANSWERS = 64
_MIN_SECONDS = 10.0
# The share of a new measurement in the rate. Lines differ, so one says little.
_NEW_SHARE = 0.5


class WorkerMeter:
    """Measures a worker while it has lines.

    Attributes:
        rate: predicted seconds of the work that was done in each second, about constant for
            workers whose costs are right. None until it is known.
        tokens_per_s: prompt and output tokens of the last measurement, None before it.
        answers, usage: of all lines.
    """

    def __init__(self) -> None:
        self.rate: float | None = None
        self.tokens_per_s: float | None = None
        self.num_answers = 0
        self.usage = Usage()
        self._begun: float | None = None
        self._answers = 0
        self._work_s = 0.0
        self._tokens = 0

    def busy(self, now: float) -> None:
        """It has lines, from now on."""
        if self._begun is None:
            self._begin(now)

    def idle(self) -> None:
        """It has none: what was measured so far is cut short, and does not count."""
        self._begun = None

    def answered(self, cost: CostModel, usage: Usage, now: float) -> bool:
        """Add an answer.

        Args:
            cost: of the worker's machine.

        Returns:
            Whether :attr:`rate` is new.
        """
        self.num_answers += 1
        self.usage += usage
        if self._begun is None:
            return False
        self._answers += 1
        self._work_s += work_s(cost, usage)
        self._tokens += usage.input_tokens + usage.output_tokens
        seconds = now - self._begun
        if self._answers < _MIN_ANSWERS or seconds < _MIN_SECONDS:
            return False
        found = self._work_s / seconds
        last = self.rate
        self.rate = found if last is None else last + _NEW_SHARE * (found - last)
        self.tokens_per_s = self._tokens / seconds
        self._begin(now)
        return True

    def _begin(self, now: float) -> None:
        self._begun, self._answers, self._work_s, self._tokens = now, 0, 0.0, 0


def work_s(cost: CostModel, usage: Usage) -> float:
    """Seconds of one answered line: compute of its new tokens, and reads of its KV."""
    new = max(usage.input_tokens - usage.cached_tokens, 0)
    prefill_s = float(cost.prefill_time_s(new, usage.cached_tokens))
    decode_s = cost.token_time_s * usage.output_tokens
    memory_s = float(cost.memory_time_s(usage.input_tokens, usage.output_tokens))
    return float(cost.step_time_s(prefill_s + decode_s, memory_s))
