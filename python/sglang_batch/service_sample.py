"""What the metrics of a server show of its store at one moment."""

from __future__ import annotations

from .batch_api import protocol as api
from .store.batch_store import BatchStore


class StoreSample:
    """The store at about one moment.

    Args:
        newest_seq: that of the sample before; None for the first one.
        seqs: of the batches that were active then.

    Attributes:
        rows: the batches that are active, were so, or came since; for the first sample
            only those that are active.
        newest_seq: no batch of a higher one is among the rows.
        num_by_status: how many of all batches have a status.
        stored_bytes: of all files, of parts of uploads and of results not finished.
    """

    def __init__(
        self, store: BatchStore, newest_seq: int | None, seqs: list[int]
    ) -> None:
        if newest_seq is None:
            [newest] = store.rows("SELECT coalesce(max(seq), 0) AS seq FROM batches")
            newest_seq = int(newest["seq"])
        active = ", ".join("?" * len(api.ACTIVE_STATUSES))
        known = ", ".join(map(str, seqs))
        self.rows = store.rows(
            f"SELECT * FROM batches WHERE status IN ({active}) "
            f"OR seq > ? OR seq IN ({known}) ORDER BY seq",
            (*api.ACTIVE_STATUSES, newest_seq),
        )
        # Of these rows: one that came since is one of the next sample.
        self.newest_seq = max([newest_seq, *(row["seq"] for row in self.rows)])
        by_status = store.rows(
            "SELECT status, count(*) AS num FROM batches GROUP BY status"
        )
        self.num_by_status = {row["status"]: row["num"] for row in by_status}
        self.stored_bytes = store.bytes_stored()
