"""The state of a store at one moment, for the metrics of a server."""

from __future__ import annotations

from ..batch_api import protocol as api
from ..store.batch_store import BatchStore


class StoreSample:
    """The batches that changed since the last sample, and totals of the store.

    Args:
        newest_seq: that of the last sample, or None for the first sample.
        seqs: of the batches that were active in the last sample.

    Attributes:
        rows: the batches that are active, were active, or are new. In the first sample
            the active ones only.
        newest_seq: the highest one among the rows so far.
        num_by_status: number of batches by status.
        stored_bytes: bytes of all files, of parts of uploads and of unfinished results.
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
        # Taken from these rows: a batch created meanwhile is in the next sample.
        self.newest_seq = max([newest_seq, *(row["seq"] for row in self.rows)])
        by_status = store.rows(
            "SELECT status, count(*) AS num FROM batches GROUP BY status"
        )
        self.num_by_status = {row["status"]: row["num"] for row in by_status}
        self.stored_bytes = store.bytes_stored()
