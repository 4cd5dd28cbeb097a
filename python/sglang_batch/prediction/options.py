"""The options of ``sglang-batch plan`` and ``sglang-batch simulate``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..option_types import count, seed, share
from ..policies import AUTO, ORDERS, POLICIES, POLICY_HELP
from ..run.options.run_options import add_inputs
from .machine_options import DEFAULT_HARDWARE, add_machine
from .machine_search.choice_options import add_choice
from .models import MODELS
from .synthetic_jobs import (
    DEFAULT_NUM_REQUESTS,
    BlendJob,
    GroupsJob,
    IndustryJob,
    LengthsJob,
    TraceJob,
)

_PLAN_EPILOG = """\
Every other option is passed to SGLang unchanged (--served-model-name,
--chat-template, --context-length, ...): see `sglang serve --help`. Weights and KV are
counted in the bits of --quantization and --kv-cache-dtype.

Nothing runs and no weights are loaded. SGLang renders the prompts, and the engine is
simulated. Output lengths that are not known are drawn from a distribution with the
mean --default-output-len, so the predicted seconds are as good as that guess.

--steps prints the steps that a server measured next to the prediction, and --plot then
draws them. Without -i, only the measured steps are printed.

Inputs are those of run: see `sglang-batch run --help`.

exit status:
  0  the plan was printed
  2  the input or an option cannot be used

examples:
  sglang-batch plan -i requests.jsonl --model-path meta-llama/Llama-3.1-8B-Instruct \\
      --hardware h100-sxm --tp 2 --plot plan.png
  sglang-batch plan --steps steps.csv --plot steps.png
  sglang-batch plan -i requests.jsonl --model-path meta-llama/Llama-3.3-70B-Instruct \\
      --choose --hardware 8xh200-sxm --price-per-gpu-hour 3.5
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
  sglang-batch simulate --groups 1000,200,8,500 --model llama-3.1-70b --choose \\
      --fleet 8xh200-sxm=3.5 8xh100-sxm=2.2 --allow-quantization fp8 --deadline 1h
