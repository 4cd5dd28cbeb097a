"""The options of the commands for a server: batches and keys."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

from ...batch_api import protocol as api
from ...config import add_setting
from ...errors import ExitStatus
from ...job.engine import MAX_TREE_NODES
from ..option_types import enough, whole

DEFAULT_URL = "http://127.0.0.1:30000"
MAX_LIST = 10_000

Subparsers = Any

_FOLLOW_EPILOG = f"""\
exit status with --follow:
  {ExitStatus.OK:<4} every line was answered
  {ExitStatus.FAILED:<4} the batch failed, expired or was cancelled, or the server does not answer
  {ExitStatus.BAD_INPUT:<4} the server refused the call: a wrong key or an unknown id, for example
  {ExitStatus.FAILED_LINES:<4} the batch is complete, and some lines were answered with an error
  {ExitStatus.INTERRUPTED:<4} interrupted, while the batch keeps running at the server

"""
_ENVIRONMENT = """\
Defaults: $SGLANG_BATCH_URL for --url, $SGLANG_BATCH_API_KEY or $OPENAI_API_KEY for
--api-key.
"""


def add(commands: Subparsers) -> None:
    """Add the commands for servers to the command line."""
    _add_submit(commands)
    about = "Show the status, counts, tokens and times of a batch."
    status = _command(commands, "status", about, _FOLLOW_EPILOG)
    _add_id(status)
    _add_follow(status)
    listing = _command(commands, "list", "List batches, newest first.")
    _add_limit(listing, MAX_LIST, 20, "list at most N batches")
    about = "Cancel a batch. Lines that are already answered are kept: see `results`."
    _add_id(_command(commands, "cancel", about))
    _add_results(commands)
    tree = _command(
        commands,
        "tree",
        "Show the prefixes that running batches share. Of the largest it tells which are "
        "in the KV cache, how many requests use them, and when the plan needs them next. "
        "A server with keys wants that of an admin.",
        module="tree_command",
    )
    shown = (
        "half of them the longest in the cache, the others those that save most tokens"
    )
    text = f"show at most N prefixes of each replica: {shown}"
    _add_limit(tree, MAX_TREE_NODES, 50, text)
    _add_keys(commands)


def _add_submit(commands: Subparsers) -> None:
    submit = _command(
        commands,
        "submit",
        "Start a batch on a server. Checks a JSONL file of OpenAI batch requests, uploads "
        "it, starts a batch and prints its id.",
        _FOLLOW_EPILOG,
    )
    submit.add_argument(
        "-i",
        "--input-file",
        nargs="+",
        action="extend",
        required=True,
        metavar="INPUT",
        help="the requests, one JSON line each: files, URLs or - for standard input, "
        "plain, gzip or zstd; several are one batch, in this order",
    )
    submit.add_argument(
        "--endpoint",
        choices=tuple(api.ENDPOINTS),
        metavar="PATH",
        help="endpoint of all lines, such as /v1/embeddings (default: taken from the "
        "first line)",
    )
    submit.add_argument(
        "--no-check",
        action="store_true",
        help="send the file without checking its lines (default: a file that the "
        "server would refuse is not sent, and all its errors are listed)",
    )
    submit.add_argument(
        "--window",
        default="24h",
        metavar="TIME",
        help="completion window, such as 90m or 7d: unfinished lines expire after it "
        "(default: 24h)",
    )
    submit.add_argument(
        "--priority",
        type=_whole_number,
        metavar="N",
        help="batches with a higher priority run first (default: 0)",
    )
    submit.add_argument(
        "--enough",
        type=enough,
        metavar="SHARE",
        help="end when this share of the requests, such as 99%%, has an answer, and give "
        "the others up",
    )
    add_setting(submit, "dedupe", "Default: the server's setting")
    submit.add_argument(
        "--metadata",
        action="append",
        type=_pair,
        default=[],
        metavar="KEY=VALUE",
        help="a pair to store with the batch (repeatable)",
    )
    _add_follow(submit)


def _add_results(commands: Subparsers) -> None:
    results = _command(
        commands,
        "results",
        "Download the results of a batch that has ended, in input order.",
    )
    _add_id(results)
    results.add_argument(
        "-o",
        "--output-file",
        type=Path,
        required=True,
        metavar="FILE",
        help="file for the answers, - for standard output",
    )
    results.add_argument(
        "--error-file",
        type=Path,
        metavar="FILE",
        help="file for the errors (default: among the answers)",
    )
    results.add_argument(
        "--so-far",
        action="store_true",
        help="download the finished lines of a running batch",
    )


def _command(
    commands: Subparsers,
    name: str,
    description: str,
    epilog: str = "",
    module: str = "client_commands",
) -> argparse.ArgumentParser:
    """Add a command with the options that all commands for servers have.

    Args:
        module: has a function of this name, which takes the client and the options, and
            may return an exit status.
    """
    title = description.partition(".")[0]
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=title[0].lower() + title[1:],
        description=description,
        epilog=epilog + _ENVIRONMENT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--url",
        default=os.environ.get("SGLANG_BATCH_URL") or DEFAULT_URL,
        help=f"URL of the server (default: {DEFAULT_URL})",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("SGLANG_BATCH_API_KEY")
        or os.environ.get("OPENAI_API_KEY"),
        metavar="KEY",
        help="API key, if the server requires one",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON, one object per line"
    )
    function = "list_" if name == "list" else name
    parser.set_defaults(run=partial(_run, module, function))
    return parser


def _run(
    module: str, function: str, options: argparse.Namespace, rest: list[str]
) -> int:
    """Call a function with a client of the server. Only then is its module imported."""
    from .batch_client import BatchClient

    command = getattr(importlib.import_module(f".{module}", __package__), function)
    try:
        with contextlib.closing(BatchClient(options.url, options.api_key)) as server:
            status: int | None = command(server, options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has closed it. Python must not flush again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitStatus.FAILED
    return ExitStatus.OK if status is None else status


def _add_limit(
    parser: argparse.ArgumentParser, most: int, default: int, text: str
) -> None:
    parser.add_argument(
        "--limit",
        type=whole(1, most),
        default=default,
        metavar="N",
        help=f"{text} (default: {default})",
    )


def _add_id(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("batch_id", type=_id, metavar="ID", help="id of the batch")


def _add_follow(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--follow", action="store_true", help="show the progress until the batch ends"
    )


def _id(text: str) -> str:
    if not text or not all(c.isalnum() or c in "-_" for c in text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the id of a batch")
    return text


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    return key, value


def _whole_number(text: str) -> int:
    if not re.fullmatch("-?[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


# The options of the command keys.

MAX_DAYS = 366
# The value of an option that removes a limit.
NO_LIMIT = "none"


def _add_keys(commands: Subparsers) -> None:
    keys = commands.add_parser(
        "keys",
        help="add, list, limit and revoke the keys of a server",
        description="Manage the keys of a running server. Each command needs the key of "
        "an admin, in --api-key or its environment variables.",
        allow_abbrev=False,
    )
    actions = keys.add_subparsers(dest="action", required=True)
    command = partial(_command, actions, module="key_commands")

    add = command(
        "add",
        "Make a key for a client and print it. It cannot be shown again.",
    )
    add.add_argument(
        "name", metavar="NAME", help="owner of all files and batches made with the key"
    )
    add.add_argument(
        "--role",
        choices=("client", "admin"),
        default="client",
        help="a client sees only its own objects, an admin may do everything "
        "(default: client)",
    )
    add.add_argument(
        "--same-owner",
        action="store_true",
        help="allow a name that was used before: the key opens its objects and has its "
        "limits",
    )
    _add_limits(add)

    command(
        "list",
        "List the keys that were added with `keys add`, without the keys themselves.",
    )

    limit = command(
        "limit",
        "Change the limits of a client, for all its keys, and print them. A limit that "
        "is left out keeps its value, and 'none' removes one.",
    )
    limit.add_argument("name", metavar="NAME", help="name of the client")
    _add_limits(limit)

    usage = command(
        "usage",
        "Show batches, lines, online calls and tokens per key and day (UTC).",
    )
    usage.add_argument(
        "--days",
        type=whole(1, MAX_DAYS),
        default=1,
        metavar="N",
        help="today and the N-1 days before (default: 1)",
    )

    revoke = command(
        "revoke",
        "Revoke a key, effective at once. Batches of its name continue.",
    )
    revoke.add_argument("key_id", metavar="ID", help="id of the key, see `keys list`")
    revoke.add_argument(
        "--cancel-batches",
        action="store_true",
        help="also cancel all active batches of the key's name",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        action="append",
        dest="models",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="served model or LoRA adapter that the client may use (repeatable). "
        "'none' alone removes the list, and a new client may use all",
    )
    for name, text in (
        ("batches", "batches created in a day (UTC)"),
        ("lines", "lines of batches created in a day"),
        ("tokens", "tokens of prompts and answers in a day"),
    ):
        parser.add_argument(
            f"--{name}-per-day",
            type=_limit,
            default=argparse.SUPPRESS,
            metavar="N",
            help=f"most {text}, or 'none' for any number, as for a new client",
        )


def _limit(text: str) -> int | None:
    try:
        return None if text == NO_LIMIT else whole(0, 1 << 53)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or {NO_LIMIT!r}") from None
