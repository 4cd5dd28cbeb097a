"""SGLang's command line, known without importing SGLang, which takes ten seconds.

``sglang_options.json`` lists the options of the supported release.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from decimal import Decimal
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, NoReturn

from ...config import OfflineBatchConfig
from ...errors import ConfigError, UnknownOption
from . import support
from .support import RULES

OPTIONS = Path(__file__).with_name("sglang_options.json")
DEVICES = Path("/dev")
# Processes of an engine that may share a few cores.
MOST_SHARING = 8
HELP = "`sglang serve --help` lists SGLang's options"
# Entry points with which other packages add choices to SGLang's options.
_PLUGINS = ("sglang.srt.plugins", "sglang.srt.platforms")
# Packages with such entry points that come with SGLang or are recorded.
_NO_CHOICES = {"sglang-batch", "smg-grpc-servicer"}


def import_no_kernels() -> None:
    """Import SGLang without FlashInfer, in a process that runs no model.

    SGLang imports it on all machines, which takes two seconds. Its choices do not depend
    on it where no GPU is.
    """
    import torch

    if not torch.cuda.is_available():
        sys.modules.setdefault("flashinfer", None)  # type: ignore[arg-type]


def size(text: str) -> int:
    """A whole number as SGLang reads it: 1.5k is 1,500 and 1Ki is 1,024."""
    found = re.fullmatch(r"(\d+(?:\.\d+(?=[kMGT]$))?)([kMGT]|[KMGT]i)", text.strip())
    if found is None:
        return int(text)
    number, unit = found.groups()
    power = 1 + "KMGT".index(unit[0].upper())
    return int(Decimal(number) * (1024 if unit[1:] else 1000) ** power)


_TYPES = {"int": int, "float": float, "human_readable_int": size, "loads": json.loads}


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
    for name, value in vars(known).items():
        for each in value if isinstance(value, list) else [value]:
            _check_number(support.as_flag(name), name, each)
    if "config" in known:
        if not Path(known.config).is_file():
            raise ConfigError(f"--config {known.config}: there is no such file.")
        return argparse.Namespace()
    if "model_path" not in known:
        raise ConfigError("--model-path MODEL is required.")
    values = vars(known)
    mode = values.get("disaggregation_mode")
    backend = values.get("disaggregation_transfer_backend")
    config = OfflineBatchConfig.from_json(values.get("offline_batch_config"))
    support.check_flags(values, support.config_in_mode(config, mode, backend))
    return known


def check_device(known: argparse.Namespace) -> None:
    """Raises ConfigError if this machine's devices do not take an engine's options."""
    device, gpus = getattr(known, "device", ""), len([*DEVICES.glob("nvidia[0-9]*")])
    cores = os.cpu_count() or 1
    ranks = getattr(known, "tp_size", 1) * getattr(known, "pp_size", 1)
    most = gpus if gpus and device != "cpu" else max(MOST_SHARING, cores)
    if ranks > most * getattr(known, "nnodes", 1):
        raise ConfigError(
            f"--tp-size and --pp-size are {ranks} processes, and this machine has {gpus} "
            f"GPUs and {cores} cores; lower them."
        )
    unknown = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or sys.platform != "linux"
    if (
        unknown
        or _extended()
        or any(any(DEVICES.glob(each)) for each in RULES["accelerators"])
    ):
        return
    if device not in ("", "cpu"):
        raise ConfigError(
            f"--device {device}: this machine has no accelerator; leave it out to run "
            "on the CPU."
        )
    for name, possible in RULES["on a CPU"].items():
        value = getattr(known, name, None) or possible[0]
        if value not in possible:
            raise ConfigError(
                f"{support.as_flag(name)} {value} needs an accelerator, which this "
                f"machine does not have; choose one of {', '.join(possible)}."
            )


def _check_number(flag: str, name: str, number: object) -> None:
    if type(number) is not int and type(number) is not float:
        return
    least, most = (RULES[end].get(name) for end in ("least", "most"))
    if number < (least or 0) or number > (most or math.inf):
        most = "" if most is None else f" and at most {most}"
        raise ConfigError(f"{flag} {number} must be {least or 0} or more{most}.")


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
            choices = option.get("choices")
            if option["dest"] in RULES["choices"]:
                choices, values["type"] = RULES["choices"][option["dest"]], str.lower
            values["choices"] = None if _extended() else choices
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
