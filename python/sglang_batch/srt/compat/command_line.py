"""SGLang's command line, known without importing SGLang, which takes ten seconds.

``sglang_options.json`` lists the options of the supported release.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, NoReturn

from ...errors import ConfigError, UnknownOption

OPTIONS = Path(__file__).with_name("sglang_options.json")
HELP = "`sglang serve --help` lists SGLang's options"
# Entry points with which other packages add choices to SGLang's options.
_PLUGINS = ("sglang.srt.plugins", "sglang.srt.platforms")
# Packages with such entry points that come with SGLang or are recorded.
_NO_CHOICES = {"sglang-batch", "smg-grpc-servicer"}
_TYPES = {"int": int, "float": float}
# Options of which SGLang takes 0 and less, and then fails in the engine.
_ABOVE_0 = ("tp_size", "pp_size", "dp_size", "page_size", "max_total_tokens")


def import_no_kernels() -> None:
    """Import SGLang without FlashInfer, in a process that runs no model.

    SGLang imports it on all machines, which takes two seconds. Its choices do not depend
    on it where no GPU is.
    """
    import torch

    if not torch.cuda.is_available():
        sys.modules.setdefault("flashinfer", None)  # type: ignore[arg-type]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {HELP}.")


def check_arguments(argv: list[str]) -> argparse.Namespace:
    """The options that are given, by SGLang's names for them.

    Empty if another release is installed, or the options are in a file (``--config``).

    Raises:
        ConfigError: an option is unknown, or its value cannot be used.
    """
    release = _recorded()["release"]
    try:
        if version("sglang") != release:
            return argparse.Namespace()
    except PackageNotFoundError:
        raise ConfigError(
            f"sglang is not installed; pip install sglang=={release}."
        ) from None
    parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    add_options(parser)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UnknownOption(
            f"unrecognized arguments: {' '.join(unknown)}; {HELP}.",
            unknown,
            sglang_flags(),
        )
    for name in _ABOVE_0:
        value = str(getattr(known, name, 1))
        if re.fullmatch(r"-\d+|0+", value):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {value} must be 1 or more.")
    if "config" in known:
        if not Path(known.config).is_file():
            raise ConfigError(f"--config {known.config}: there is no such file.")
        return argparse.Namespace()
    if "model_path" not in known:
        raise ConfigError("--model-path MODEL is required.")
    return known


def add_options(
    parser: argparse._ActionsContainer,
    *names: str,
    also: tuple[str, ...] = (),
    **changed: Any,
) -> None:
    """Add options of SGLang as its own parser has them.

    Args:
        names: their names in SGLang's ``ServerArgs``; without any, all are added.
        also: further flags of the option.
        changed: other arguments of ``add_argument``, such as ``help``, which is not
            recorded.
    """
    for option in _recorded()["options"]:
        if names and option["dest"] not in names:
            continue
        values: dict[str, Any] = {"dest": option["dest"]}
        if option.get("nargs") == 0:
            values["action"] = "store_true"
        else:
            values["nargs"] = option.get("nargs")
            values["type"] = _TYPES.get(option.get("type", ""), str)
            values["choices"] = None if _extended() else option.get("choices")
        parser.add_argument(*also, *option["flags"], **values | changed)


def sglang_flags() -> list[str]:
    return [flag for option in _recorded()["options"] for flag in option["flags"]]


@cache
def _recorded() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(OPTIONS.read_bytes())
    return recorded


@cache
def _extended() -> bool:
    """Whether another package may have added choices to SGLang's options."""
    return any(
        found.dist is None or found.dist.name not in _NO_CHOICES
        for group in _PLUGINS
        for found in entry_points(group=group)
    )
