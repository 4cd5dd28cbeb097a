"""The options of ``--choose``, for ``plan`` and ``simulate``."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from ...errors import ConfigError, InputError
from ...option_types import number, positive
from ...planner.choosing.ways import Box

_BOX = re.compile(r"(?:(\d+)x)?([^=]+)(?:=(.+))?")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group("choice of a way to run")
    group.add_argument(
        "--choose", action="store_true",
        help="search how to spread the model over the devices of --hardware (such as "
        "8xh200-sxm), the size of steps and more, simulate the best ways on this job, "
        "and print SGLang's options for the fastest",
    )  # fmt: skip
    group.add_argument(
        "--allow-quantization", nargs="+", metavar="METHOD", default=(),
        help="with --choose: also try these of SGLang's methods, such as fp8. They change "
        "answers, so they are marked, and the choice is among the others",
    )  # fmt: skip
    group.add_argument(
        "--allow-kv-cache-dtype", nargs="+", metavar="DTYPE", default=(),
        help="with --choose: also try KV of these, such as fp8_e4m3; marked as well",
    )  # fmt: skip
    group.add_argument(
        "--fleet", nargs="+", metavar="[N]x[DEVICE][=PRICE]",
        help="with --choose: several kinds of servers in place of --hardware, with the "
        "price of a device for an hour, such as 8xh200-sxm=3.5 8xh100-sxm=2.2",
    )  # fmt: skip
    group.add_argument(
        "--price-per-gpu-hour", type=positive, metavar="PRICE",
        help="price of a device for an hour, for the cost of each order; with --choose, "
        "where --fleet and --prices have none",
    )  # fmt: skip
    group.add_argument(
        "--prices", type=Path, metavar="FILE",
        help='with --choose: JSON with prices by device, {"h200-sxm": 3.5, ...}',
    )  # fmt: skip
    group.add_argument(
        "--deadline", type=duration, metavar="TIME",
        help="with --choose: say how many servers of each kind end the job in this time, "
        "such as 90m or 6h, and which of them cost least",
    )  # fmt: skip


def check_choice(options: argparse.Namespace) -> None:
    """Refuse options that only ``--choose`` has a use for.

    Raises:
        ConfigError: there is one.
    """
    if options.choose:
        if options.hardware is not None and options.fleet:
            raise ConfigError("--fleet replaces --hardware: give one of them.")
        return
    for name in (
        "allow_quantization", "allow_kv_cache_dtype", "fleet", "prices", "deadline",
    ):  # fmt: skip
        if getattr(options, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} has no use without --choose."
            )
    if options.hardware is not None and re.match(r"\d+x", options.hardware):
        raise ConfigError(
            f"--hardware {options.hardware}: only --choose takes several devices; "
            "otherwise name one, and --tp."
        )


def boxes(options: argparse.Namespace, default: str) -> list[Box]:
    """The servers of ``--fleet`` or ``--hardware``.

    Args:
        default: device without either option.

    Raises:
        ConfigError: one of them is not understood.
        InputError: the file of prices cannot be used.
    """
    texts: Sequence[str] = options.fleet or [options.hardware or default]
    prices = _prices(options.prices)
    return [_box(text, options, prices) for text in texts]


def _box(text: str, options: argparse.Namespace, prices: dict[str, float]) -> Box:
    found = _BOX.fullmatch(text)
    if found is None or found[1] == "0":
        raise ConfigError(f"{text!r} must be like 8xh200-sxm, or 8xh200-sxm=3.5.")
    from ..machine_choice import named_device  # it loads the planner

    hardware = named_device(options, found[2])
    price = options.price_per_gpu_hour
    price = prices.get(hardware.name, price)
    if found[3] is not None:
        price = number(found[3])
        if not 0 < price < float("inf"):
            raise ConfigError(
                f"{text!r}: the price {found[3]!r} must be a number above 0."
            )
    return Box(hardware, int(found[1] or 1), price)


def _prices(path: Path | None) -> dict[str, float]:
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"--prices {path} cannot be read: {error}") from None
    if not isinstance(found, dict) or not all(
        isinstance(price, int | float) and price > 0 for price in found.values()
    ):
        raise InputError(
            f'--prices {path} must have prices above 0 by device: {{"h200-sxm": 3.5}}.'
        )
    return {name: float(price) for name, price in found.items()}


def duration(text: str) -> float:
    """Seconds of a time such as 90s, 45m, 6h or 2d."""
    seconds = number(text[:-1]) * _UNITS.get(text[-1:], float("nan"))
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a time above 0 such as 90s, 45m, 6h or 2d"
        )
    return seconds
