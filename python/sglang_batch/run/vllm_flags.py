"""Options of ``vllm run-batch`` (vLLM 0.33), as ``sglang-batch run`` takes them.

Those that SGLang has by the same name are passed on like all its options. ``vllm_flags.json``
has the rest: those with another name, those without effect here, and those that mean
something else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from ..errors import ConfigError


class FlagUse(Enum):
    """What becomes of an option of vLLM's."""

    RENAMED = "renamed"
    IGNORED = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """An option of vLLM's.

    names: with spaces between them.
    text: SGLang's options for it, if it is renamed; a value follows the last of them.
        Otherwise why it has no effect, or what to use instead.
    takes_value: whether a value follows. By default one does, unless the option is ignored.
    values: SGLang's word for some of vLLM's values. None: the option is left out.
    refused: values that are refused, with the reason. ``*`` is any that ``values`` lacks.
    is_size: whether the value may be such as ``16k``, where vLLM's suffixes differ.
    """

    use: FlagUse
    names: str
    text: str
    takes_value: bool
    values: Mapping[str, str | None] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    is_size: bool = False


def _read() -> Iterator[VllmFlag]:
    table = json.loads(Path(__file__).with_suffix(".json").read_bytes())
    for use in FlagUse:
        for row in table[use.value]:
            yield VllmFlag(use, **{"takes_value": use is not FlagUse.IGNORED, **row})


VLLM_FLAGS = tuple(_read())
_BY_NAME = {name: flag for flag in VLLM_FLAGS for name in flag.names.split()}
_SUFFIXES = {
    **{"k": 10**3, "m": 10**6, "g": 10**9},
    **{"K": 2**10, "M": 2**20, "G": 2**30},
}


def sglang_argv(argv: list[str], say: Callable[[str], None]) -> list[str]:
    """SGLang's options for options among which are some of vLLM's.

    Args:
        argv: options of the engine. Those that are not in the table stay as they are.
        say: told once for each option that has no effect.

    Raises ConfigError if an option means something else here, or lacks its value.
    """
    found: list[str] = []
    left = iter(argv)
    for argument in left:
        name, equals, value = argument.partition("=")
        flag = _BY_NAME.get(name.replace("_", "-") if name[:2] == "--" else name)
        if flag is None:
            found.append(argument)
            continue
        if flag.use is FlagUse.REFUSED:
            raise ConfigError(f"{name} is an option of vLLM's: {flag.text}.")
        if not flag.takes_value:
            if equals:
                raise ConfigError(f"{argument}: {name} takes no value.")
            value = ""
        elif not equals and (value := next(left, "")) == "":
            raise ConfigError(f"{name} needs a value.")
        words = _translated(flag, name, value)
        if flag.use is FlagUse.IGNORED:
            say(f"{name} has no effect: {flag.text}.")
        elif words is not None:
            found += flag.text.split() + ([words] if words else [])
    return found


def _translated(flag: VllmFlag, name: str, value: str) -> str | None:
    """SGLang's word for a value. None: leave the option out."""
    if value in flag.values:
        return flag.values[value]
    for refused in (value, "*"):
        if refused in flag.refused:
            raise ConfigError(
                f"{name} {value} is an option of vLLM's: {flag.refused[refused]}."
            )
    return _size(name, value) if flag.is_size else value


def _size(name: str, value: str) -> str:
    """A number as vLLM reads it: ``k`` is 1,000 and ``K`` is 1,024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", value, re.ASCII)
    if match is None or ("." in match[1] and match[2] not in _SUFFIXES):
        raise ConfigError(f"{name} {value} must be a whole number, such as 8192 or 8k.")
    size = float(match[1]) * _SUFFIXES.get(match[2], 1)
    return str(int(size))
