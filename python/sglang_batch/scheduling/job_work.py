"""The work of one job, in seconds by the cost model, for fair shares of the engine.

Two sums count it. ``done_s`` grows step by step, as prompt tokens are computed and KV is
read. ``charged_s`` also has the work that the running requests are expected to need: a
request is charged when it joins, and the charge is corrected when its estimate changes
and when it leaves. Who has the least of it is next, so that a job with long answers does
not get a place for each place of a job with short ones. Charged are the decode steps
that the job's last answers make likely, since estimates may be far off: of a job without
answers they are what others usually take.

Every sum changes by event, so that no step iterates over the running requests.
"""

from __future__ import annotations

from .job_plan import StepCost
from .length_bias import LengthBias
from .scheduled_request import ScheduledRequest

# Answers of a job that the usual length of all jobs counts as.
_USUAL = 4.0


class JobWork:
    """Work that was done for a job's requests, and that they are expected to need.

    Attributes:
        bias: how far its estimates have been off.
        done_s: compute and KV read time of the steps so far.
        charged_s: the same of requests that left, and all of the running ones.
        decoding: running requests of the job that decode.
        read_base: tokens of KV that they read in a step, less the decode clock for each.
            It is the same in every step.
    """

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self.bias = LengthBias()
        self.done_s = 0.0
        self.charged_s = 0.0
        self.decoding = 0
        self.read_base = 0
        self._step_compute_s = 0.0

    def raise_by(self, seconds: float) -> None:
        """Count work that was not done: a job is not owed the time without requests."""
        self.done_s += seconds
        self.charged_s += seconds

    @property
    def share_s(self) -> float:
        """Work that was done or begun. Requests may have outlived their charge."""
        return max(self.charged_s, self.done_s)

    def expected_s(
        self, request: ScheduledRequest, kept: int, usual_steps: float | None
    ) -> float:
        """Work of a waiting request.

        Args:
            kept: tokens of its prompt in the cache. A request that is resumed has all
                its tokens: -1.
            usual_steps: mean decode steps of the last answers of all jobs, if any.
        """
        seconds = self._decode_s(
            request, request.steps, self._likely_steps(request, usual_steps)
        )
        if kept >= 0:
            prompt = max(1, request.input_len + request.steps - kept)
            seconds += self._prompt_s(prompt, kept)
        return seconds

    def _likely_steps(
        self, request: ScheduledRequest, usual_steps: float | None
    ) -> int:
        steps = float(request.est_decode_steps)
        if request.steps == 0 and steps < request.max_decode_steps:
            lately = self.bias.job
            if lately.weight:
                steps *= lately.observed / lately.estimated
            if usual_steps is not None:
                usual = _USUAL * usual_steps
                steps = (lately.weight * steps + usual) / (lately.weight + _USUAL)
        return max(min(int(steps + 0.5), request.max_decode_steps), request.steps)

    # A running request ----------------------------------------------------------------

    def start(
        self, request: ScheduledRequest, kept: int, usual_steps: float | None
    ) -> None:
        """A request joins; see :meth:`expected_s`."""
        request.charged_s = self.expected_s(request, kept, usual_steps)
        request.charged_steps = self._likely_steps(request, usual_steps)
        request.prompt_s = 0.0
        self.charged_s += request.charged_s

    def prefilled(
        self, request: ScheduledRequest, tokens: int, before: int, media: int
    ) -> None:
        """``tokens`` of a prompt are computed in this step, after ``before`` others.

        Args:
            media: how many of them are placeholders of images or sounds.
        """
        seconds = self._prompt_s(tokens, before)
        seconds += media * self.cost.encoder_token_time_s
        request.prompt_s += seconds
        self._step_compute_s += seconds

    def estimate_raised(self, request: ScheduledRequest) -> None:
        """A running request takes more decode steps than it was estimated at."""
        if request.est_decode_steps > request.charged_steps:
            more = self._decode_s(
                request, request.charged_steps, request.est_decode_steps
            )
            request.charged_steps = request.est_decode_steps
            request.charged_s += more
            self.charged_s += more

    def decodes(self, request: ScheduledRequest, count: int) -> None:
        """A running request begins to decode (1), or no longer does (-1)."""
        self.decoding += count
        self.read_base += count * read_base(request)

    def corrected(self, request: ScheduledRequest, counted: int, steps: int) -> None:
        """A request was counted with ``counted`` decode steps and has taken ``steps``."""
        if steps < counted:
            self.done_s -= self._decode_s(request, steps, counted)
        else:
            self.done_s += self._decode_s(request, counted, steps)

    def leave(self, request: ScheduledRequest, first: int, steps: int) -> None:
        """A running request ended or gives its KV back: charge it for what it did.

        Args:
            first, steps: its decode steps when it joined, and now.
        """
        did = request.prompt_s + self._decode_s(request, first, steps)
        self.charged_s += did - request.charged_s
        request.charged_s = request.prompt_s = 0.0

    # A step ---------------------------------------------------------------------------

    def end_step(self, clock: int, *, decodes: bool) -> tuple[float, float]:
        """Count a step that begins at ``clock``.

        Returns:
            Its compute and its KV read time, in seconds.
        """
        compute_s, self._step_compute_s = self._step_compute_s, 0.0
        kv_read_s = 0.0
        if decodes:
            compute_s += self.decoding * self.cost.token_time_s
            reads = self.read_base + self.decoding * clock
            kv_read_s = reads * self.cost.kv_read_time_s
        self.done_s += compute_s + kv_read_s
        return compute_s, kv_read_s

    # Costs ----------------------------------------------------------------------------

    def _prompt_s(self, tokens: int, before: int) -> float:
        attended = tokens * (2 * before + tokens)
        return tokens * self.cost.token_time_s + attended * self.cost.attention_time_s

    def _decode_s(self, request: ScheduledRequest, first: int, last: int) -> float:
        """Time of the decode steps after ``first`` up to ``last``."""
        steps = last - first
        own = (last * (last + 1) - first * (first + 1)) // 2
        reads = steps * request.read_len + own
        return steps * self.cost.token_time_s + reads * self.cost.kv_read_time_s


def read_base(request: ScheduledRequest) -> int:
    """KV that a decoding request reads in a step, in tokens, less the decode clock."""
    return request.read_len + request.steps + 1 - request.begin
