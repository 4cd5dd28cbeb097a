"""When a mixed step is faster as two forwards at the same time, by a table of trials.

As two forwards, decodes and prompts, a mixed step reads the weights twice, and memory reads of
the one run during the arithmetic of the other. Which is faster depends on the step's shape.
A trial measures some shapes (:class:`TrialCell`), and :class:`OverlapTable` decides for
each step from the nearest of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...planner.costs.cost_model import MIN_SPLIT_GAIN, overlapped

# How far beyond the measured shapes the table is believed, as a factor.
_REACH_PROMPTS = math.sqrt(2)
_REACH_DECODES = 2.0


@dataclass(frozen=True, slots=True)
class MixedStep:
    """The shape of a step with prompts and decodes.

    prompt_tokens: prompt tokens that it computes, 1 or more.
    rows: requests that decode, 1 or more.
    context: mean KV tokens of these requests, 1 or more.
    """

    prompt_tokens: int
    rows: int
    context: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCell:
    """One shape, measured.

    sm_share: multiprocessors that the prompts were limited to. None: no limit.
    fused_s: seconds of the step as one forward.
    split_s: seconds as two forwards at the same time.
    prompts_s, decodes_s: seconds of each of the two forwards alone.
    """

    prompt_tokens: int
    rows: int
    context: int
    sm_share: int | None = None
    fused_s: float
    split_s: float
    prompts_s: float
    decodes_s: float

    @property
    def gain(self) -> float:
        """By how much splitting is faster: 0.05 is 5 %, a negative number slower."""
        return self.fused_s / self.split_s - 1


@dataclass(frozen=True, slots=True)
class OverlapChoice:
    """A step is split.

    sm_share: multiprocessors for its prompts. None: no limit.
    gain: expected, as :attr:`TrialCell.gain`.
    """

    sm_share: int | None = None
    gain: float = 0.0


class OverlapTable:
    """The decision for each mixed step, from measured shapes.

    cells: in any order. Of each shape and share the last one counts.
    """

    def __init__(self, cells: Sequence[TrialCell]) -> None:
        self.cells = tuple(cells)
        # Share -> (rows, context) -> prompt tokens -> gain.
        self._gains: dict[int | None, dict[tuple[int, int], dict[int, float]]] = {}
        for cell in self.cells:
            pairs = self._gains.setdefault(cell.sm_share, {})
            line = pairs.setdefault((cell.rows, cell.context), {})
            line[cell.prompt_tokens] = cell.gain

    def choose(self, step: MixedStep) -> OverlapChoice | None:
        """How to split a step, or None to run it as one forward.

        For each share, the gain is that of the nearest measured decodes (by rows and
        context, on a logarithmic scale), interpolated over the logarithm of prompt
        tokens. The largest one counts. Shapes far from all measured ones are not split.
        """
        best: OverlapChoice | None = None
        for share, pairs in self._gains.items():
            gain = _gain_at(pairs, step)
            if gain >= MIN_SPLIT_GAIN and (best is None or gain > best.gain):
                best = OverlapChoice(share, gain)
        return best

    @property
    def on(self) -> tuple[TrialCell, ...]:
        """Of each shape that is split, its fastest cell."""
        fastest: dict[tuple[int, int, int], TrialCell] = {}
        for cell in self.cells:
            shape = cell.prompt_tokens, cell.rows, cell.context
            best = fastest[shape].gain if shape in fastest else -math.inf
            if cell.gain >= MIN_SPLIT_GAIN and cell.gain > best:
                fastest[shape] = cell
        return tuple(fastest.values())

    @property
    def exponent(self) -> float:
        """k of :func:`~.cost_model.overlapped` for steps that are split.

        The k with the least squared error of log seconds over the cells that are on,
        between 1 and infinity: ``split = (prompts^k + decodes^k)^(1/k)``. 1 if none is on.
        """
        cells = self.on
        if not cells:
            return 1.0

        def error(inverse: float) -> float:
            k = 1 / inverse if inverse else math.inf
            return sum(
                math.log(overlapped(c.prompts_s, c.decodes_s, k) / c.split_s) ** 2
                for c in cells
            )

        # Each cell's error has one minimum over 1/k, but their sum may have several.
        low, high = 0.0, 1.0
        for _ in range(4):
            grid = np.linspace(low, high, 41)
            at = int(np.argmin([error(float(x)) for x in grid]))
            low, high = float(grid[max(at - 1, 0)]), float(grid[min(at + 1, 40)])
        inverse = float(grid[at])
        return math.inf if inverse <= 0 else 1 / inverse


def _gain_at(pairs: dict[tuple[int, int], dict[int, float]], step: MixedStep) -> float:
    """The expected gain, minus infinity where nothing near was measured."""

    def distance(pair: tuple[int, int]) -> float:
        rows, context = pair
        return _ratio(rows, step.rows) + _ratio(context, step.context)

    nearest = min(pairs, key=distance)
    reach = math.log2(_REACH_DECODES) + 1e-9
    if (
        _ratio(nearest[0], step.rows) > reach
        or _ratio(nearest[1], step.context) > reach
    ):
        return -math.inf
    tokens, gains = zip(*sorted(pairs[nearest].items()), strict=True)
    if not (
        tokens[0] / _REACH_PROMPTS <= step.prompt_tokens <= tokens[-1] * _REACH_PROMPTS
    ):
        return -math.inf
    return float(np.interp(math.log(step.prompt_tokens), np.log(tokens), gains))


def _ratio(one: float, other: float) -> float:
    """By how many doublings two positive numbers differ."""
    return abs(math.log2(one / other))
