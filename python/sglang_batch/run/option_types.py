"""Options as ``--help`` shows them, and the types of their values.

A type parses one argument or refuses it with a reason.
"""

from __future__ import annotations

import argparse
import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from functools import cache
from importlib import resources
from string import Template
from typing import Any

# The names of an argument, its metavar and its help, which continues in indented lines.
_ARGUMENT = re.compile(
    r"^((?:-\S+ )*-\S+|[^\s-]\S*)(?: (\S+))?  +(.+(?:\n +.+)*)", re.MULTILINE
)


def add_command(
    commands: Any, name: str, run: Callable[..., int], **texts: str
) -> argparse.ArgumentParser:
    """Add a command whose ``--help`` has the text of ``help/NAME.txt``: the first paragraph
    before the options, the others behind them.

    Args:
        texts: ``usage`` and ``help``. A ``description`` is instead of the file.
    """
    if "description" not in texts:
        description, _, epilog = _help(name).partition("\n\n")
        texts = {"description": description, "epilog": epilog, **texts}
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **texts,
    )
    parser.set_defaults(run=run)
    return parser


def options_text(section: str, **words: object) -> str:
    """The options in a section of ``help/options.txt``, with ``words`` in place of ``$word``."""
    text = _help("options").partition(f"[{section}]\n")[2].partition("\n\n")[0]
    return Template(text).substitute(words)


@cache
def _help(name: str) -> str:
    file = resources.files(__package__).joinpath("help", f"{name}.txt")
    return file.read_text("utf-8")


def add_arguments(
    parser: argparse._ActionsContainer, text: str, **more: dict[str, Any]
) -> None:
    """Add the options and positional arguments of a text like this one::

        FILE              of requests
        -n --number N     so many of them (default: all)
        --quiet           a switch, which has no metavar; two spaces or more come before the
                          help

    Args:
        more: other arguments of ``add_argument``, by the argument's name in Python.
    """
    for names, metavar, description in _ARGUMENT.findall(text):
        flags = names.split()
        name = flags[-1].lstrip("-").replace("-", "_").lower()
        given: dict[str, Any] = {"metavar": metavar} if metavar else {}
        if names[0] != "-":
            flags, given = [name], {"metavar": names}
        elif not metavar:
            given = {"action": "store_true"}
        given["help"] = " ".join(description.split()).replace("%", "%%")
        parser.add_argument(*flags, **given | more.pop(name, {}))
    assert not more, f"the text has no {', '.join(more)}"


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number in ASCII digits, from ``least`` to ``most``."""
    span = f"of {least} or more" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        try:
            value = int(text) if text.isascii() else least - 1
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise ArgumentTypeError(f"{text!r} must be a whole number {span}")
        return value

    return parse


count = whole(1)


def number(text: str) -> float:
    """A number, or NaN for any other text, such as digits of other scripts."""
    try:
        return float(text) if text.isascii() else math.nan
    except ValueError:
        return math.nan


def checked(
    fits: Callable[[float], bool], wanted: str, *, percent: bool = False
) -> Callable[[str], float]:
    """A number that passes a test.

    Args:
        wanted: the rest of the message about one that does not.
        percent: whether it may be a percentage such as 99%.
    """

    def parse(text: str) -> float:
        value = number(text.removesuffix("%") if percent else text)
        if percent and text.endswith("%"):
            value /= 100
        if not fits(value):  # NaN passes no test
            raise ArgumentTypeError(f"{text!r} must be {wanted}")
        return value

    return parse


positive = checked(lambda x: 0 < x < math.inf, "a number above 0")
at_least_0 = checked(lambda x: 0 <= x < math.inf, "a number of 0 or more")
share = checked(lambda x: 0 <= x <= 1, "a number from 0 to 1")
positive_share = checked(lambda x: 0 < x <= 1, "a number above 0 and at most 1")
enough = checked(
    lambda x: 0 < x <= 1,
    "a share above 0 and at most 1, such as 0.99 or 99%",
    percent=True,
)
exponent = checked(lambda x: x >= 1, "1 (no overlap) or more; inf is perfect overlap")
