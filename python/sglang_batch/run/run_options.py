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
from .option_types import add_arguments, add_command, count, enough, options_text

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
    add_arguments(parser, options_text("output"), output_file={"required": True})
    add_setting(parser, "policy", f"Default: dfs. {POLICY_HELP}")
    add_arguments(parser, options_text("run"), enough={"type": enough})
    _add_backend(parser)
    add_fleet(parser)
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
    add_arguments(group, options_text("output-advanced"), output_tmp_dir={"type": Path})
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
    add_arguments(parser, options_text("serve"))
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
        options_text("inputs"),
        input_file={"nargs": "+", "action": "extend", "required": required},
        url={"choices": tuple(ENDPOINTS), "default": "/v1/chat/completions"},
        max_requests={"type": count},
    )


def add_advanced_inputs(group: argparse._ActionsContainer) -> None:
    """Add the options that change how the input is read and computed."""
    add_arguments(group, options_text("inputs-advanced"))
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
    own = ("command", "run", "policy", "dry_run", "parser")
    vars(planned).update({k: v for k, v in vars(options).items() if k not in own})
    if options.dollars_per_hour is not None and planned.price_per_gpu_hour is None:
        planned.price_per_gpu_hour = options.dollars_per_hour / planned.tp
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
