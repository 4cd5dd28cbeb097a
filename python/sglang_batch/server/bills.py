"""What each batch pays of the engine's seconds, while it runs and for a while after its end."""

from __future__ import annotations

from dataclasses import dataclass

from ..job.engine import Engine
from ..job.engine_time import Account, EngineTime
from ..store.batch_store import BatchStore
from .access.usage import add_usage
from .background import in_thread

# The seconds of batches that have ended are written again when they change by this share.
_WORTH_WRITING = 0.01


@dataclass(eq=False)
class Bill:
    """The seconds of the engine that a batch has used, and those that the store has of them.

    ``earlier_s`` are those of earlier servers. ``written_s`` is set once the batch
    has ended.
    """

    account: Account
    owner: str
    earlier_s: float
    written_s: float | None = None

    @property
    def seconds(self) -> float:
        return self.earlier_s + self.account.seconds


class Bills:
    """Bills of batches that run or ended lately: they change with the others' work."""

    def __init__(self, store: BatchStore, engine: Engine) -> None:
        self._store = store
        self._time = EngineTime(
            lambda: engine.num_replicas, lambda: engine.machine.cost
        )
        self._bills: dict[str, Bill] = {}

    def open(self, batch_id: str) -> Bill:
        bill = self._bills.get(batch_id)
        if bill is None or bill.account.closed:
            row = self._store.get_batch(batch_id)
            owner, earlier_s = (
                ("", 0.0) if row is None else (row["owner"], row["engine_s"])
            )
            bill = Bill(Account(self._time), owner, earlier_s)
            self._bills[batch_id] = bill
        bill.account.ended_at = None
        bill.written_s = None
        return bill

    def ended(self, batch_id: str) -> None:
        """A batch does no more work. Its seconds are in the store."""
        row, bill = self._store.get_batch(batch_id), self._bills[batch_id]
        bill.account.ended()
        bill.written_s = bill.seconds if row is None else row["engine_s"]

    async def settle(self, *, at_once: bool = False) -> None:
        """Write what batches that have ended pay by now, ``at_once`` or if it is more."""
        changed = {}
        for batch_id, bill in list(self._bills.items()):
            if bill.written_s is None:
                continue
            closed, seconds = bill.account.closed, bill.seconds
            more = abs(seconds - bill.written_s)
            worth = 0.0 if at_once or closed else _WORTH_WRITING * bill.written_s
            if more > worth:
                changed[batch_id] = (bill, seconds)
            if closed:
                del self._bills[batch_id]
        if changed:
            await in_thread(self._write, changed)

    def _write(self, changed: dict[str, tuple[Bill, float]]) -> None:
        for batch_id, (bill, seconds) in changed.items():
            with self._store.atomic():
                before = bill.written_s or 0.0
                self._store.update_batch(batch_id, engine_s=seconds)
                add_usage(self._store, bill.owner, engine_s=seconds - before)
            bill.written_s = seconds
