"""The options that describe a machine, for ``plan`` and ``simulate``."""

from __future__ import annotations

import argparse

from ..option_types import at_least_0, count, exponent, positive, positive_share

# Both commands presume SGLang's engine, which runs matrix products and attention one
# after the other.
OVERLAP = 1.0
# Of simulate.
DEFAULT_HARDWARE = "a100-sxm-80gb"


def add_machine(parser: argparse.ArgumentParser, *, hardware: str) -> None:
    """Add the options. ``hardware`` is the default of ``--hardware``, in words."""
    group = parser.add_argument_group("machine")
    group.add_argument(
        "--hardware", metavar="NAME",
        help="device, such as a100-sxm-80gb, h100-sxm or cpu, with --choose several of "
        f"them, such as 8xh200-sxm (default: {hardware})",
    )  # fmt: skip
    group.add_argument(
        "--compute-tflops", type=positive, metavar="X",
        help="measured 16-bit TFLOP/s of the device (default: its datasheet's)",
    )  # fmt: skip
    group.add_argument(
        "--bandwidth-tbs", type=positive, metavar="Y",
        help="measured memory bandwidth in TB/s (default: its datasheet's)",
    )  # fmt: skip
    group.add_argument(
        "--tp", "--tp-size", "--tensor-parallel-size", type=count, default=1,
        metavar="N", help="devices that share the model (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--kv-capacity-tokens", type=count, metavar="N",
        help="tokens that fit into the KV cache (default: computed from the memory "
        "that the weights leave free)",
    )  # fmt: skip
    group.add_argument(
        "--mem-fraction-static", type=positive_share, default=0.9, metavar="SHARE",
        help="share of the memory for weights and KV (default: 0.9)",
    )  # fmt: skip
    group.add_argument(
        "--chunked-prefill-size", type=count, default=2048, metavar="N",
        help="most tokens in one step, prompts and answers together (default: 2048)",
    )  # fmt: skip
    group.add_argument(
        "--max-wait-steps", type=count, metavar="N",
        help="with length-tree and length-aligned: decode steps after which a waiting "
        "request joins before all others (default: never)",
    )  # fmt: skip
    group.add_argument(
        "--shared-prefix-attention", action="store_true",
        help="read a prefix that running requests share once for all of them, as an "
        "offline server does on the GPUs in docs/kernels.md",
    )  # fmt: skip
    group.add_argument(
        "--row-share", type=at_least_0, metavar="W",
        help="one row alone uses at most 1/W of the bandwidth, so that the longest one "
        "may decide a decode step (default: what `sglang-batch calibrate` measured for "
        "this device and shape of KV, otherwise 0)",
    )  # fmt: skip
    group.add_argument(
        "--padded-attention", action="store_true",
        help="read as much KV for every row as for the longest, as in dense batches",
    )  # fmt: skip
    group.add_argument(
        "--overlap", type=exponent, default=OVERLAP, metavar="K",
        help="overlap of compute and memory time in a step: 1 is none, as in SGLang "
        "today; 1.47 fits BlendServe's results; inf is perfect "
        f"(default: {OVERLAP:g})",
    )  # fmt: skip
