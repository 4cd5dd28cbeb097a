"""The options of ``sglang-batch plan``, ``simulate`` and ``calibrate``."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..config import AUTO, ORDERS, POLICY_HELP, add_setting
from ..errors import ConfigError, InputError
from ..planner.choosing.ways import Box
from ..run.option_types import (
    add_arguments,
    add_command,
    at_least_0,
    count,
    exponent,
    number,
    options_text,
    positive,
    positive_share,
    share,
    whole,
)
from ..run.run_options import add_advanced_inputs, add_inputs
from .calibration.decode_shapes import MIN_ROWS
from .models import MODELS
from .synthetic_jobs import (
    DEFAULT_NUM_REQUESTS,
    blend_job,
    groups_job,
    industry_job,
    trace_job,
)

Subparsers = Any


def add_plan(commands: Subparsers, run: Callable[..., int]) -> None:
    """Add ``plan`` to the commands."""
    from ..srt.compat.command_line import add_options

    plan = add_command(
        commands,
        "plan",
        run,
        usage="sglang-batch plan -i INPUT [INPUT ...] --model-path MODEL [options] "
        "[SGLang's server options]\n       sglang-batch plan --steps FILE [options]",
        help="predict how long a file of requests takes, and which order is fastest",
    )
    add_inputs(plan, required=False)
    add_advanced_inputs(plan)
    add_options(
        plan, "model_path", metavar="MODEL",
        help="directory, or name on the Hugging Face hub; only the configuration and "
        "the tokenizer are read",
    )  # fmt: skip
    add_setting(plan, "policy", f"Default: {AUTO}. {POLICY_HELP}", default=AUTO)
    add_arguments(
        plan,
        options_text("plan"),
        compare={"nargs": "+", "choices": ORDERS, "default": ()},
        default_output_len={"type": count},
        steps={"type": Path},
    )
    add_machine(plan, hardware="the GPU of this machine, otherwise cpu")
    add_choice(plan)
    _add_output(plan)


def add_simulate(commands: Subparsers, run: Callable[..., int]) -> None:
    """Add ``simulate`` to the commands."""
    from ..srt.compat.command_line import add_options

    simulate = add_command(
        commands,
        "simulate",
        run,
        usage="sglang-batch simulate [job] [machine] [options]",
        help="compare orders on synthetic jobs and on traces, without a model",
    )
    group = simulate.add_argument_group("job, one of")
    add_arguments(
        group.add_mutually_exclusive_group(),
        options_text("job"),
        trace={"type": trace_job, "dest": "job"},
        blend={"type": blend_job, "dest": "job"},
        groups={"type": groups_job, "dest": "job"},
        industry={"action": "store_const", "const": industry_job(), "dest": "job"},
        lengths={"type": Path, "nargs": "+"},
    )
    most = f"requests (default: {DEFAULT_NUM_REQUESTS:,}, or all of --lengths)"
    group.add_argument("--num-requests", type=count, metavar="N", help=most)
    add_arguments(
        simulate,
        options_text("simulate", orders=", ".join(ORDERS)),
        sample_share={"type": share, "default": 0.01},
        policies={"nargs": "+", "choices": ORDERS, "default": ORDERS},
        model={"default": "llama-3.1-8b", "choices": tuple(MODELS), "metavar": None},
        model_path={"type": Path},
    )
    add_options(
        simulate, "quantization", choices=None, metavar="METHOD",
        help="how SGLang would quantise the weights, such as fp8 (default: as the "
        "model's config.json says)",
    )  # fmt: skip
    add_options(
        simulate, "kv_cache_dtype", choices=None, default="auto", metavar="DTYPE",
        help="dtype of KV, such as fp8_e4m3 (default: auto, that of the activations)",
    )  # fmt: skip
    simulate.add_argument(
        "--paper-costs", action="store_true",
        help="ignore the arithmetic of attention and the reading of weights, as "
        "BlendServe's analysis does",
    )  # fmt: skip
    add_machine(simulate, hardware=DEFAULT_HARDWARE)
    add_choice(simulate)
    _add_output(simulate)
    simulate.set_defaults(job=trace_job("1"))


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    add_setting(group, "seed", "Default: 0", default=0, metavar="N")
    add_arguments(group, options_text("report"), plot={"type": Path})


# The options that describe a machine, for ``plan`` and ``simulate``.

# Both commands presume SGLang's engine, which runs matrix products and attention one
# after the other.
OVERLAP = 1.0
# Of simulate.
DEFAULT_HARDWARE = "a100-sxm-80gb"


def add_machine(parser: argparse.ArgumentParser, *, hardware: str) -> None:
    """Add the options. ``hardware`` is the default of ``--hardware``, in words."""
    from ..srt.compat.command_line import add_options

    group = parser.add_argument_group("machine")
    add_arguments(
        group,
        options_text("device", hardware=hardware),
        compute_tflops={"type": positive},
        bandwidth_tbs={"type": positive},
    )
    add_options(
        group, "tp_size", also=("--tp",), dest="tp", type=count, default=1, metavar="N",
        help="devices that share the model (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--kv-capacity-tokens", type=count, metavar="N",
        help="tokens that fit into the KV cache (default: computed from the memory "
        "that the weights leave free)",
    )  # fmt: skip
    add_options(
        group, "mem_fraction_static", type=positive_share, default=0.9, metavar="SHARE",
        help="share of the memory for weights and KV (default: 0.9)",
    )  # fmt: skip
    add_options(
        group, "chunked_prefill_size", type=count, default=2048, metavar="N",
        help="most tokens in one step, prompts and answers together (default: 2048)",
    )  # fmt: skip
    add_setting(group, "max_wait_steps", metavar="N")
    add_arguments(
        group,
        options_text("attention", overlap=f"{OVERLAP:g}"),
        row_share={"type": at_least_0},
        overlap={"type": exponent, "default": OVERLAP},
    )


# The options of ``--choose``, for ``plan`` and ``simulate``.

_BOX = re.compile(r"(?:(\d+)x)?([^=]+)(?:=(.+))?")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group("choice of a way to run")
    add_arguments(
        group,
        options_text("choice"),
        allow_quantization={"nargs": "+", "default": ()},
        allow_kv_cache_dtype={"nargs": "+", "default": ()},
        fleet={"nargs": "+"},
        price_per_gpu_hour={"type": positive},
        prices={"type": Path},
        deadline={"type": duration},
    )


def check_choice(options: argparse.Namespace, others: Sequence[str] = ()) -> None:
    """Refuse options that only ``--choose`` has a use for, and several devices.

    ``others`` are the arguments that are no options of ours.

    Raises:
        ConfigError: there is one.
    """
    if options.hardware and others and not others[0].startswith("-"):
        several = f"{options.hardware} {others[0]}"
        raise ConfigError(
            f"--hardware {several}: it takes one device. Compare several with --choose "
            f"--fleet {several}."
        )
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
    """The servers of ``--fleet`` or ``--hardware``, or of the ``default`` device.

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
    from .machine_choice import named_device  # it loads the planner

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


def add_calibrate(commands: Any, run: Callable[..., int]) -> None:
    """Add ``calibrate`` to the commands."""
    parser = add_command(
        commands,
        "calibrate",
        run,
        usage="sglang-batch calibrate --model-path MODEL [--rows N] [--tokens N] "
        "[SGLang's server options]",
        help="measure on this device what planning must know of it",
    )
    add_arguments(
        parser,
        options_text("calibrate"),
        rows={"type": whole(MIN_ROWS)},
        tokens={"type": count},
    )
