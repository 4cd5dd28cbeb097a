"""Counts the KV that running requests hold, read and will need, for admission.

KV is allocated in whole pages: a request's tokens behind the shared prefixes, which are
whole pages themselves, take as many pages as hold them. Time is the *decode clock*, which
ticks once for every token that the running requests decode: once a step, with speculation as
of :class:`TokenClock`, with pipeline parallelism as of :class:`MicroBatches`. Changes update
all sums, so that no step iterates over the running requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..planner.admission_rules import kv_forecast
from ..planner.admission_rules.kv_forecast import KvForecast, make_forecast
from ..planner.machine_model import PoolShares, has_room, share
from ..planner.requests import LEFT, ONLINE, RIGHT
from .job_work import JobWork, LengthBias, LengthSums, read_base
from .scheduled_request import ScheduledRequest

# Share of the KV that stays free for requests that outlive their estimates: at rest,
# at most, and the factors by which it changes when KV ran out and when it did not.
MARGIN_MIN, MARGIN_MAX = 0.01, 0.2
_MARGIN_UP, _MARGIN_DOWN = 2.0, 0.998
_EACH_SIDE = (LEFT, RIGHT, ONLINE)
_NOBODY: tuple[ScheduledRequest, ...] = ()


@dataclass(slots=True)
class _LastSteps:
    """Requests that take their last step at one tick: their number and reads."""

    growing: dict[int, int] = field(default_factory=dict)  # as in the accounting
    reads: list[int] = field(default_factory=lambda: [0, 0, 0])  # by side
    # By job, their number and the sum of their ``read_base``.
    of_jobs: dict[JobWork, list[int]] = field(default_factory=dict)


class KvAccounting:
    """KV and reads of running requests, by side.

    Args:
        capacity: tokens of KV, in whole pages.
        page_size: tokens in a page.
        mixed: whether decodes and prompts share a step, so that the clock ticks in the step
            that computes a request's prompt.
        second: the pool that the model has besides that of KV. None if it has none.
        draft_slots: tokens of KV that a request holds for drafts besides its own.

    Attributes:
        clock: the decode clock.
        decoding: requests that decode, by side.
        kv: tokens in the pages that requests hold, without shared prefixes, by side. Those
            for drafts are counted from the start.
        reads: tokens of KV that decodes read in a step, including that of the token they
            compute, by side.
        num_running: running requests, including those whose prompt is being computed.
        second_held: units of the second pool charged to running requests.
        num_complete: those of them that have all their tokens. The engine learns of an end
            one step late.
        changes: how often requests were admitted, began to decode or left.
        margin: share of the KV that admission leaves free.
    """

    def __init__(
        self,
        capacity: int,
        page_size: int = 1,
        *,
        mixed: bool = True,
        second: PoolShares | None = None,
        draft_slots: int = 0,
    ) -> None:
        self.capacity = capacity
        self.second, self.second_held = second, 0
        self.draft_slots = draft_slots
        self._page_size = page_size
        self._mixed = mixed
        self.clock = 0
        self.decoding = [0, 0, 0]
        self.kv = [0, 0, 0]
        self.reads = [0, 0, 0]
        self.num_running = 0
        self.num_complete = 0
        self.margin = MARGIN_MIN
        self._online_bias = LengthBias()
        self._usual = LengthSums()
        self._forecast: KvForecast = make_forecast(1, page_size)
        self._longest = 1
        # Requests that decode, by side and by the ticks that begin a page of them.
        self._growing = [0] * (len(_EACH_SIDE) * page_size)
        self._requests: dict[int, ScheduledRequest] = {}
        self._last_steps: dict[int, _LastSteps] = {}
        # Requests by the step in which they outlive their estimates.
        self._overruns: dict[int, dict[ScheduledRequest, None]] = {}
        self.changes = 0

    @property
    def requests(self) -> list[ScheduledRequest]:
        """Running requests, in the order of their admission."""
        return list(self._requests.values())

    @property
    def usual_steps(self) -> float | None:
        """Mean decode steps of the last answers of all jobs. None before the first."""
        usual = self._usual
        return usual.observed / usual.weight if usual.weight else None

    @property
    def growth(self) -> int:
        """Tokens in the pages that the decodes of the next step begin."""
        ticks = (self.clock + 1) % self._page_size
        return sum(self._growing[ticks :: self._page_size]) * self._page_size

    def in_pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size) * self._page_size

    def _bias_of(self, request: ScheduledRequest) -> LengthBias:
        work: JobWork | None = request.work
        return self._online_bias if work is None else work.bias

    def corrected_est_decode_steps(self, request: ScheduledRequest) -> int:
        """A waiting request's estimate, corrected by how far others were off."""
        if request.prompt_only:
            return request.steps + 1
        if request.steps > 0 or request.est_decode_steps >= request.max_decode_steps:
            return min(request.est_decode_steps, request.max_decode_steps)
        factor = self._bias_of(request).factor(request)
        return min(
            request.max_decode_steps, int(request.est_decode_steps * factor + 0.5)
        )

    def extend_forecast(self, longest: int) -> None:
        if longest <= self._longest:
            return
        self._longest = longest
        self._forecast = make_forecast(longest, self._page_size)
        for request in self._requests.values():
            self._join_forecast(request)

    # A running request ----------------------------------------------------------------

    def admit(self, request: ScheduledRequest) -> None:
        """Count a request whose prompt is computed from now on."""
        request.running = True
        request.begin = self.clock
        request.first = request.steps
        request.initial_est_decode_steps = request.est_decode_steps
        if request.bias is None:
            request.bias = self._bias_of(request)
        request.est_decode_steps = self.corrected_est_decode_steps(request)
        self._requests[id(request)] = request
        self.changes += 1
        if request.backlog is not None:
            request.backlog.runs(request)
        self.num_running += 1
        self.kv[request.side] += self._held_pages(request, request.steps)
        self._charge_second(request)
        self._join_forecast(request)

    def begin_decoding(self, request: ScheduledRequest) -> None:
        request.decoding = True
        self._start_steps(request)
        held = self._held(request, request.steps)
        if request.takes_steps(self.clock) and request.base != held - self.clock:
            self._leave_forecast(request)  # its prompt took other steps than expected
            self._join_forecast(request)

    def _start_steps(self, request: ScheduledRequest) -> None:
        """A request that has taken ``steps`` continues."""
        request.begin = self.clock
        request.last = self.clock + max(request.max_decode_steps - request.steps, 0)
        if request.last == self.clock:  # it has its last token
            self.num_complete += 1
            return
        self.changes += 1
        self.decoding[request.side] += 1
        self._growing[self._growth_index(request)] += 1
        self.reads[request.side] += request.read_len + request.steps + 1
        if request.work is not None:
            request.work.decodes(request, 1)
        self._count_last_step(request, 1)
        self._schedule_overrun(request)

    def _stop_steps(self, request: ScheduledRequest, steps: int) -> None:
        """A request that has taken ``steps`` is not counted among those that continue."""
        if request.takes_steps(self.clock):
            self.decoding[request.side] -= 1
            self._growing[self._growth_index(request)] -= 1
            self.reads[request.side] -= request.read_len + steps + 1
            if request.work is not None:
                request.work.decodes(request, -1)
            self._count_last_step(request, -1)
            requests = self._overruns.get(request.overrun_at)
            if requests is not None:
                del requests[request]
                if not requests:
                    del self._overruns[request.overrun_at]
            request.overrun_at = -1
        elif request.decoding:
            self.num_complete -= 1

    def set_steps(self, request: ScheduledRequest, steps: int) -> None:
        """A decoding request has taken other steps than the clock counts."""
        counted = request.steps_done(self.clock)
        self.kv[request.side] += self._held_pages(request, steps)
        self.kv[request.side] -= self._held_pages(request, counted)
        self._leave_forecast(request)
        self._stop_steps(request, counted)
        if request.work is not None:
            request.work.corrected(request, counted, steps)
        request.steps = steps
        self._start_steps(request)
        self._join_forecast(request)

    def remove(self, request: ScheduledRequest) -> None:
        """A request ended or gives its KV back. Sets ``steps`` to its decode steps so far."""
        del self._requests[id(request)]
        self._leave_forecast(request)
        self.changes += 1
        if request.prompt_only:
            request.prompt_only = False
            request.est_decode_steps = request.initial_est_decode_steps
        self.second_held -= request.pool_share
        request.pool_share = 0
        steps = request.steps_done(self.clock)
        self.num_running -= 1
        self.kv[request.side] -= self._held_pages(request, steps)
        self._stop_steps(request, steps)
        if request.work is not None:
            request.work.leave(request, request.first, steps)
        request.running = request.decoding = False
        if request.backlog is not None:
            request.backlog.left(request)
        request.cached_node = -1
        request.steps = steps

    def decode_after_all(self, request: ScheduledRequest) -> None:
        """A request of which only the prompt was to be computed continues."""
        self._leave_forecast(request)
        self.changes += 1
        request.prompt_only = False
        request.est_decode_steps = request.initial_est_decode_steps
        request.est_decode_steps = self.corrected_est_decode_steps(request)
        self._charge_second(request)
        self._join_forecast(request)
        if request.backlog is not None:
            request.backlog.runs(request)

    def _charge_second(self, request: ScheduledRequest) -> None:
        if self.second is not None:
            units = share(self.second, request.own, request.est_decode_steps)
            self.second_held += units - request.pool_share
            request.pool_share = units

    def resize(self, request: ScheduledRequest, own_before: int) -> None:
        """A running request shares more or fewer of its tokens, in whole pages."""
        self._charge_second(request)
        self.kv[request.side] += request.own - own_before
        self._leave_forecast(request)
        self._join_forecast(request)

    def undo_admit(self, request: ScheduledRequest) -> None:
        """Remove a request that could not start, and restore its estimate."""
        self.remove(request)
        request.est_decode_steps = request.initial_est_decode_steps
        if not request.counted:
            request.bias = None

    def count_decode_step(self) -> Sequence[ScheduledRequest]:
        """Count a step in which the running requests decode. Returns the requests whose
        estimate turned out too low and was raised by half."""
        self.clock += 1
        kv, reads, decoding = self.kv, self.reads, self.decoding
        growing, size = self._growing, self._page_size
        ticks = self.clock % size
        for side in _EACH_SIDE:
            kv[side] += growing[side * size + ticks] * size
            reads[side] += decoding[side]
        if self.margin > MARGIN_MIN:
            self.margin = max(MARGIN_MIN, self.margin * _MARGIN_DOWN)
        ends = self._last_steps.pop(self.clock, None)
        if ends is not None:
            for index, rows in ends.growing.items():
                growing[index] -= rows
                decoding[index // size] -= rows
                self.num_complete += rows
            for side in _EACH_SIDE:
                reads[side] -= ends.reads[side]
            for work, (rows, base) in ends.of_jobs.items():
                work.decoding -= rows
                work.read_base -= base
        due = self._overruns.pop(self.clock, None)
        if due is None:
            return _NOBODY
        for request in due:
            self._raise_estimate(request)
        return list(due)

    def widen_margin(self) -> None:
        """Keep more KV free, since KV ran out against the forecast."""
        self.margin = min(MARGIN_MAX, self.margin * _MARGIN_UP)

    def learn_output_len(self, request: ScheduledRequest) -> None:
        """Correct estimates by the length of a request that ended."""
        self._usual.learn(request.steps, 0.0)
        self._learn(request, request.steps)

    def _learn(self, request: ScheduledRequest, steps: int) -> None:
        """Count a request that takes at least ``steps`` decode steps."""
        if request.initial_est_decode_steps >= request.max_decode_steps:
            return  # it was not estimated
        # A new plan has other estimates, which say nothing of those that it had.
        if request.bias is not None and request.bias is self._bias_of(request):
            request.bias.learn(request, steps)

    def _raise_estimate(self, request: ScheduledRequest) -> None:
        request.overrun_at = -1
        steps = request.steps_done(self.clock)
        longer = min(steps + steps // 2 + 16, request.max_decode_steps)
        self._leave_forecast(request)
        request.est_decode_steps = max(longer, steps + 1)
        self._charge_second(request)
        if request.work is not None:
            request.work.estimate_raised(request)
        # Counted now, since it will end late.
        self._learn(request, request.est_decode_steps)
        self._join_forecast(request)
        self._schedule_overrun(request)

    def _growth_index(self, request: ScheduledRequest) -> int:
        held = self._held(request, request.steps) - request.begin
        return request.side * self._page_size + (1 - held) % self._page_size

    def _count_last_step(self, request: ScheduledRequest, count: int) -> None:
        """Add (1) or remove (-1) a request at the tick of its last step. All that end
        together share an entry, so a step in which a thousand end costs no more than any
        other."""
        ends = self._last_steps.get(request.last)
        if ends is None:
            ends = self._last_steps[request.last] = _LastSteps()
        steps = request.steps + request.last - request.begin
        index = self._growth_index(request)
        ends.growing[index] = ends.growing.get(index, 0) + count
        ends.reads[request.side] += count * (request.read_len + steps + 1)
        if request.work is not None:
            of_job = ends.of_jobs.setdefault(request.work, [0, 0])
            of_job[0] += count
            of_job[1] += count * read_base(request)
        if not ends.growing[index]:
            del ends.growing[index]
        if not ends.growing:
            del self._last_steps[request.last]

    def _schedule_overrun(self, request: ScheduledRequest) -> None:
        """Note the step in which a request outlives its estimate, if it can."""
        overrun_at = request.begin + max(
            request.est_decode_steps + 1 - request.steps, 1
        )
        if overrun_at < request.last:
            request.overrun_at = overrun_at
            self._overruns.setdefault(overrun_at, {})[request] = None

    def _join_forecast(self, request: ScheduledRequest) -> None:
        now, steps = self.clock, request.steps_done(self.clock)
        held, remaining = self._growth(request, request.est_decode_steps, steps)
        request.base = held - now
        request.final = held + remaining
        request.bucket = kv_forecast.add(self._forecast, now, held, remaining)

    def _growth(
        self, request: ScheduledRequest, est_decode_steps: int, steps: int
    ) -> tuple[int, int]:
        """A request's KV in tokens as if it grew from now on, and its steps to the end. A
        prompt that is computed in a step with decodes grows a tick later."""
        waits = int(self._mixed and not request.decoding)
        own = request.own + self.draft_slots
        return kv_forecast.growth(own, steps, est_decode_steps, waits)

    def _held(self, request: ScheduledRequest, steps: int) -> int:
        """Tokens of KV that a request holds after ``steps``, behind shared prefixes."""
        return request.own + steps + self.draft_slots

    def _held_pages(self, request: ScheduledRequest, steps: int) -> int:
        return self.in_pages(self._held(request, steps))

    def _leave_forecast(self, request: ScheduledRequest) -> None:
        kv_forecast.remove(self._forecast, request.bucket, request.base, request.final)

    # Admission ------------------------------------------------------------------------

    def fits(
        self,
        request: ScheduledRequest,
        locked: int,
        reserved: int,
        num_prefixes: int = 0,
    ) -> bool:
        """Whether a waiting request fits, now and by the forecast.

        Args:
            locked: tokens of shared prefixes in use once it has joined.
            reserved: KV that has to stay free for others.
            num_prefixes: the number of these prefixes.
        """
        if self.num_running == 0:
            return True
        steps = self.corrected_est_decode_steps(request)
        if self.second is not None:
            units = share(self.second, request.own, steps)
            pool = self.second, self.second_held, units, num_prefixes, self.margin
            if not has_room(*pool):
                return False
        held, remaining = self._growth(request, steps, request.steps)
        others, most = locked + reserved, self.capacity * (1.0 - self.margin)
        return bool(
            kv_forecast.fits(self._forecast, self.clock, held, remaining, others, most)
        )


# The decode clock where it does not tick once in each step that decodes. Ticks follow from the
# results of steps alone, so all TP ranks count alike.

# Tokens by which the count of a single request may be off.
MOST_OFF = 16


class TokenClock:
    """Ticks of the decode clock with speculation.

    A request decodes several tokens in a step then, and forecasts count tokens. So the clock
    follows the mean of the tokens that requests have decoded, and a request that is faster or
    slower is set right once it is a few tokens off.
    """

    def __init__(self, kv_accounting: KvAccounting) -> None:
        self._kv_accounting = kv_accounting

    def follow(self, tick: Callable[[], None]) -> None:
        """Count the tokens of the last results. ``tick`` lets all running requests take a
        step."""
        for _ in range(self._ticks()):
            tick()
        accounting = self._kv_accounting
        for request in accounting.requests:
            if not request.decoding:
                continue
            steps, counted = taken(request), request.steps_done(accounting.clock)
            goes_on = request.takes_steps(accounting.clock)
            late = not goes_on and steps < request.max_decode_steps
            if late or abs(steps - counted) > MOST_OFF:
                accounting.set_steps(request, steps)

    def _ticks(self) -> int:
        """The mean of the tokens that requests have and are not counted with."""
        clock = self._kv_accounting.clock
        rows = more = 0
        for request in self._kv_accounting.requests:
            if request.takes_steps(clock):
                rows += 1
                more += taken(request) - request.steps_done(clock)
        return max(0, (2 * more + rows) // (2 * rows)) if rows else 0

    def ends(self, request: ScheduledRequest) -> None:
        if request.decoding:
            self._kv_accounting.set_steps(request, taken(request))


def taken(request: ScheduledRequest) -> int:
    """Decode steps of a decoding request, by the tokens that it has."""
    steps = min(len(request.req.output_ids) - 1, request.max_decode_steps)
    # The result of its prompt may still be in flight.
    return max(steps, 0)


class MicroBatches:
    """Whose turn it is, and the rows that have started in each.

    SGLang asks for the next batch of one of the ``number`` micro-batches after the other.
    In each round a running request decodes once, in the step of its own micro-batch, whose
    last results are known by then. Without pipeline parallelism there is one, and each step
    is a round.
    """

    def __init__(self, number: int = 1) -> None:
        self.number = number
        self._turn = -1
        self._decoded = False
        self._starting: list[list[ScheduledRequest]] = [[] for _ in range(number)]

    @property
    def starting(self) -> list[ScheduledRequest]:
        """Requests whose prompt is complete after this step."""
        return self._starting[self._turn]

    def begin_step(self) -> list[ScheduledRequest]:
        """The next micro-batch has its turn. Returns what its last step completed."""
        self._turn = (self._turn + 1) % self.number
        completed = self.starting
        self._starting[self._turn] = []
        return completed

    def end_step(self, *, decodes: bool) -> bool:
        """Whether a round ends here in which requests decoded, as in this step or not."""
        self._decoded |= decodes
        if self._turn < self.number - 1:
            return False
        decoded, self._decoded = self._decoded, False
        return decoded
