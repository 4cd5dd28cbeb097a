"""The commands for batches at a server: submit, status, list, cancel, results."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .batch_api import protocol as api

DEFAULT_URL = "http://127.0.0.1:30000"
MAX_LIST = 10_000

Subparsers = Any

_FOLLOW_EPILOG = """\
exit status with --follow:
  0  every line was answered
  1  the batch failed, expired or was cancelled, or the server is gone
  2  the server refused: a wrong key, or something it does not know
  3  the batch is complete, some lines were answered with an error
  130  interrupted; the batch goes on at the server

"""
_ENVIRONMENT = """\
$SGLANG_BATCH_URL and $SGLANG_BATCH_API_KEY (or $OPENAI_API_KEY) stand for --url and
--api-key where those are not given.
"""


def add(commands: Subparsers) -> None:
    """Add the five commands."""
    _add_submit(commands)
    _add_status(commands)
    _add_list(commands)
    _add_cancel(commands)
    _add_results(commands)


def _add_submit(commands: Subparsers) -> None:
    submit = _command(
        commands,
        "submit",
        "send a file of requests to a server as a batch",
        "Upload a JSONL file of OpenAI batch requests and start a batch over it. "
        "Prints the batch's id.",
        _FOLLOW_EPILOG,
    )
    submit.add_argument("-i", "--input-file", type=Path, required=True, metavar="FILE")
    submit.add_argument(
        "--endpoint",
        choices=tuple(api.ENDPOINTS),
        metavar="PATH",
        help="endpoint of all lines, such as /v1/embeddings (default: the first line's)",
    )
    submit.add_argument(
        "--window",
        default="24h",
        metavar="TIME",
        help="time after which what is unfinished expires, such as 90m or 7d "
        "(default: 24h)",
    )
    submit.add_argument(
        "--priority",
        type=int,
        metavar="N",
        help="batches of a higher one run before others (default: 0)",
    )
    submit.add_argument(
        "--metadata",
        action="append",
        type=_pair,
        default=[],
        metavar="KEY=VALUE",
        help="shown with the batch; may be given several times",
    )
    submit.add_argument(
        "--follow", action="store_true", help="show its progress until it ends"
    )


def _add_status(commands: Subparsers) -> None:
    status = _command(
        commands,
        "status",
        "show how far a batch at a server is",
        "Show how far a batch is.",
        _FOLLOW_EPILOG,
    )
    status.add_argument("batch_id", type=_id, metavar="ID")
    status.add_argument(
        "--follow", action="store_true", help="show its progress until it ends"
    )


def _add_list(commands: Subparsers) -> None:
    listing = _command(
        commands, "list", "list the batches of a server", "List batches, newest first."
    )
    listing.add_argument(
        "--limit",
        type=_limit,
        default=20,
        metavar="N",
        help="list so many at most (default: 20)",
    )


def _add_cancel(commands: Subparsers) -> None:
    cancel = _command(
        commands,
        "cancel",
        "cancel a batch at a server",
        "Cancel a batch. Lines that are answered by then are kept: see `results`.",
    )
    cancel.add_argument("batch_id", type=_id, metavar="ID")


def _add_results(commands: Subparsers) -> None:
    results = _command(
        commands,
        "results",
        "download the results of a batch",
        "Download the results of a batch that ended, in the order of its input.",
    )
    results.add_argument("batch_id", type=_id, metavar="ID")
    results.add_argument(
        "-o",
        "--output-file",
        type=Path,
        required=True,
        metavar="FILE",
        help="where answers go; - is the standard output",
    )
    results.add_argument(
        "--error-file",
        type=Path,
        metavar="FILE",
        help="where lines with an error go (default: among the answers)",
    )
    results.add_argument(
        "--so-far",
        action="store_true",
        help="take the results that a running batch has by now",
    )


def _command(
    commands: Subparsers, name: str, text: str, description: str, epilog: str = ""
) -> argparse.ArgumentParser:
    """A command with the options that all of them have."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=description,
        epilog=epilog + _ENVIRONMENT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--url",
        default=os.environ.get("SGLANG_BATCH_URL") or DEFAULT_URL,
        help=f"the server (default: {DEFAULT_URL})",
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("SGLANG_BATCH_API_KEY")
        or os.environ.get("OPENAI_API_KEY"),
        metavar="KEY",
        help="the key that the server asks for, if it does",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON, one object a line"
    )
    parser.set_defaults(run=_lazily(name))
    return parser


def _lazily(name: str) -> Callable[[argparse.Namespace, list[str]], int]:
    """Run a command of :mod:`.remote`, which is imported only then."""

    def run(options: argparse.Namespace, rest: list[str]) -> int:
        remote = importlib.import_module(".remote", __package__)
        status: int = remote.run(name, options)
        return status

    return run


def _id(text: str) -> str:
    if not text or not all(c.isalnum() or c in "-_" for c in text):
        raise argparse.ArgumentTypeError(f"{text!r} is no id of a batch")
    return text


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    return key, value


def _limit(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_LIST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number from 1 to {MAX_LIST}"
        )
    return int(text)
