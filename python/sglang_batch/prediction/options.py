"""The options of ``sglang-batch plan`` and ``sglang-batch simulate``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import POLICIES
from ..run_options import add_inputs
from .models import MODELS

DEFAULT_NUM_REQUESTS = 40_000
_ORDERS = tuple(policy for policy in POLICIES if policy != "auto")

_PLAN_EPILOG = """\
Every other option is passed to SGLang as it is (--served-model-name,
--chat-template, --context-length, ...): see `sglang serve --help`.

Nothing runs and no weights are loaded: prompts are rendered as SGLang would, and
the engine is simulated. Where an answer's length is not known, it is drawn from
around --default-output-len, so the seconds are as good as that guess.

With --steps, the steps that a server measured are shown beside the prediction, and
--plot draws them. Without a file of requests, they are all that is shown.

Inputs are those of run: see `sglang-batch run --help`.

exit status:
  0  the plan was printed
  2  the input or an option cannot be used

examples:
  sglang-batch plan -i requests.jsonl --model-path meta-llama/Llama-3.1-8B-Instruct \\
      --hardware h100-sxm --tp 2 --plot plan.png
  sglang-batch plan --steps steps.csv --plot steps.png
"""

_SIMULATE_EPILOG = """\
exit status:
  0  the report was printed
  2  an option cannot be used

examples:
  sglang-batch simulate --trace 1 --overlap 1.47
  sglang-batch simulate --groups 2000,200,16,256 --num-requests 3200 --model qwen2.5-7b
  sglang-batch simulate --lengths azure_llm_2023_conv.csv sharegpt_lengths.csv \\
      --num-requests 10000 --hardware h100-sxm --policies dual-scan dfs --plot sim.png
