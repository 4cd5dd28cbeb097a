"""SGLang's log without the lines that nobody reads, unless its level is ``debug``.

The filters are attached to loggers: SGLang and uvicorn replace handlers at their start.
"""

from __future__ import annotations

import logging

# The loggers of SGLang that print its server arguments, on a line of 19,000 characters.
LONG_LINES = ("sglang.srt.entrypoints.engine", "sglang.srt.entrypoints.http_server")
MAX_LINE_CHARS = 1000
# What those of an offline engine say. Others are not ours to cut.
OFFLINE = "'offline_batch': True"
# The logger that prints a line for each prefill batch.
STEPS = "sglang.srt.managers.scheduler_components.metrics_reporter"
ACCESS = "uvicorn.access"
# What clients and monitors poll.
POLLED = (
    *("/batches", "/v1/batches", "/v1/files", "/v1/messages/batches", "/v1/models"),
    *("/health", "/live", "/metrics", "/ready", "/server_info", "/get_server_info"),
)
# What decode servers call for each of their requests.
CALLED = "/offline_batch/prefill/"
# Downloads below the polled paths.
DOWNLOADS = ("/content", "/results")


def quiet_arguments() -> None:
    """Attach the filter of a process that starts offline engines."""
    for name in LONG_LINES:
        logging.getLogger(name).addFilter(_shorten)


def hide_polls() -> None:
    """Attach the filter of an offline server's accesses."""
    logging.getLogger(ACCESS).addFilter(_is_no_poll)


def show_polls() -> None:
    """Detach that filter: the next server of this process may be a stock one."""
    logging.getLogger(ACCESS).removeFilter(_is_no_poll)


def quiet_scheduler() -> None:
    """Attach the filter of a scheduler process."""
    logging.getLogger(STEPS).addFilter(_is_no_prefill)


def _everything() -> bool:
    return logging.getLogger().isEnabledFor(logging.DEBUG)


def _shorten(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if len(message) > MAX_LINE_CHARS and OFFLINE in message and not _everything():
        record.msg, record.args = (
            "%s... (%d characters; --log-level debug prints all)",
            (message[:MAX_LINE_CHARS], len(message)),
        )
    return True


def _is_no_prefill(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Prefill batch") or _everything()


def _is_no_poll(record: logging.LogRecord) -> bool:
    """Whether an access is no successful call that clients repeat."""
    if not isinstance(record.args, tuple) or len(record.args) != 5 or _everything():
        return True
    _, method, full_path, _, status = record.args
    path = str(full_path).partition("?")[0]
    polled = path.startswith(POLLED) and not path.endswith(DOWNLOADS)
    ok = isinstance(status, int) and status < 400
    often = (method in ("GET", "HEAD") and polled) or path.startswith(CALLED)
    return not (often and ok)