"""

Subparsers = Any


def add_plan(commands: Subparsers, run: Callable[..., int]) -> None:
    """Add ``plan`` to the commands."""
    plan = commands.add_parser(
        "plan",
        usage="sglang-batch plan -i INPUT [INPUT ...] --model-path MODEL [options] "
        "[SGLang's server options]\n       sglang-batch plan --steps FILE [options]",
        help="predict how long a file of requests takes, and which order is fastest",
        description="Predict how long a batch file takes in each order of its "
        "requests, and why.",
        epilog=_PLAN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_inputs(plan, required=False)
    plan.add_argument(
        "--model-path", "--model", metavar="MODEL",
        help="directory, or name on the Hugging Face hub; only the configuration and "
        "the tokenizer are read",
    )  # fmt: skip
    plan.add_argument(
        "--policy", choices=POLICIES, default=AUTO,
        help=f"order to predict (default: {AUTO}). {POLICY_HELP}",
    )  # fmt: skip
    plan.add_argument(
        "--compare", nargs="+", choices=ORDERS, default=(), metavar="POLICY",
        help="further orders to predict",
    )  # fmt: skip
    plan.add_argument(
        "--default-output-len", type=count, metavar="TOKENS",
        help="mean length of answers of unknown length (default: the least of a third "
        "of the mean limit, the mean of the known lengths, and 256)",
    )  # fmt: skip
    plan.add_argument(
        "--steps", type=Path, metavar="FILE",
        help="steps of a run, a .csv file that a server logged",
    )  # fmt: skip
    add_machine(plan, hardware="the GPU of this machine, otherwise cpu")
    add_choice(plan)
    _add_output(plan)
    plan.set_defaults(run=run)


def add_simulate(commands: Subparsers, run: Callable[..., int]) -> None:
    """Add ``simulate`` to the commands."""
    simulate = commands.add_parser(
        "simulate",
        usage="sglang-batch simulate [job] [machine] [options]",
        help="compare orders on synthetic jobs and on traces, without a model",
        description="Simulate a synthetic job, or traces of lengths, in several orders "
        "of its\nrequests. The simulated engine uses the true output lengths; the orders "
        "use\nestimates learnt from a sample.",
        epilog=_SIMULATE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_job(simulate)
    simulate.add_argument(
        "--sample-share", type=share, default=0.01, metavar="SHARE",
        help="share of the requests from whose output lengths the estimates are "
        "learnt, as if they had run first; 0 for none (default: 0.01)",
    )  # fmt: skip
    simulate.add_argument(
        "--policies", nargs="+", choices=ORDERS, default=ORDERS, metavar="POLICY",
        help=f"orders to simulate (default: all: {', '.join(ORDERS)})",
    )  # fmt: skip
    simulate.add_argument(
        "--model", default="llama-3.1-8b", choices=tuple(MODELS),
        help="model (default: llama-3.1-8b)",
    )  # fmt: skip
    simulate.add_argument(
        "--model-path", type=Path, metavar="PATH",
        help="config.json of another model, or its directory",
    )  # fmt: skip
    simulate.add_argument(
        "--quantization", metavar="METHOD",
        help="how SGLang would quantise the weights, such as fp8 (default: as the "
        "model's config.json says)",
    )  # fmt: skip
    simulate.add_argument(
        "--kv-cache-dtype", default="auto", metavar="DTYPE",
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
    simulate.set_defaults(run=run, job=TraceJob(1))


def _add_job(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("job, one of")
    job = group.add_mutually_exclusive_group()
    job.add_argument(
        "--trace", type=TraceJob.parse, dest="job", metavar="{1,2,3,4}",
        help="one of BlendServe's four traces: compute density 1.4, 0.9, 1.4, 0.9 and "
        "prefix sharing ratio 0.35, 0.35, 0.05, 0.05 (default: 1)",
    )  # fmt: skip
    job.add_argument(
        "--blend", type=BlendJob.parse, dest="job", metavar="DENSITY,SHARING",
        help="mix of BurstGPT, OpenVid and MMLU requests with this compute density and "
        "prefix sharing ratio",
    )  # fmt: skip
    job.add_argument(
        "--groups", type=GroupsJob.parse, dest="job",
        metavar="PREFIX,DISTINCT,DEGREE,OUTPUT",
        help="groups of DEGREE requests that share PREFIX prompt tokens; each has "
        "DISTINCT prompt tokens of its own and generates OUTPUT tokens",
    )  # fmt: skip
    job.add_argument(
        "--industry", action="store_const", const=IndustryJob(), dest="job",
        help="queries on documents, like BatchLLM's industry workload",
    )  # fmt: skip
    job.add_argument(
        "--lengths", action=_StoreLengths, type=Path, nargs="+", dest="job",
        metavar="FILE",
        help="traces of lengths, shuffled into one job: csv with ContextTokens and "
        "GeneratedTokens (Azure) or num_prefill_tokens and num_decode_tokens (Vidur), "
        "or JSON lines with input_length, output_length and hash_ids (Mooncake)",
    )  # fmt: skip
    group.add_argument(
        "--num-requests", type=count, metavar="N",
        help=f"number of requests (default: {DEFAULT_NUM_REQUESTS:,}; with --lengths, "
        "all)",
    )  # fmt: skip


class _StoreLengths(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, LengthsJob(values))


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--seed", type=seed, default=0, metavar="N",
        help="seed of everything random (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--json", action="store_true", help="print JSON instead of tables"
    )
    group.add_argument(
        "--plot", type=Path, metavar="FILE",
        help="also draw a .png figure: the time and the cache hits of each order, and "
        "how busy the device is; or the steps of --steps",
    )  # fmt: skip
