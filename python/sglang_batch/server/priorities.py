"""Which batches run now, and which go first: by priority, age and danger of expiring.

Pure: the same batches, rates and times give the same answer.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

# Above any priority that a client may ask for.
URGENT = 1_000_000
# A batch becomes urgent when it needs more than this share of its remaining time.
DANGER = 0.8


@dataclass(frozen=True, slots=True)
class RunnableBatch:
    """One batch that could run.

    seq: position in the order of creation.
    priority: set by the client. Higher goes first.
    expires_at: Unix time in seconds.
    num_left: lines without a result.
    lines_per_s: its own rate while it runs, or 0 if unknown.
    running: whether it sends lines, or may.
    urgent: whether it was in danger of expiring before.
    used_up: whether its client has used up its limit for today.
    """

    batch_id: str
    seq: int
    priority: int
    expires_at: int
    num_left: int
    lines_per_s: float = 0.0
    running: bool = False
    urgent: bool = False
    used_up: bool = False


def in_danger(batch: RunnableBatch, now: float, usual_rate: float) -> bool:
    """Whether a batch would miss its window at the present rate.

    usual_rate: lines per second of the whole server. It is assumed for a batch that
        does not run, or that has no line answered.
    """
    # A running batch that others leave no share of the engine has no rate either.
    rate = (batch.lines_per_s if batch.running else 0.0) or usual_rate
    if rate <= 0 or not batch.num_left:
        return False
    return batch.num_left / rate > DANGER * (batch.expires_at - now)


def priorities(batches: Sequence[RunnableBatch], now: float) -> dict[str, int]:
    """The present priority of each batch, by its id.

    A batch in danger of missing its window is above all batches that are not.
    """
    usual_rate = sum(batch.lines_per_s for batch in batches if batch.running)
    return {
        batch.batch_id: URGENT
        if batch.urgent or (not batch.used_up and in_danger(batch, now, usual_rate))
        else batch.priority
        for batch in batches
    }


def to_start(
    batches: Sequence[RunnableBatch], priority: dict[str, int], max_running: int
) -> list[str]:
    """Ids of the batches to start now, highest priority first.

    At most ``max_running`` batches of the same or a higher priority run at a time, so a
    batch never waits for less important ones. Nor does it wait for batches whose client
    has used up its limit, since these do not run.
    """
    running = [priority[batch.batch_id] for batch in batches if batch.running]
    waiting = sorted(
        (batch for batch in batches if not batch.running and not batch.used_up),
        key=lambda batch: (-priority[batch.batch_id], batch.seq),
    )
    started = []
    for batch in waiting:
        own = priority[batch.batch_id]
        if sum(other >= own for other in running) < max_running:
            running.append(own)
            started.append(batch.batch_id)
    return started


def local_minute() -> int:
    """The local time of day in minutes."""
    at = datetime.datetime.now()
    return 60 * at.hour + at.minute


def in_hours(hours: tuple[int, int] | None, minute: int) -> bool:
    """Whether a minute of the day is within ``hours``, which may span midnight."""
    if hours is None:
        return True
    begin, end = hours
    if begin < end:
        return begin <= minute < end
    return minute >= begin or minute < end
