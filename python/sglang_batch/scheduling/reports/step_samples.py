"""The last steps of each kind with their seconds, from which a machine's costs are learnt.

Nothing here decides anything: what is learnt reaches the schedulers with a job's plan, so that
all ranks decide alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ...planner.costs.step_costs import StepSample

# Steps of one kind that are kept.
PER_KIND = 6


class KeptSamples:
    """The last :data:`PER_KIND` steps of each kind: of about as many tokens, rows and KV, with
    and without requests that arrive or end, after prompts and not."""

    def __init__(self, samples: Iterable[StepSample] = ()) -> None:
        self._kinds: dict[tuple[int, ...], deque[StepSample]] = {}
        for sample in samples:
            self.add(sample)

    def add(self, sample: StepSample) -> None:
        """Keep a step, in place of the oldest of its kind if there are too many."""
        kind = (
            int(sample.prompt_tokens).bit_length(),
            int(sample.prompts).bit_length(),
            int(sample.decodes).bit_length(),
            int(sample.kv_tokens).bit_length() // 2,
            int(sample.requests > 0),
            int(sample.after_prompts),
        )
        self._kinds.setdefault(kind, deque(maxlen=PER_KIND)).append(sample)

    @property
    def samples(self) -> list[StepSample]:
        """All of them, by kind, oldest first."""
        return [sample for _, kept in sorted(self._kinds.items()) for sample in kept]


class StepSamples:
    """Times steps from one to the next.

    Args:
        late: whether a step is scheduled while the one before it runs, so that the time up
            to the next one is that of the step before.
    """

    def __init__(self, *, late: bool) -> None:
        self._late = late
        self._kept = KeptSamples()
        self._begun = 0.0
        # The steps whose time runs: the last one, and with ``late`` the one before.
        self._steps: list[StepSample | None] = []

    def begin(self, now: float, step: StepSample | None, requests: float = 0.0) -> None:
        """A step begins, and the time of one before it ends.

        Args:
            now: a clock's seconds.
            step: what it computes, its seconds 0. None for a step that is not like others,
                and times around it are not kept.
            requests: half of those that arrived or ended in that time.
        """
        self._steps.append(step)
        if len(self._steps) <= 1 + self._late:
            self._begun = now
            return
        timed, *self._steps = self._steps
        if timed is not None and None not in self._steps:
            seconds = now - self._begun
            self._kept.add(timed._replace(seconds=seconds, requests=requests))
        self._begun = now

    def idle(self) -> None:
        """Nothing runs: the time up to the next step is nobody's."""
        self._steps.clear()

    def take(self) -> list[StepSample]:
        """All that were kept since the last call."""
        kept, self._kept = self._kept, KeptSamples()
        return kept.samples
