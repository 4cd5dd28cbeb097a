"""The points of a step where optional mechanisms take part. ``experimental`` names them."""

from __future__ import annotations

from ...scheduling.next_step import Filling
from ...scheduling.scheduled_request import ScheduledRequest
from ..compat.scheduler_types import ScheduleBatch


class StepHook:
    """Takes part in each step of a scheduler. The methods are in the order of their calls,
    and those of this class do nothing.

    All ranks have the same hooks, which decide alike.
    """

    def prompt_done(self, request: ScheduledRequest) -> bool:
        """The prompt of a request is computed. True if it is not to decode now."""
        return False

    def begin(self, running_batch: ScheduleBatch) -> None:
        """Before there is room for the running requests' next tokens. Rows may leave."""

    def before_choice(self, running_batch: ScheduleBatch) -> None:
        """After that, and before requests are chosen to join. Rows may leave."""

    def fill_rest(self, filling: Filling, limit: int) -> None:
        """All requests that fit by the order of one priority have joined. More prompts may
        be added, up to ``limit`` tokens."""

    def step_decided(self, seconds: float) -> None:
        """A step will run, and take about so many seconds."""

    def before_forward(self, batch: ScheduleBatch) -> int:
        """How many rows, at the end of the batch, are decoded in a forward of their own."""
        return 0

    @property
    def totals(self) -> dict[str, object]:
        """For ``/server_info``."""
        return {}
