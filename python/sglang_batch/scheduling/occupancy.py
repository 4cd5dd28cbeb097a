"""What the running requests hold, read and will need: the basis of admission.

Time is the *decode clock*: it ticks once for every step in which running requests
decode. All sums are kept up to date by what changes; nothing here walks over the
running requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..planner import kv_forecast
from ..planner.kv_forecast import KvForecast, make_forecast
from .line import LEFT, ONLINE, RIGHT, Line

# Share of the KV that stays free for requests that outlive their estimates: at rest,
# at most, and by which factors it changes when KV ran out and when it did not.
MARGIN_MIN, MARGIN_MAX = 0.01, 0.2
_MARGIN_UP, _MARGIN_DOWN = 2.0, 0.998
# Requests that outlived their estimates raise those of the next, by at most this much.
_BIAS_MAX = 16.0
# So many estimates count as right before anything was observed.
_PRIOR = 32.0
_EACH_SIDE = (LEFT, RIGHT, ONLINE)
_NOBODY: tuple[Line, ...] = ()


@dataclass(slots=True)
class _Ends:
    """Lines that take their last step at one tick: how many, and their reads, by side."""

    decoding: list[int] = field(default_factory=lambda: [0, 0, 0])
    reads: list[int] = field(default_factory=lambda: [0, 0, 0])


class Occupancy:
    """KV and reads of running lines, by side.

    Attributes:
        clock: the decode clock.
        decoding: requests of each side that decode.
        kv: tokens of KV of each side's requests, without shared prefixes.
        reads: tokens of KV that each side's decodes read in a step, that of the token
            they compute included.
        running: requests that run, those whose prompt is being computed included.
        complete: those of them that have all their tokens and have not left yet: the
            engine learns of an end one step late.
        margin: share of the KV that admission leaves free.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clock = 0
        self.decoding = [0, 0, 0]
        self.kv = [0, 0, 0]
        self.reads = [0, 0, 0]
        self.running = 0
        self.complete = 0
        self.margin = MARGIN_MIN
        self._estimated = _PRIOR
        self._came_out = _PRIOR
        self._forecast: KvForecast = make_forecast(1)
        self._longest = 1
        self._lines: dict[int, Line] = {}
        self._ends: dict[int, _Ends] = {}
        # Lines by the step in which they outlive their estimates.
        self._events: dict[int, dict[Line, None]] = {}

    @property
    def lines(self) -> list[Line]:
        """Running lines, by admission."""
        return list(self._lines.values())

    @property
    def bias(self) -> float:
        """By how much estimates have been too low so far, 1 or more."""
        return min(max(1.0, self._came_out / self._estimated), _BIAS_MAX)

    def expected(self, line: Line) -> int:
        """Decode steps that a waiting line is expected to take in all."""
        if line.steps > 0 or line.estimate >= line.max_steps:
            return min(line.estimate, line.max_steps)
        return min(line.max_steps, int(line.estimate * self.bias + 0.5))

    def cover(self, longest: int) -> None:
        """Make the forecast reach as far as the longest estimate, in decode steps."""
        if longest <= self._longest:
            return
        self._longest = longest
        self._forecast = make_forecast(longest)
        for line in self._lines.values():
            self._join_forecast(line)

    # A request's way ------------------------------------------------------------------

    def join(self, line: Line) -> None:
        """A line was admitted: its prompt is being computed."""
        line.running = True
        line.begin = self.clock
        line.planned = line.estimate
        line.estimate = self.expected(line)
        self._lines[id(line)] = line
        self.running += 1
        self.kv[line.side] += line.own + line.steps
        self._join_forecast(line)

    def begin_decoding(self, line: Line) -> None:
        line.decoding = True
        line.begin = self.clock
        line.last = self.clock + max(line.max_steps - line.steps, 0)
        if line.last == self.clock:  # its prompt gave it all its tokens
            self.complete += 1
            return
        self.decoding[line.side] += 1
        self.reads[line.side] += line.read_len + line.steps + 1
        self._count_end(line, 1)
        self._note_event(line)

    def leave(self, line: Line) -> None:
        """A line ended, or gives its KV back. ``steps`` says then how far it came."""
        del self._lines[id(line)]
        self._leave_forecast(line)
        steps = line.steps_done(self.clock)
        self.running -= 1
        self.kv[line.side] -= line.own + steps
        if line.takes_steps(self.clock):
            self.decoding[line.side] -= 1
            self.reads[line.side] -= line.read_len + steps + 1
            self._count_end(line, -1)
            self._forget_event(line)
        elif line.decoding:
            self.complete -= 1
        line.running = line.decoding = False
        line.cached_node = -1
        line.steps = steps

    def withdraw(self, line: Line) -> None:
        """A line that has joined could not start after all."""
        self.leave(line)
        line.estimate = line.planned

    def tick(self) -> Sequence[Line]:
        """A step in which the running requests decode.

        Returns the lines whose estimate turned out too low, and was raised by half.
        """
        self.clock += 1
        kv, reads, decoding = self.kv, self.reads, self.decoding
        for side in _EACH_SIDE:
            kv[side] += decoding[side]
            reads[side] += decoding[side]
        if self.margin > MARGIN_MIN:
            self.margin = max(MARGIN_MIN, self.margin * _MARGIN_DOWN)
        ends = self._ends.pop(self.clock, None)
        if ends is not None:
            for side in _EACH_SIDE:
                decoding[side] -= ends.decoding[side]
                reads[side] -= ends.reads[side]
                self.complete += ends.decoding[side]
        due = self._events.pop(self.clock, None)
        if due is None:
            return _NOBODY
        for line in due:
            self._raise(line)
        return list(due)

    def ran_out(self) -> None:
        """KV ran out although the forecast said that it would not."""
        self.margin = min(MARGIN_MAX, self.margin * _MARGIN_UP)

    def ended(self, line: Line) -> None:
        """Learn from a line that came to its end."""
        self._count(line, line.steps)

    def _count(self, line: Line, steps: int) -> None:
        """A line takes at least ``steps``: what does that say of estimates?"""
        if line.planned >= line.max_steps:
            return  # it was not estimated
        if not line.counted:
            self._estimated += line.planned + 1
        self._came_out += steps + 1 - line.counted
        line.counted = steps + 1

    def _raise(self, line: Line) -> None:
        line.event = -1
        steps = line.steps_done(self.clock)
        longer = min(steps + steps // 2 + 16, line.max_steps)
        self._leave_forecast(line)
        line.estimate = max(longer, steps + 1)
        # What outlived its estimate counts at once: it will end late.
        self._count(line, line.estimate)
        self._join_forecast(line)
        self._note_event(line)

    def _count_end(self, line: Line, count: int) -> None:
        """Count a line in, or out, where its last step is.

        All that end together are one entry: a step in which a thousand do costs what
        any other does.
        """
        ends = self._ends.get(line.last)
        if ends is None:
            ends = self._ends[line.last] = _Ends()
        steps = line.steps + line.last - line.begin
        ends.decoding[line.side] += count
        ends.reads[line.side] += count * (line.read_len + steps + 1)
        if not any(ends.decoding):
            del self._ends[line.last]

    def _note_event(self, line: Line) -> None:
        """The step in which it outlives its estimate, unless it ends by then."""
        event = line.begin + max(line.estimate + 1 - line.steps, 1)
        if event < line.last:
            line.event = event
            self._events.setdefault(event, {})[line] = None

    def _forget_event(self, line: Line) -> None:
        lines = self._events.get(line.event)
        if lines is not None:
            del lines[line]
            if not lines:
                del self._events[line.event]
        line.event = -1

    def _join_forecast(self, line: Line) -> None:
        now, steps = self.clock, line.steps_done(self.clock)
        held, remaining = line.own + steps, max(line.estimate - steps, 1)
        line.base = held - now
        line.final = held + remaining
        line.bucket = kv_forecast.add(self._forecast, now, held, remaining)

    def _leave_forecast(self, line: Line) -> None:
        kv_forecast.remove(self._forecast, line.bucket, line.base, line.final)

    # Admission ------------------------------------------------------------------------

    def fits(self, line: Line, locked: int, reserved: int) -> bool:
        """Whether a waiting line can join, now and by the forecast.

        Args:
            locked: tokens of shared prefixes in use once it has joined.
            reserved: KV that has to stay free for others.
        """
        if self.running == 0:
            return True
        held = line.own + line.steps
        in_use = sum(self.kv) + held + locked + sum(self.decoding)
        if in_use > self.capacity:
            return False
        remaining = max(self.expected(line) - line.steps, 1)
        peak = kv_forecast.peak(self._forecast, self.clock, held, remaining) + locked
        return bool(peak + reserved <= self.capacity * (1.0 - self.margin))