"""

Subparsers = Any


def add_plan(commands: Subparsers, run: Callable[..., int]) -> None:
    """Add ``plan`` to the commands."""
    plan = commands.add_parser(
        "plan",
        usage="sglang-batch plan -i INPUT [INPUT ...] --model-path MODEL [options] "
        "[SGLang's server options]\n       sglang-batch plan --steps FILE [options]",
        help="predict what a file of requests takes, and which order is fastest",
        description="Predict how long a batch file takes under each order of its "
        "requests, and why.",
        epilog=_PLAN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_inputs(plan, required=False)
    plan.add_argument(
        "--model-path", "--model", metavar="MODEL",
        help="a directory or a name on the Hugging Face hub; configuration and "
        "tokenizer are read",
    )  # fmt: skip
    plan.add_argument(
        "--policy", choices=POLICIES, default="auto",
        help="the order to predict; auto, the default, predicts all and takes the "
        "fastest",
    )  # fmt: skip
    plan.add_argument(
        "--compare", nargs="+", choices=_ORDERS, default=(), metavar="POLICY",
        help="further orders to predict beside --policy",
    )  # fmt: skip
    plan.add_argument(
        "--default-output-len", type=_count, default=256, metavar="TOKENS",
        help="average length of answers whose length is not known (default: 256)",
    )  # fmt: skip
    plan.add_argument(
        "--steps", type=Path, metavar="FILE",
        help="also show the steps of a run, a .csv file that a server logged; --plot "
        "then draws these",
    )  # fmt: skip
    _add_machine(plan, hardware=None, overlap=1.0)
    _add_output(plan)
    plan.set_defaults(run=run)


def add_simulate(commands: Subparsers, run: Callable[..., int]) -> None:
    """Add ``simulate`` to the commands."""
    simulate = commands.add_parser(
        "simulate",
        usage="sglang-batch simulate [job] [machine] [options]",
        help="compare orders on synthetic jobs and on traces, without a model",
        description="Simulate synthetic jobs or traces of lengths under several "
        "orders. The true output lengths drive the simulation; the orders see "
        "estimates learnt from a sample.",
        epilog=_SIMULATE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_job(simulate)
    simulate.add_argument(
        "--sample-share", type=_share, default=0.01, metavar="SHARE",
        help="share of the requests whose output lengths are known beforehand, as if "
        "they had run first; 0 for none (default: 0.01)",
    )  # fmt: skip
    simulate.add_argument(
        "--policies", nargs="+", choices=_ORDERS, default=_ORDERS, metavar="POLICY",
        help=f"orders to simulate (default: all: {', '.join(_ORDERS)})",
    )  # fmt: skip
    simulate.add_argument(
        "--model", default="llama-3.1-8b", choices=tuple(MODELS),
        help="a model by name (default: llama-3.1-8b)",
    )  # fmt: skip
    simulate.add_argument(
        "--model-path", type=Path, metavar="PATH",
        help="another model: its config.json, or the directory that has it",
    )  # fmt: skip
    simulate.add_argument(
        "--paper-costs", action="store_true",
        help="leave out attention's arithmetic and the reads of weights, as "
        "BlendServe's analysis does",
    )  # fmt: skip
    _add_machine(simulate, hardware="a100-sxm-80gb", overlap=1.47)
    _add_output(simulate)
    simulate.set_defaults(run=run, default_num_requests=DEFAULT_NUM_REQUESTS)


def _add_job(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("job, one of")
    job = group.add_mutually_exclusive_group()
    job.add_argument(
        "--trace", type=int, choices=(1, 2, 3, 4),
        help="one of BlendServe's four traces: density 1.4, 0.9, 1.4, 0.9 with "
        "sharing 0.35, 0.35, 0.05, 0.05 (default: 1)",
    )  # fmt: skip
    job.add_argument(
        "--blend", type=_blend, metavar="DENSITY,SHARING",
        help="a mix of BurstGPT, OpenVid and MMLU requests of this compute density and "
        "prefix sharing ratio",
    )  # fmt: skip
    job.add_argument(
        "--groups", type=_groups, metavar="PREFIX,DISTINCT,DEGREE,OUTPUT",
        help="DEGREE requests each share PREFIX tokens, have DISTINCT of their own, and "
        "generate OUTPUT",
    )  # fmt: skip
    job.add_argument(
        "--industry", action="store_true",
        help="queries on documents, like BatchLLM's industry workload",
    )  # fmt: skip
    job.add_argument(
        "--lengths", type=Path, nargs="+", metavar="FILE",
        help="traces of lengths, shuffled into one job: csv with ContextTokens and "
        "GeneratedTokens (Azure) or num_prefill_tokens and num_decode_tokens (Vidur), "
        "or JSON lines with input_length, output_length and hash_ids (Mooncake)",
    )  # fmt: skip
    group.add_argument(
        "--num-requests", type=_count, metavar="N",
        help=f"requests of the job (default: {DEFAULT_NUM_REQUESTS:,}; of traces, all)",
    )  # fmt: skip


def _add_machine(
    parser: argparse.ArgumentParser, *, hardware: str | None, overlap: float
) -> None:
    group = parser.add_argument_group("machine")
    group.add_argument(
        "--hardware", default=hardware, metavar="NAME",
        help="a device, such as a100-sxm-80gb, h100-sxm or cpu (default: "
        f"{hardware or 'the GPU of this machine, else cpu'})",
    )  # fmt: skip
    group.add_argument(
        "--compute-tflops", type=_positive, metavar="X",
        help="measured 16-bit TFLOP/s of the device, instead of its datasheet's",
    )  # fmt: skip
    group.add_argument(
        "--bandwidth-tbs", type=_positive, metavar="Y",
        help="measured memory bandwidth in TB/s, instead of its datasheet's",
    )  # fmt: skip
    group.add_argument(
        "--tp", "--tp-size", "--tensor-parallel-size", type=_count, default=1,
        metavar="N", help="devices that share the model (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--kv-capacity-tokens", type=_count, metavar="N",
        help="tokens of KV that fit (default: what is left beside the weights)",
    )  # fmt: skip
    group.add_argument(
        "--mem-fraction-static", type=_positive_share, default=0.9, metavar="SHARE",
        help="share of the memory for weights and KV (default: 0.9)",
    )  # fmt: skip
    group.add_argument(
        "--chunked-prefill-size", type=_count, default=2048, metavar="N",
        help="most tokens of a step, prompts and answers together (default: 2048)",
    )  # fmt: skip
    group.add_argument(
        "--shared-prefix-attention", action="store_true",
        help="running requests read a prefix that they share once for all of them, as "
        "in an offline server on a GPU that docs/kernels.md names",
    )  # fmt: skip
    group.add_argument(
        "--overlap", type=_exponent, default=overlap, metavar="K",
        help="how compute and memory time overlap in a step: 1 not at all, as in "
        "SGLang today; 1.47 fits BlendServe's results; inf perfectly "
        f"(default: {overlap:g})",
    )  # fmt: skip


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--seed", type=_seed, default=0, help="of everything random")
    group.add_argument(
        "--json", action="store_true", help="print one JSON document instead"
    )
    group.add_argument(
        "--plot", type=Path, metavar="FILE",
        help="also draw the two most telling orders into a .png file",
    )  # fmt: skip


def _count(text: str) -> int:
    return _whole(text, least=1)


def _seed(text: str) -> int:
    return _whole(text, least=0)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a whole number of {least} or more"
        )
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _positive(text: str) -> float:
    value = _number(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 0 to 1")
    return value


def _positive_share(text: str) -> float:
    value = _share(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0")
    return value


def _exponent(text: str) -> float:
    value = _number(text)
    if not value >= 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be 1 (no overlap) or more; inf is perfect overlap"
        )
    return value


def _blend(text: str) -> tuple[float, float]:
    values = [_number(part) for part in text.split(",")]
    if len(values) != 2 or not all(map(math.isfinite, values)):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be two numbers, such as 1.1,0.25"
        )
    return values[0], values[1]


def _groups(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) != 4:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be four numbers, such as 2000,200,16,256"
        )
    return tuple(_count(part) for part in parts)
