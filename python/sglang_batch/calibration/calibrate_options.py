"""The options of ``sglang-batch calibrate``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ..option_types import count, whole
from .decode_shapes import MIN_ROWS

_DESCRIPTION = """\
Measure what planning must know of this device: the seconds of steps of all sizes, and how
much of a decode step the longest row decides (row_share). The engine starts in this process
and runs batches of random prompts, for about two minutes.
"""

_EPILOG = """\
Every other option is passed to SGLang unchanged, as in `sglang-batch run`: give those of
the runs that are to be planned.

Results are kept in the user's data directory ($XDG_DATA_HOME): timed steps for the model, the
device and the way to run it, in timed_steps.json, and row_share for the device, the attention
backend, the shape of the KV, the page size and --tp, in row_shares.json. Runs, servers, plan
and simulate on that device use them from then on. Runs and servers add the steps of their
own jobs.

exit status:
  0  costs or row_share were measured and kept
  1  the engine failed, or nothing could be measured: nothing was kept
  2  the model or an option cannot be used
  130  interrupted

example:
  sglang-batch calibrate --model-path meta-llama/Llama-3.1-8B-Instruct --tp 2
"""


def add_calibrate(commands: Any, run: Callable[..., int]) -> None:
    """Add ``calibrate`` to the commands."""
    parser = commands.add_parser(
        "calibrate",
        usage="sglang-batch calibrate --model-path MODEL [--rows N] [--tokens N] "
        "[SGLang's server options]",
        help="measure on this device what planning must know of it",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--rows", type=whole(MIN_ROWS), metavar="N",
        help="requests in a batch (default: up to 64, by the engine's limits)",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=count, metavar="N",
        help="prompt tokens in a batch, all requests together (default: up to 65,536, "
        "on a CPU up to 8,192, by the engine's KV and context)",
    )  # fmt: skip
    parser.set_defaults(run=run)
