"""The commands submit, status, list, cancel, results and tree."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, cast

from ...batch_api import protocol as api
from ...batch_api.jsonl import read_lines
from ...batch_api.lines import InvalidLine, LineRules, decode_envelope
from ...batch_api.protocol import ENDPOINTS, canonical_url
from ...errors import ConfigError, ExitStatus, InputError, ServerError, StoreError
from ...inputs.compression import plain_name
from ...inputs.job_input import STDIN, JobInput, input_sources
from ...inputs.staging import Staging
from ..answer_table import check_holds_lines
from ..outputs import OutputFile
from ..progress import Display, aligned
from .batch_client import (
    Batch,
    BatchClient,
    BatchProgress,
    Shown,
    batch_table,
    batches_table,
    first_errors,
    status_text,
)

POLL_S = 1.0
# Long enough for a server that restarts and loads its model. Its batches then resume.
PATIENCE_S = 900.0
STDOUT = Path("-")


def submit(server: BatchClient, options: argparse.Namespace) -> Shown:
    """``sglang-batch submit``: check a file, upload it and start a batch over it.

    Unless told not to, it looks for all errors that the server would find, also in bodies.

    Raises InputError if an input cannot be read, or lines are bad; the message lists them.
    """
    fields: dict[str, Any] = {"completion_window": options.window}
    if options.metadata:
        fields["metadata"] = dict(options.metadata)
    extra = {name: getattr(options, name) for name in ("priority", "enough", "dedupe")}
    if any(value is not None for value in extra.values()):
        fields["extra_body"] = {k: v for k, v in extra.items() if v is not None}
    from ...srt.engine.checks.body_checks import body_errors

    inputs = JobInput(input_sources(options.input_file))
    inputs.check()
    with TemporaryDirectory(prefix="sglang-batch-") as directory:
        local = Staging(Path(directory)).stage(inputs)
        endpoint = options.endpoint or _first_endpoint(local.path)
        if not options.no_check:
            rules = LineRules(endpoint=endpoint, check_body=body_errors)
            with local.requests(rules, way_out=_WAY_OUT).closing():
                pass
        if endpoint is None:
            raise InputError(
                f"{local.title} has no line with one of the endpoints "
                f"{', '.join(ENDPOINTS)}; name it with --endpoint."
            )
        name = _upload_name(options.input_file[0])
        batch = server.start(local.path, name, endpoint, **fields)
    if not options.follow:
        return Shown([batch], batch["id"])
    if not options.json:
        print(batch["id"], flush=True)
    return _follow(server, batch)


def status(server: BatchClient, options: argparse.Namespace) -> Shown:
    batch = server.get(options.batch_id)
    if options.follow:
        return _follow(server, batch)
    return Shown([batch], batch_table(batch))


def list_(server: BatchClient, options: argparse.Namespace) -> Shown:
    batches = list(server.newest(options.limit))
    return Shown(batches, batches_table(batches) if batches else "no batches")


def cancel(server: BatchClient, options: argparse.Namespace) -> Shown:
    batch = server.cancel(options.batch_id)
    return Shown([batch], f"{batch['id']} {batch['status']}")


def results(server: BatchClient, options: argparse.Namespace) -> Shown:
    output, errors = options.output_file, options.error_file
    for path in filter(None, (output, errors)):
        check_holds_lines(path)
        if path != STDOUT:
            OutputFile(str(path), path).check(resumes=False)
    if errors is not None and errors.resolve() == output.resolve() != STDOUT.resolve():
        raise ConfigError(f"{output} is both output and error file.")
    batch = server.get(options.batch_id)
    _check_results(batch, options)
    try:
        if errors is None:
            note = download_all(server, batch, output)
        else:
            with _writing(output) as target, _writing(errors) as error_target:
                for kind, each in (("output", target), ("error", error_target)):
                    if file_id := batch.get(f"{kind}_file_id"):
                        server.download(f"/files/{file_id}/content", each)
            note = _summary(batch, output, f"in {errors}")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        where = error.filename2 or error.filename or output
        raise StoreError(f"{where} cannot be written: {error.strerror}.") from error
    print(note, file=sys.stderr)
    return Shown([] if output == STDOUT else [batch], "")


def _follow(server: BatchClient, batch: Batch) -> Shown:
    batch_id = batch["id"]
    try:
        batch = until_ended(server, batch, Display(sys.stderr))
    except KeyboardInterrupt:
        print(
            f"interrupted. {batch_id} keeps running at {server.url}: use "
            f"`sglang-batch status {batch_id} --follow` to follow it again",
            file=sys.stderr,
        )
        return Shown([], "", ExitStatus.INTERRUPTED)
    status = ExitStatus.OK
    if batch["status"] != api.COMPLETED:
        status = ExitStatus.FAILED
    elif batch["request_counts"]["failed"]:
        status = ExitStatus.FAILED_LINES
    return Shown([batch], batch_table(batch), status)


def until_ended(server: BatchClient, batch: Batch, display: Display) -> Batch:
    """Poll a batch until it ends, and show its progress.

    Raises ServerError if the server has not answered for ``PATIENCE_S`` seconds.
    """
    answered_at = time.monotonic()
    waiting = False
    progress = BatchProgress(display, batch)
    with display.showing(progress.__str__):
        while batch["status"] not in api.ENDED_STATUSES:
            time.sleep(POLL_S)
            try:
                batch = server.get(batch["id"])
            except ServerError as error:
                if time.monotonic() - answered_at > PATIENCE_S:
                    raise
                if not waiting:
                    display.say(f"{error} Trying again.")
                waiting = True
            else:
                answered_at, waiting = time.monotonic(), False
                progress.update(batch)
    return batch


def download_all(server: BatchClient, batch: Batch, output: Path) -> str:
    """Write answers and errors to one file, in input order if the batch has ended."""
    with _writing(output) as target:
        headers = server.download(f"/batches/{batch['id']}/results", target)
        num_lines = int(headers.get("x-last-line", 0))
        if headers.get("x-incomplete") != "true":
            batch = server.get(batch["id"])
            if num_lines < batch["request_counts"]["total"]:
                raise ConfigError(
                    f"{batch['id']} is {batch['status']}, but the server no longer has "
                    "its results: they were deleted or have expired."
                )
            return _summary(batch, output, "among them")
    return (
        f"{batch['id']} is {status_text(batch)}: {num_lines:,} results so far in "
        f"{output}, in order of completion"
    )


def _check_results(batch: Batch, options: argparse.Namespace) -> None:
    if batch["status"] == api.FAILED:
        reason = "; ".join(first_errors(batch)) or "no reason is given"
        raise ConfigError(f"{batch['id']} failed and has no results: {reason}")
    if batch["status"] in api.ENDED_STATUSES:
        return
    if options.so_far and options.error_file:
        raise ConfigError("--so-far writes one file: remove --error-file.")
    if not options.so_far:
        raise ConfigError(
            f"{batch['id']} is {status_text(batch)}. Wait for its end with `sglang-batch "
            f"status {batch['id']} --follow`, or download the finished lines with "
            "--so-far."
        )


def _summary(batch: Batch, output: Path, where: str) -> str:
    counts = batch["request_counts"]
    num_errors = counts["total"] - counts["completed"]
    text = f"{batch['id']} is {batch['status']}: {counts['completed']:,} answers"
    if output != STDOUT:
        text += f" in {output}"
    return f"{text}, {num_errors:,} errors {where}" if num_errors else text


def _writing(path: Path) -> AbstractContextManager[BinaryIO]:
    if path == STDOUT:
        return contextlib.nullcontext(cast(BinaryIO, sys.stdout.buffer))
    return OutputFile(str(path), path).writing()


_WAY_OUT = "Nothing was sent. --no-check sends the file as it is."


def _first_endpoint(path: Path) -> str | None:
    with open(path, "rb") as file:
        for _, _, line in read_lines(file):
            try:
                url = decode_envelope(line).get("url")
            except InvalidLine:
                continue
            if isinstance(url, str) and canonical_url(url) in ENDPOINTS:
                return canonical_url(url)
    return None


def _upload_name(name: str) -> str:
    stem = "stdin" if name == STDIN else plain_name(name.split("?")[0].rsplit("/")[-1])
    return stem if stem.endswith(".jsonl") else f"{stem}.jsonl"


_TREE = "/offline_batch/tree"
Answer = Mapping[str, Any]

_HEADER = ("prefix", "tokens", "state", "running", "to come", "next use", "density")


def tree(server: BatchClient, options: argparse.Namespace) -> Shown:
    replicas = server.call("GET", _TREE, limit=options.limit)["replicas"]
    nodes = [
        {"replica": replica["replica"], **node}
        for replica in replicas
        for node in replica["nodes"]
    ]
    return Shown(nodes, tree_text(replicas))


def tree_text(replicas: Sequence[Answer]) -> str:
    """The trees as text, a paragraph for each job of each replica."""
    paragraphs = []
    for replica in replicas:
        where = f"replica {replica['replica']}, " if len(replicas) > 1 else ""
        for job in replica["jobs"]:
            nodes = [node for node in replica["nodes"] if node["job"] == job["job"]]
            paragraphs.append("\n".join([f"{where}{_title(job)}", *_lines(job, nodes)]))
    return "\n\n".join(paragraphs) or "no batch is running"


def _title(job: Answer) -> str:
    text = f"{job['job']}, {job['policy']}: {_count(job['waiting'], 'request')} waiting"
    if job["followers"]:
        text += f", {job['followers']:,} of them for a prefix that is being computed"
    return (
        f"{text}; prefixes of {job['in_use_tokens']:,} tokens in use, of "
        f"{job['kept_tokens']:,} kept for later"
    )


def _lines(job: Answer, nodes: Sequence[Answer]) -> list[str]:
    if not nodes:
        none = "no prefix is shared by requests that run or are to come"
        return [f"  {none if not job['prefixes'] else 'none of its prefixes is shown'}"]
    level: dict[int, int] = {}
    rows: list[tuple[str, ...]] = [_HEADER]
    for node in nodes:
        level[node["node"]] = level.get(node["parent"], -1) + 1
        rows.append(_row(node, level[node["node"]]))
    lines = [f"  {line}" for line in aligned(rows, "<><>>>>").splitlines()]
    if len(nodes) < job["prefixes"]:
        lines.append(f"  and {job['prefixes'] - len(nodes):,} smaller ones")
    return lines


def _row(node: Answer, level: int) -> tuple[str, ...]:
    return (
        f"{'  ' * level}{node['prefix_tokens']:,}",
        f"{node['tokens']:,}",
        state_text(node),
        f"{node['running']:,}",
        f"{node['uses_left']:,}",
        next_use_text(node),
        "" if node["density"] is None else f"{node['density']:.3g}",
    )


def state_text(node: Answer) -> str:
    """The state of a prefix, and why it is in the cache."""
    if node["state"] != "kept":
        return str(node["state"])
    reasons = ["in use"] if node["running"] else []
    reasons += ["for later"] if node["pinned"] else []
    return f"kept, {' and '.join(reasons)}"


def next_use_text(node: Answer) -> str:
    """When a prefix is needed next, in requests of the job."""
    if node["next_use"] is None:
        return "never"
    if node["next_use"] == 0:
        return "next"
    return f"after {node['next_use']:,}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
