"""The options of the command keys."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ..option_types import whole

MAX_DAYS = 366
# The value of an option that removes a limit.
NO_LIMIT = "none"

Subparsers = Any
# Adds a command with the options that every command for a server has.
AddCommand = Callable[..., argparse.ArgumentParser]


def add_keys(commands: Subparsers, add_command: AddCommand) -> None:
    """Add ``sglang-batch keys`` with its commands."""
    keys = commands.add_parser(
        "keys",
        help="add, list, limit and revoke the keys of a server",
        description="Manage the keys of a running server. Each command needs the key of "
        "an admin, in --api-key or its environment variables.",
        allow_abbrev=False,
    )
    actions = keys.add_subparsers(dest="action", required=True)

    add = add_command(
        actions,
        "add",
        "make a key for a client",
        "Make a key and print it. It cannot be shown again.",
        module="key_commands",
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

    add_command(
        actions,
        "list",
        "list the keys that were added",
        "List the keys that were added with `keys add`, without the keys themselves.",
        module="key_commands",
    )

    limit = add_command(
        actions,
        "limit",
        "change the limits of a client",
        "Change the limits of a client, for all its keys, and print them. A limit that "
        "is left out keeps its value, and 'none' removes one.",
        module="key_commands",
    )
    limit.add_argument("name", metavar="NAME", help="name of the client")
    _add_limits(limit)

    usage = add_command(
        actions,
        "usage",
        "show the usage of each key per day",
        "Show batches, lines, online calls and tokens per key and day (UTC).",
        module="key_commands",
    )
    usage.add_argument(
        "--days",
        type=whole(1, MAX_DAYS),
        default=1,
        metavar="N",
        help="today and the N-1 days before (default: 1)",
    )

    revoke = add_command(
        actions,
        "revoke",
        "revoke a key",
        "Revoke a key, effective at once. Batches of its name continue.",
        module="key_commands",
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
