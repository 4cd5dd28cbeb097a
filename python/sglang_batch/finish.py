"""The end of a batch: its result files in input order, and its last status."""

from __future__ import annotations

from .batch_api import protocol as api
from .batch_api.jsonl import BatchFile
from .batch_api.lines import unrun_line
from .saving import ResultSaver
from .service_log import batch_changed
from .store.batch_store import now
from .store.files import atomic_write

# What stands in the error file for a line that never ran, by the batch's end.
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

    end: completed, cancelled, expired or failed; a batch that a client is told to be
        cancelling is cancelled in any case.
    file_days: days that the files are kept where the batch does not say.
    errors: the batch's own errors, as it shows them.
    """
    store, batch_id = saver.store, saver.batch_id
    # The status must not survive a power cut that the results do not.
    await saver.until_written(saver.flush, quick=True)
    await saver.until_written(saver.log.commit)
    # The next server has to know that lines without a result stay without one.
    expired = {"expired_at": now()} if end == api.EXPIRED else {}
    await saver.until_written(
        lambda: store.transition(
            batch_id,
            (api.IN_PROGRESS,),
            api.FINALIZING,
            finalizing_at=now(),
            **expired,
        ),
        quick=True,
    )
    row = store.get_batch(batch_id)
    assert row is not None
    batch_changed(row)
    owner = row["owner"]
    if row["status"] == api.CANCELLING:
        end = api.CANCELLED
    file_ids = await saver.until_written(lambda: _write(saver, requests, end))
    seconds = row["output_expires_after"] or 86_400 * file_days

    def record() -> None:
        with store.atomic():
            for name, file_id in file_ids.items():
                if file_id is not None:
                    filename = f"{batch_id}_{name}.jsonl"
                    purpose, expires_at = api.BATCH_OUTPUT_PURPOSE, now() + seconds
                    store.record_file(file_id, filename, purpose, expires_at, owner)
            store.transition(
                batch_id,
                (api.FINALIZING, api.CANCELLING),
                end,
                output_file_id=file_ids["output"],
                error_file_id=file_ids["error"],
                errors=errors,
                **{f"{end}_at": now()},
            )

    await saver.save_counts()
    await saver.until_written(record, quick=True)
    row = store.get_batch(batch_id)
    assert row is not None
    batch_changed(row)


def _write(saver: ResultSaver, requests: BatchFile, end: str) -> dict[str, str | None]:
    """Write both files; returns their ids, None for one that would be empty."""
    batch_id = saver.batch_id

    def unrun(index: int) -> bytes:
        return unrun_line(requests[index], batch_id, *UNRUN[end])

    # The same ids each time: a server that dies here leaves no files that nobody
    # knows, the next one writes them again.
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
