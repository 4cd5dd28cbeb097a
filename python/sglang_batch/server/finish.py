"""The end of a batch: its result files in input order, and its last status."""

from __future__ import annotations

from ..batch_api import protocol as api
from ..batch_api.jsonl import BatchFile
from ..batch_api.lines import unrun_line
from ..job.early_stop import GIVEN_UP, given_up_message
from ..store.batch_store import BatchStore, Row, now
from ..store.files import atomic_write
from .batch_log import batch_changed
from .result_saver import ResultSaver

# Code and message of a line that never ran, by the final status of its batch.
UNRUN = {
    api.CANCELLED: (
        "batch_cancelled",
        "This request was not executed because the batch was cancelled.",
    ),
    api.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    api.FAILED: (
        "batch_failed",
        "This request was not executed because the batch failed.",
    ),
}


async def finish(
    saver: ResultSaver,
    requests: BatchFile,
    end: str,
    file_days: int,
    errors: str | None = None,
) -> None:
    """Write the result files and move the batch to its final status.

    A batch in status cancelling is always cancelled. The files are kept for
    ``file_days`` if it sets no time. ``errors`` are its own, as JSON for its
    object.
    """
    row = await _begin_finalizing(saver, end)
    if row["status"] == api.CANCELLING:
        end = api.CANCELLED
    file_ids = await saver.until_written(lambda: _write(saver, requests, end))
    kept_s = row["output_expires_after"] or 86_400 * file_days
    await saver.save_counts()
    await saver.until_written(
        lambda: _record_end(saver.store, row, end, file_ids, kept_s, errors), quick=True
    )
    # Also a reason that the disk was too full for.
    saver.store.pause(saver.batch_id, None, api.ACTIVE_STATUSES)
    ended = saver.store.get_batch(saver.batch_id)
    if ended is not None:  # its client may have deleted it already
        batch_changed(ended)


async def _begin_finalizing(saver: ResultSaver, end: str) -> Row:
    """Make all results safe, then give the batch the status finalizing."""
    # A status that survives a power cut must not promise results that do not.
    await saver.until_written(saver.flush, quick=True)
    await saver.until_written(saver.log.commit)
    # The next server must not run the remaining lines of an expired batch.
    expired = {"expired_at": now()} if end == api.EXPIRED else {}
    await saver.until_written(
        lambda: saver.store.transition(
            saver.batch_id,
            (api.IN_PROGRESS,),
            api.FINALIZING,
            finalizing_at=now(),
            **expired,
        ),
        quick=True,
    )
    row = saver.store.get_batch(saver.batch_id)
    assert row is not None
    batch_changed(row)
    return row


def _record_end(
    store: BatchStore,
    row: Row,
    end: str,
    file_ids: dict[str, str | None],
    kept_s: int,
    errors: str | None,
) -> None:
    """Record the result files and the final status in one transaction."""
    with store.atomic():
        for name, file_id in file_ids.items():
            if file_id is not None:
                store.record_file(
                    file_id,
                    f"{row['id']}_{name}.jsonl",
                    api.BATCH_OUTPUT_PURPOSE,
                    kept_s,
                    row["owner"],
                )
        store.transition(
            row["id"],
            (api.FINALIZING, api.CANCELLING),
            end,
            output_file_id=file_ids["output"],
            error_file_id=file_ids["error"],
            errors=errors,
            paused_reason=None,
            **{f"{end}_at": now()},
        )


def _write(saver: ResultSaver, requests: BatchFile, end: str) -> dict[str, str | None]:
    """Write both files and return their ids, None for a file that would be empty."""
    batch_id = saver.batch_id

    share = None
    if end == api.COMPLETED and (row := saver.store.get_batch(batch_id)) is not None:
        share = row["enough"]

    def unrun(index: int) -> bytes:
        reason = UNRUN[end] if share is None else (GIVEN_UP, given_up_message(share))
        return unrun_line(requests[index], batch_id, *reason)

    # The same ids each time: if the server dies here, the next one overwrites these
    # files, and none is orphaned.
    ids: dict[str, str | None] = {
        name: f"file-{name}-{batch_id.removeprefix('batch_')}"
        for name in ("output", "error")
    }
    paths = {name: saver.store.file_path(str(ids[name])) for name in ids}
    with (
        atomic_write(paths["output"]) as outputs,
        atomic_write(paths["error"]) as errors,
    ):
        num_outputs, num_errors = saver.log.write_ordered(outputs, errors, unrun)
    # As at OpenAI, a file that would be empty does not exist.
    for name, count in (("output", num_outputs), ("error", num_errors)):
        if count == 0:
            paths[name].unlink()
            ids[name] = None
    return ids
