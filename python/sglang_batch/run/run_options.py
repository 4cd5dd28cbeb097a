"""The options of ``sglang-batch run``, and those that ``plan`` shares with it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..batch_api.protocol import ENDPOINTS
from ..config import POLICY_HELP, add_setting, settings_help
from ..errors import ConfigError
from .backend_options import BACKENDS
from .fleet_options import add_advanced_fleet, add_fleet
from .option_types import add_arguments, add_command, count, enough

if TYPE_CHECKING:
    from ..inputs.job_input import JobInput

# Our settings with an option of their own.
_SETTINGS = (
    *("policy", "max_inflight", "dedupe", "answer_cache", "dollars_per_hour"),
    "stop_rules",
)


def add_run(commands: Any, run: Callable[..., int]) -> None:
    parser = add_command(
        commands,
        "run",
        run,
        usage="sglang-batch run -i INPUT [INPUT ...] -o FILE --model-path MODEL "
        "[options] [SGLang's server options]",
        help="answer files of requests in one process, without a server",
    )
    add_inputs(parser, required=True)
    add_arguments(
        parser,
        """
-o --output-file FILE  file or URL for the results, which are in the order of the input: JSON
                       lines, or a table, see below
--error-file FILE      file or URL for lines answered with an error (default: among the
                       results)
--state URL            URL or shared directory that keeps the state of the job too: the same
                       command resumes it on any machine
--overwrite            discard an earlier run with this output and start again
""",
        output_file={"required": True},
    )
    add_setting(parser, "policy", f"Default: dfs. {POLICY_HELP}")
    add_arguments(
        parser,
        """
--enough SHARE  end when this share of the requests, such as 99%, has an answer: the others
                are given up, and their lines say so
--dry-run       check all requests and predict the run as `sglang-batch plan` does, whose
                options can be added; nothing runs, no weights are loaded
""",
        enough={"type": enough},
    )
    _add_backend(parser)
    add_fleet(parser)
    _add_advanced(parser)


def _add_advanced(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "advanced", "`sglang-batch serve --help` has all settings."
    )
    add_advanced_inputs(group)
    add_setting(group, "max_inflight", metavar="N")
    add_setting(
        group, "stop_rules",
        """Others are {"regex": "..."} and {"repetition": true}, for answers that loop""",
        metavar="JSON",
    )  # fmt: skip
    add_setting(group, "answer_cache", metavar="DIR")
    add_setting(group, "dollars_per_hour", metavar="PRICE")
    add_arguments(
        group,
        """
--output-tmp-dir DIR  directory of the running job if the output is a URL (default: in the
                      user's cache); name the same one to resume
""",
        output_tmp_dir={"type": Path},
    )
    add_advanced_fleet(group)


def add_serve(commands: Any, serve: Callable[..., int]) -> None:
    parser = add_command(
        commands,
        "serve",
        serve,
        usage="sglang-batch serve [--backend NAME] --model-path MODEL [options of SGLang]"
        "\n       sglang-batch serve --workers URL,... [--workers-key KEY] [options]",
        help="start SGLang's server with the batch API",
        epilog="settings for --offline-batch-config, a JSON object such as "
        f"""'{{"batch_share": 0.8}}':\n{settings_help()}""",
    )
    _add_backend(parser)
    add_arguments(
        parser,
        """
--workers URL,...  run the batches on these offline servers, which are started with
                   `sglang-batch serve` and all have the same model; online calls are
                   passed on to them
--workers-key KEY  admin key of the servers of --workers
""",
    )
    parser.set_defaults(ray=None, engines=None, ray_resources=None)


def _add_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", choices=BACKENDS, default=BACKENDS[0],
        help="engine: sglang (default), transformers for models that SGLang cannot run, "
        "such as BLOOM and Falcon, or auto, which prefers SGLang",
    )  # fmt: skip


def given_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Our settings that have an option of their own, those that are given."""
    given = {name: getattr(options, name) for name in _SETTINGS}
    return {name: value for name, value in given.items() if value is not None}


def add_inputs(parser: argparse.ArgumentParser, *, required: bool) -> None:
    add_arguments(
        parser,
        """
-i --input-file INPUT       JSONL batch requests; several inputs are one job, in this order
--template TEXT|JSON|@FILE  the inputs are tables: each row becomes a request with this
                            prompt, or with this body in JSON, in which "{{column}}" stands
                            for a value of the row
--url ENDPOINT              with --template: endpoint of the requests (default:
                            /v1/chat/completions)
--id-column NAME            with --template: column with the custom_id (default: the number
                            of the row, from 0)
--max-requests N            run only the first N requests of the input
--skip-invalid              answer lines that are no valid requests with an error and run
                            the others (default: refuse the input with a list of these
                            lines)
""",
        input_file={"nargs": "+", "action": "extend", "required": required},
        url={"choices": tuple(ENDPOINTS), "default": "/v1/chat/completions"},
        max_requests={"type": count},
    )


def add_advanced_inputs(group: argparse._ActionsContainer) -> None:
    """Add the options that change how the input is read and computed."""
    add_arguments(
        group,
        """
--optimize-fields  with a block in --template: choose the order of its lines for each row,
                   so that prompts have more of their beginnings in common
""",
    )
    add_setting(
        group, "dedupe",
        "Equal are greedy ones, and those for embeddings and scores. Default: auto",
    )  # fmt: skip


def job_input(options: argparse.Namespace) -> JobInput:
    """The input that these options name.

    Raises ConfigError if the template cannot be used.
    """
    from ..inputs.job_input import JobInput, input_sources
    from ..inputs.template import Template

    template = options.template
    return JobInput(
        input_sources(options.input_file),
        template=None if template is None else Template.parse(template, options.url),
        endpoint=options.url,
        id_column=options.id_column,
        max_requests=options.max_requests,
        optimize_fields=options.optimize_fields,
    )


def plan_options(
    parser: argparse.ArgumentParser, options: argparse.Namespace, rest: list[str]
) -> tuple[argparse.Namespace, list[str]]:
    """The options of ``plan`` for ``run --dry-run``, and those left for SGLang.

    Raises ConfigError if no model is given, or an engine that cannot be predicted.
    """
    if options.backend == "transformers":
        raise ConfigError(
            "--dry-run predicts SGLang alone, not --backend transformers."
        )
    policy = [] if options.policy is None else ["--policy", options.policy]
    planned, rest = parser.parse_known_args(["plan", *policy, *rest])
    if planned.model_path is None:
        raise ConfigError("--dry-run needs --model-path MODEL, as the run does.")
    own = ("command", "run", "policy", "dry_run")
    vars(planned).update({k: v for k, v in vars(options).items() if k not in own})
    return planned, rest


def command_line(options: argparse.Namespace) -> list[str]:
    """``sglang-batch run`` with the options of its own that are given, except --policy.

    Args:
        options: of ``run`` or ``plan``.
    """
    commands = argparse.ArgumentParser().add_subparsers()
    add_run(commands, lambda *_: 0)
    words = ["sglang-batch", "run"]
    for action in commands.choices["run"]._actions:
        value = getattr(options, action.dest, action.default)
        if action.dest == "output_file":
            value = value or "answers.jsonl"
        if value == action.default or action.dest in ("help", "policy", "dry_run"):
            continue
        words.append(action.option_strings[0])
        if value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return words
