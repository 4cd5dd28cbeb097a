"""The options of ``sglang-batch run``, and those by which an input is named."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .batch_api.protocol import ENDPOINTS
from .config import POLICIES
from .errors import ConfigError

_EPILOG = """\
Every other option is passed to SGLang as it is: see `sglang serve --help`.

inputs:
  FILE                   JSON lines; .gz and .zst are decompressed. With --template
                         also Parquet, Arrow, CSV and TSV, or JSON lines of any keys
  -                      standard input
  s3://, gs://, hf://, http(s)://, ...
                         fetched once, before the job; a resumed job keeps its copy
  hf-dataset:NAME[:CONFIG[:SPLIT]]
                         a Hugging Face dataset, or a directory of `save_to_disk`;
                         needs --template

Outputs may be URLs too: they are uploaded at the end, to http(s) by PUT. Names that
end in .gz or .zst are compressed.

A template is a request's body. "{{column}}" takes the column's value with its JSON
type; in a longer text it becomes text. Missing values and NaN are null, or nothing in
a longer text; dates and decimals are text, and so is all of CSV.

exit status:
  0  every request was answered
  1  the engine or the disk failed; the same command continues the job
  2  the input or an option cannot be used; nothing ran
  3  the job is complete, some requests were answered with an error
  130  interrupted; the same command continues the job

examples:
  sglang-batch run -i requests.jsonl -o answers.jsonl \\
      --model-path meta-llama/Llama-3.1-8B-Instruct --tp 2
  sglang-batch run -i questions.parquet -o answers.jsonl.gz --id-column id \\
      --template '{"messages": [{"role": "user", "content": "{{question}}"}]}' \\
      --model-path meta-llama/Llama-3.1-8B-Instruct
  zcat day-*.jsonl.gz | sglang-batch run -i - -o s3://bucket/answers.jsonl.zst \\
      --model-path meta-llama/Llama-3.1-8B-Instruct
"""


def add_run(commands: Any, run: Callable[..., int]) -> None:
    """Add ``run`` to the commands."""
    parser = commands.add_parser(
        "run",
        usage="sglang-batch run -i INPUT [INPUT ...] -o FILE --model-path MODEL "
        "[options] [SGLang's server options]",
        help="answer files of requests, in process, without a server",
        description="Answer JSONL files of OpenAI batch requests (or of `vllm "
        "run-batch`), or the rows of a table. Started again with the same arguments, "
        "it continues.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_inputs(parser, required=True)
    _add_outputs(parser)
    parser.add_argument(
        "--policy", choices=POLICIES,
        help="order in which requests are sent: dfs keeps those that share a prefix "
        "together (default), fcfs keeps the order of the file, auto simulates all and "
        "takes the fastest; `sglang-batch plan` shows what each would take",
    )  # fmt: skip
    parser.add_argument(
        "--max-inflight", type=int, metavar="N",
        help="requests inside the engine at a time (default: the engine's own)",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true",
        help="check all requests and say what they would take, as `sglang-batch plan` "
        "does, whose options may be added; nothing runs, no weights are loaded",
    )  # fmt: skip
    parser.set_defaults(run=run)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output-file", required=True, metavar="FILE",
        help="where results go, in the order of the input",
    )  # fmt: skip
    parser.add_argument(
        "--error-file", metavar="FILE",
        help="write lines answered with an error here instead of to the output",
    )  # fmt: skip
    parser.add_argument(
        "--output-tmp-dir", type=Path, metavar="DIR",
        help="where the job is kept while it runs if the output is a URL (default: in "
        "the user's cache); name the same to continue",
    )  # fmt: skip
    parser.add_argument(
        "--overwrite", action="store_true",
        help="forget an earlier run with this output and start again",
    )  # fmt: skip


def add_inputs(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the options that name a job's input."""
    parser.add_argument(
        "-i", "--input-file", nargs="+", action="extend", required=required,
        metavar="INPUT",
        help="JSONL batch requests; several are one job, in this order",
    )  # fmt: skip
    parser.add_argument(
        "--template", metavar="JSON|@FILE",
        help="inputs are tables: make each row a request with this body, in which "
        '"{{column}}" stands for a value of the row',
    )  # fmt: skip
    parser.add_argument(
        "--url", choices=tuple(ENDPOINTS), default="/v1/chat/completions",
        metavar="ENDPOINT",
        help="with --template: the endpoint requests are for (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--id-column", metavar="NAME",
        help="with --template: the column that is the custom_id (default: the number "
        "of the row, from 0)",
    )  # fmt: skip
    parser.add_argument(
        "--max-requests", type=_count, metavar="N",
        help="only the first N requests of the input",
    )  # fmt: skip


def input_options(options: argparse.Namespace) -> Any:
    """The :class:`~sglang_batch.inputs.sources.InputOptions` that were parsed.

    Raises:
        ConfigError: the template cannot be used.
    """
    from .inputs.sources import InputOptions
    from .inputs.template import Template

    template = options.template
    return InputOptions(
        names=tuple(options.input_file),
        template=None if template is None else Template.parse(template),
        url=options.url,
        id_column=options.id_column,
        max_requests=options.max_requests,
    )


def plan_instead(
    commands: argparse.ArgumentParser, options: argparse.Namespace, rest: list[str]
) -> tuple[argparse.Namespace, list[str]]:
    """What ``plan`` is to be given for ``run --dry-run``: its options, the rest."""
    policy = [] if options.policy is None else ["--policy", options.policy]
    planned, rest = commands.parse_known_args(["plan", *policy, *rest])
    if planned.model_path is None:
        raise ConfigError("--dry-run needs --model-path MODEL, as the run does.")
    for name in ("input_file", "template", "url", "id_column", "max_requests"):
        setattr(planned, name, getattr(options, name))
    return planned, rest


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a whole number of 1 or more"
        )
    return int(text)
