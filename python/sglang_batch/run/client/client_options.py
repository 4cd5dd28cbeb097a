"""The options of the commands for a server: batches and keys."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from ...batch_api import protocol as api
from ...config import add_setting
from ...errors import ExitStatus
from ...job.engine import MAX_TREE_NODES
from ..option_types import add_arguments, add_command, enough, options_text, whole

DEFAULT_URL = "http://127.0.0.1:30000"
MAX_LIST = 10_000

Subparsers = Any

_FOLLOW = "--follow  show the progress until the batch ends"
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
    submit = _command(
        commands,
        "submit",
        "Start a batch on a server. Checks a JSONL file of OpenAI batch requests, uploads "
        "it, starts a batch and prints its id.",
        _FOLLOW_EPILOG,
    )
    add_arguments(
        submit,
        options_text("submit"),
        input_file={"nargs": "+", "action": "extend", "required": True},
        endpoint={"choices": tuple(api.ENDPOINTS)},
        window={"default": "24h"},
        priority={"type": whole(-api.MAX_PRIORITY, api.MAX_PRIORITY)},
        enough={"type": enough},
        metadata={"action": "append", "type": _pair, "default": []},
    )
    add_setting(submit, "dedupe", "Default: the server's setting")
    add_arguments(submit, _FOLLOW)
    about = "Show the status, counts, tokens and times of a batch."
    status = _command(commands, "status", about, _FOLLOW_EPILOG)
    _add_id(status)
    add_arguments(status, _FOLLOW)
    listing = _command(commands, "list", "List batches, newest first.")
    _add_limit(listing, MAX_LIST, 20, "list at most N batches")
    about = "Cancel a batch. Lines that are already answered are kept: see `results`."
    _add_id(_command(commands, "cancel", about))
    about = "Download the results of a batch that has ended, in input order."
    results = _command(commands, "results", about)
    _add_id(results)
    add_arguments(
        results,
        options_text("results"),
        output_file={"type": Path, "required": True},
        error_file={"type": Path},
    )
    tree = _command(
        commands,
        "tree",
        "Show the prefixes that running batches share. Of the largest it tells which are "
        "in the KV cache, how many requests use them, and when the plan needs them next. "
        "A server with keys wants that of an admin.",
        module="client_commands",
    )
    shown = (
        "half of them the longest in the cache, the others those that save most tokens"
    )
    text = f"show at most N prefixes of each replica: {shown}"
    _add_limit(tree, MAX_TREE_NODES, 50, text)
    _add_keys(commands)


def _command(
    commands: Subparsers,
    name: str,
    description: str,
    epilog: str = "",
    module: str = "client_commands",
) -> argparse.ArgumentParser:
    """Add a command with the options that all commands for servers have. ``module`` has a
    function of its name, which takes the client and the options."""
    title = description.partition(".")[0]
    parser = add_command(
        commands,
        name,
        partial(_run, module, "list_" if name == "list" else name),
        help=title[0].lower() + title[1:],
        description=description,
        epilog=epilog + _ENVIRONMENT,
    )
    env = os.environ.get
    add_arguments(
        parser,
        options_text("server", url=DEFAULT_URL),
        url={"default": env("SGLANG_BATCH_URL") or DEFAULT_URL},
        api_key={"default": env("SGLANG_BATCH_API_KEY") or env("OPENAI_API_KEY")},
    )
    return parser


def _run(
    module: str, function: str, options: argparse.Namespace, rest: list[str]
) -> int:
    """Call a function with a client of the server. Only then is its module imported."""
    from .batch_client import BatchClient, Shown

    command = getattr(importlib.import_module(f".{module}", __package__), function)
    with contextlib.closing(BatchClient(options.url, options.api_key)) as server:
        shown: Shown = command(server, options)
    lines = map(json.dumps, shown.objects) if options.json else [shown.text]
    for line in filter(None, lines):
        print(line)
    return shown.status


def _add_limit(
    parser: argparse.ArgumentParser, most: int, default: int, text: str
) -> None:
    limit = {"type": whole(1, most), "default": default}
    add_arguments(parser, f"--limit N  {text} (default: {default})", limit=limit)


def _add_id(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("batch_id", type=_id, metavar="ID", help="id of the batch")


def _id(text: str) -> str:
    if not text or not all(c.isalnum() or c in "-_" for c in text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the id of a batch")
    return text


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE")
    return key, value


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

    about = "Make a key for a client and print it. It cannot be shown again."
    add = command("add", about)
    add_arguments(
        add,
        options_text("keys-add"),
        role={"choices": ("client", "admin"), "default": "client"},
    )
    _add_limits(add)

    about = (
        "List the keys that were added with `keys add`, without the keys themselves."
    )
    command("list", about)

    limit = command(
        "limit",
        "Change the limits of a client, for all its keys, and print them. A limit that "
        "is left out keeps its value, and 'none' removes one.",
    )
    add_arguments(limit, "NAME  name of the client")
    _add_limits(limit)

    about = "Show batches, lines, online calls and tokens per key and day (UTC)."
    usage = command("usage", about)
    text = "--days N  today and the N-1 days before (default: 1)"
    add_arguments(usage, text, days={"type": whole(1, MAX_DAYS), "default": 1})

    about = "Revoke a key, effective at once. Batches of its name continue."
    revoke = command("revoke", about)
    revoke.add_argument("key_id", metavar="ID", help="id of the key, see `keys list`")
    text = "--cancel-batches  also cancel all active batches of the key's name"
    add_arguments(revoke, text)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limit = {"type": _limit, "default": argparse.SUPPRESS}
    add_arguments(
        parser,
        options_text("limits"),
        model={"action": "append", "dest": "models", "default": argparse.SUPPRESS},
        batches_per_day=limit,
        lines_per_day=limit,
        tokens_per_day=limit,
        enqueued_tokens=limit,
    )


def _limit(text: str) -> int | None:
    try:
        return None if text == NO_LIMIT else whole(0, 1 << 53)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or {NO_LIMIT!r}") from None
