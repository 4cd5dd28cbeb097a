"""Which batches run now, and which go first: by priority, age and danger of expiring.

Pure: the same batches and rates give the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Above any priority that a client may ask for.
RISEN = 1_000_000
# A batch rises when it needs more than this share of the time it has left.
DANGER = 0.8


@dataclass(frozen=True, slots=True)
class Turn:
    """One batch that could run.

    seq: place in the order of creation.
    priority: the client's; higher goes first.
    expires_at: unix seconds.
    num_left: lines without a result.
    lines_per_s: its own rate while it runs; 0 where it is not known.
    running: whether it has been started.
    risen: whether it was found in danger before.
    """

    batch_id: str
    seq: int
    priority: int
    expires_at: int
    num_left: int
    lines_per_s: float = 0.0
    running: bool = False
    risen: bool = False


def in_danger(turn: Turn, now: float, usual_rate: float) -> bool:
    """Whether a batch is going to miss its window if nothing is done.

    usual_rate: lines per second that the server answers in all; stands in for the
        rate of a batch that does not run, or gets no line through.
    """
    # One that others leave nothing has no rate of its own either.
    rate = (turn.lines_per_s if turn.running else 0.0) or usual_rate
    if rate <= 0 or not turn.num_left:
        return False
    return turn.num_left / rate > DANGER * (turn.expires_at - now)


def priorities(turns: Sequence[Turn], now: float) -> dict[str, int]:
    """The priority that each batch has now, by its id.

    One in danger of missing its window rises above all that are not.
    """
    usual = sum(turn.lines_per_s for turn in turns if turn.running)
    return {
        turn.batch_id: RISEN
        if turn.risen or in_danger(turn, now, usual)
        else turn.priority
        for turn in turns
    }


def to_start(
    turns: Sequence[Turn], priority: dict[str, int], max_running: int
) -> list[str]:
    """Ids of the batches that start now, those of the highest priority first.

    Of those that matter as much as it or more, at most ``max_running`` run beside each
    other; so a batch need not wait for less important ones.
    """
    running = [priority[turn.batch_id] for turn in turns if turn.running]
    waiting = sorted(
        (turn for turn in turns if not turn.running),
        key=lambda turn: (-priority[turn.batch_id], turn.seq),
    )
    started = []
    for turn in waiting:
        own = priority[turn.batch_id]
        if sum(other >= own for other in running) < max_running:
            running.append(own)
            started.append(turn.batch_id)
    return started
