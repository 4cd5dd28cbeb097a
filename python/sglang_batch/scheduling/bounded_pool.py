"""What running requests hold of the second pool of a model that keeps more than plain KV."""

from __future__ import annotations

from dataclasses import dataclass

from ..planner.machine_model import PoolShares, has_room, share
from .scheduled_request import ScheduledRequest


@dataclass(slots=True)
class BoundedPool:
    """Shares of running requests and prefixes.

    held: units charged to running requests.
    """

    shares: PoolShares
    held: int = 0

    def share(self, request: ScheduledRequest, decode_steps: int) -> int:
        """The most that a request holds if it takes that many steps."""
        return share(self.shares, request.own, decode_steps)

    def set_share(self, request: ScheduledRequest, units: int) -> None:
        """Charge a running request. 0 when it leaves."""
        self.held += units - request.pool_share
        request.pool_share = units

    def fits(
        self, request: ScheduledRequest, decode_steps: int, num_prefixes: int,
        margin: float,
    ) -> bool:  # fmt: skip
        """Whether a waiting request fits. For the arguments see ``planner.machine_model``."""
        units = self.share(request, decode_steps)
        return has_room(self.shares, self.held, units, num_prefixes, margin)
