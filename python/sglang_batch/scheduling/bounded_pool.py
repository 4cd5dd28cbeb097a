"""The second pool of a model that keeps more than plain KV, for admission.

Of it a request holds a share that stops growing: the KV of sliding-window layers ends at the
window, and a recurrent state is as large after one token as after a million. So each running
request is charged the most that it will hold, from the start, and each shared prefix in use
what makes it usable: the window before its end, or one state.
"""

from __future__ import annotations

from dataclasses import dataclass

from .scheduled_request import ScheduledRequest


@dataclass(slots=True)
class BoundedPool:
    """Shares of running requests and prefixes.

    capacity: units that requests and prefixes may hold together: tokens or states.
    row_units: units of each running request besides those of its tokens.
    prompt_tokens: most tokens of a request's own prompt that it holds KV of.
    answer_tokens: the same for its answer.
    prefix_tokens: the same for a shared prefix.
    prefix_units: units of each shared prefix besides those of its tokens.
    held: units charged to running requests.
    """

    capacity: int
    row_units: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    prefix_tokens: int = 0
    prefix_units: int = 0
    held: int = 0

    def share(self, request: ScheduledRequest, decode_steps: int) -> int:
        """The most that a request holds if it takes that many steps."""
        prompt = min(request.own, self.prompt_tokens)
        return self.row_units + prompt + min(decode_steps, self.answer_tokens)

    def set_share(self, request: ScheduledRequest, units: int) -> None:
        """Charge a running request. 0 when it leaves."""
        self.held += units - request.pool_share
        request.pool_share = units

    def fits(
        self, request: ScheduledRequest, decode_steps: int, num_prefixes: int,
        margin: float,
    ) -> bool:  # fmt: skip
        """Whether a waiting request fits.

        num_prefixes: shared prefixes in use once it has joined.
        margin: share of the pool to leave free.
        """
        prefixes = num_prefixes * (self.prefix_units + self.prefix_tokens)
        need = self.held + prefixes + self.share(request, decode_steps)
        return need <= self.capacity * (1.0 - margin)
