"""The commands of commands.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCHMARK, ROOT = HERE.parent, HERE.parents[1]
COMMANDS = HERE / "commands.toml"
SCRATCH = "scratch"
# What a benchmark needs to end after the time that it is given.
TO_END_MINUTES = 1


@dataclass(frozen=True, slots=True)
class Command:
    """See commands.toml."""

    name: str
    why: str
    minutes: float
    run: list[list[str]]
    needs: tuple[str, ...] = ()
    least: float = 0

    def minutes_of(self, left: float) -> float:
        """How long it may run if so many minutes are left, 0 if it may not start."""
        given = min(self.minutes, left)
        return given if given >= (self.least or self.minutes) else 0

    def lines(self, save: Path, minutes: float) -> Iterator[list[str]]:
        """The command lines, with folders and times in place of their names."""
        scratch = save / SCRATCH
        places = {
            "save": save,
            "scratch": scratch,
            "model": scratch / "model",
            "minutes": f"{minutes - TO_END_MINUTES:.1f}",
        }
        for line in self.run:
            yield [
                re.sub(r"\{(\w+)\}", lambda found: str(places[found[1]]), word)
                for word in line
            ]


def read_commands(path: Path = COMMANDS) -> list[Command]:
    """In order of value.

    Raises:
        ValueError: two have one name.
    """
    entries = tomllib.loads(path.read_text())["command"]
    names = [entry["name"] for entry in entries]
    if len({*names}) != len(names):
        raise ValueError(f"{path} has two commands of one name.")
    return [
        Command(**{**entry, "needs": tuple(entry.get("needs", ()))})
        for entry in entries
    ]


def chosen(commands: Sequence[Command], only: Sequence[str] | None) -> list[Command]:
    """Those that are named, in the order of the list.

    Raises:
        ValueError: one is not there.
    """
    unknown = set(only or ()) - {command.name for command in commands}
    if unknown:
        raise ValueError(f"no command {', '.join(sorted(unknown))}: see --list.")
    return [each for each in commands if only is None or each.name in only]
