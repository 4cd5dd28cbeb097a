"""Batches at a server, from the command line, through OpenAI's own client."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from .batch_api import protocol as api
from .errors import ConfigError, InputError, StoreError
from .remote_client import Server, ServerError
from .remote_view import (
    ENDED,
    Batch,
    BatchBar,
    batch_table,
    batches_table,
    first_errors,
    status_text,
)
from .store.files import atomic_write

EXIT_FAILED = 1
EXIT_FAILED_LINES = 3
EXIT_INTERRUPTED = 130

POLL_S = 1.0
# A server that restarts loads its model first; its batches go on after that.
PATIENCE_S = 900.0
STDOUT = Path("-")


def submit(server: Server, options: argparse.Namespace) -> int:
    """``sglang-batch submit``."""
    endpoint = options.endpoint or first_endpoint(options.input_file)
    fields: dict[str, Any] = {"completion_window": options.window}
    if options.metadata:
        fields["metadata"] = dict(options.metadata)
    if options.priority is not None:
        fields["extra_body"] = {"priority": options.priority}
    try:
        batch = server.start(options.input_file, endpoint, **fields)
    except OSError as error:
        raise InputError(
            f"{options.input_file} cannot be read: {error.strerror}."
        ) from error
    if not options.follow:
        _show(options, batch, lambda batch: str(batch["id"]))
        return 0
    if not options.json:
        print(batch["id"], flush=True)
    return _follow(server, batch, options)


def status(server: Server, options: argparse.Namespace) -> int:
    """``sglang-batch status``."""
    batch = server.get(options.batch_id)
    if options.follow:
        return _follow(server, batch, options)
    _show(options, batch, batch_table)
    return 0


def list_batches(server: Server, options: argparse.Namespace) -> int:
    """``sglang-batch list``."""
    batches = server.newest(options.limit)
    if options.json:
        for batch in batches:
            print(json.dumps(batch))
    else:
        found = list(batches)
        print(batches_table(found) if found else "no batches")
    return 0


def cancel(server: Server, options: argparse.Namespace) -> int:
    """``sglang-batch cancel``."""
    batch = server.cancel(options.batch_id)
    _show(options, batch, lambda batch: f"{batch['id']} {batch['status']}")
    return 0


def results(server: Server, options: argparse.Namespace) -> int:
    """``sglang-batch results``."""
    output, errors = options.output_file, options.error_file
    for path in (output, errors):
        if path is not None and path.is_dir():
            raise ConfigError(f"{path} is a directory; name a file.")
    batch = server.get(options.batch_id)
    _check_results(batch, options)
    try:
        if errors is None:
            note = _download_all(server, batch, output)
        else:
            note = _download_apart(server, batch, output, errors)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        where = error.filename2 or error.filename or output
        raise StoreError(f"{where} cannot be written: {error.strerror}.") from error
    print(note, file=sys.stderr)
    if options.json and output != STDOUT:
        print(json.dumps(batch))
    return 0


_COMMANDS: dict[str, Callable[[Server, argparse.Namespace], int]] = {
    "submit": submit,
    "status": status,
    "list": list_batches,
    "cancel": cancel,
    "results": results,
}


def run(name: str, options: argparse.Namespace) -> int:
    """Run a command; returns the exit status."""
    try:
        with contextlib.closing(Server(options.url, options.api_key)) as server:
            status = _COMMANDS[name](server, options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads has seen enough. Python must not try again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return status


def first_endpoint(path: Path) -> str:
    """The endpoint of a file's first line, which is that of all the others.

    Raises:
        InputError: the file cannot be read, or its first line names no endpoint.
    """
    try:
        with open(path, "rb") as file:
            line = next((line for line in file if line.strip()), None)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    if line is None:
        raise InputError(f"{path}: The input file is empty.")
    try:
        url = msgspec.json.decode(line.removeprefix(b"\xef\xbb\xbf"))["url"]
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        url = None
    if url not in api.ENDPOINTS:
        raise InputError(
            f"{path}: the first line is no request of a batch: its url is {url!r}, "
            f"not one of {', '.join(api.ENDPOINTS)}."
        )
    return str(url)


def _show(
    options: argparse.Namespace, batch: Batch, text: Callable[[Batch], str]
) -> None:
    print(json.dumps(batch) if options.json else text(batch), flush=True)


def _follow(server: Server, batch: Batch, options: argparse.Namespace) -> int:
    """Show how a batch goes on until it ends; returns the exit status."""
    batch_id = batch["id"]
    try:
        with BatchBar() as bar:
            batch = _until_ended(server, batch, bar)
    except KeyboardInterrupt:
        print(
            f"interrupted; {batch_id} goes on at {server.url}: "
            f"`sglang-batch status {batch_id} --follow` shows it again",
            file=sys.stderr,
        )
        return EXIT_INTERRUPTED
    _show(options, batch, batch_table)
    if batch["status"] != api.COMPLETED:
        return EXIT_FAILED
    return EXIT_FAILED_LINES if batch["request_counts"]["failed"] else 0


def _until_ended(server: Server, batch: Batch, bar: BatchBar) -> Batch:
    """Ask again and again; a server that is away for a while is waited for."""
    answered_at = time.monotonic()
    waiting = False
    bar.show(batch)
    while batch["status"] not in ENDED:
        time.sleep(POLL_S)
        try:
            batch = server.get(batch["id"])
        except ServerError as error:
            if time.monotonic() - answered_at > PATIENCE_S:
                raise
            if not waiting:
                bar.say(f"{error} Trying again.")
            waiting = True
        else:
            answered_at, waiting = time.monotonic(), False
            bar.show(batch)
    return batch


def _download_all(server: Server, batch: Batch, output: Path) -> str:
    """Write answers and errors to one file: in input order once the batch ended."""
    with _writing(output) as target:
        headers = server.download(f"/batches/{batch['id']}/results", target)
        num_lines = int(headers.get("x-last-line", 0))
        if headers.get("x-incomplete") != "true":
            batch = server.get(batch["id"])
            if num_lines < batch["request_counts"]["total"]:
                raise _gone(batch)
            return _came_to(batch, output, "among them")
    return (
        f"{batch['id']} is {status_text(batch)}: {num_lines:,} results so far in "
        f"{output}, in the order in which they came"
    )


def _download_apart(server: Server, batch: Batch, output: Path, errors: Path) -> str:
    """Write answers to one file and lines with an error to another."""
    with _writing(output) as target, _writing(errors) as error_target:
        for kind, each in (("output", target), ("error", error_target)):
            if batch.get(f"{kind}_file_id"):
                server.download(f"/files/{batch[f'{kind}_file_id']}/content", each)
    return _came_to(batch, output, f"in {errors}")


def _gone(batch: Batch) -> ConfigError:
    return ConfigError(
        f"{batch['id']} is {batch['status']}, but its results are no more at the "
        "server: they were deleted or their time was over."
    )


def _check_results(batch: Batch, options: argparse.Namespace) -> None:
    if batch["status"] == api.FAILED:
        reason = "; ".join(first_errors(batch)) or "no reason is given"
        raise ConfigError(f"{batch['id']} failed and has no results: {reason}")
    if batch["status"] in ENDED:
        return
    if options.so_far and options.error_file:
        raise ConfigError("--so-far writes one file: leave --error-file out.")
    if not options.so_far:
        raise ConfigError(
            f"{batch['id']} is {status_text(batch)}; `sglang-batch status "
            f"{batch['id']} --follow` waits for its end, --so-far takes what there is."
        )


def _came_to(batch: Batch, output: Path, where: str) -> str:
    counts = batch["request_counts"]
    num_errors = counts["total"] - counts["completed"]
    text = f"{batch['id']} is {batch['status']}: {counts['completed']:,} answers"
    if output != STDOUT:
        text += f" in {output}"
    return f"{text}, {num_errors:,} errors {where}" if num_errors else text


def _writing(path: Path) -> AbstractContextManager[BinaryIO]:
    if path == STDOUT:
        return contextlib.nullcontext(cast(BinaryIO, sys.stdout.buffer))
    return atomic_write(path)
