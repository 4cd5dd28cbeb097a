"""The command ``sglang-batch``. Heavy imports happen inside each command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__, remote_options, run_options
from .errors import ConfigError, InputError, SGLangBatchError
from .prediction import options as prediction_options

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def command() -> None:
    """The console script.

    Ends the process without Python's exit handlers once an engine ran in it:
    SGLang has ended its helper processes by then, and libraries that clean up
    through those would print tracebacks after the results.
    """
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if "sglang" in sys.modules:
        os._exit(status)
    sys.exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command not in ("run", "plan"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return int(options.run(options, rest))
    except (ConfigError, InputError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except SGLangBatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-batch",
        description="Offline batch inference on SGLang.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    run_options.add_run(commands, _run)
    prediction_options.add_plan(commands, _plan)
    prediction_options.add_simulate(commands, _simulate)
    remote_options.add(commands)

    demo = commands.add_parser(
        "demo-model",
        help="write a small random-weight model to try things with",
        description="Write a random-weight Llama checkpoint with a byte-level "
        "tokenizer and a chat template. Its answers mean nothing.",
    )
    demo.add_argument("directory", type=Path)
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--layers", type=int, default=2)
    demo.add_argument("--hidden-size", type=int, default=64)
    demo.add_argument("--context-length", type=int, default=2048)
    demo.set_defaults(run=_demo_model)
    return parser


def _run(options: argparse.Namespace, rest: list[str]) -> int:
    from .run import RunOptions, run
    from .run_outputs import Outputs

    inputs = run_options.input_options(options)
    outputs = Outputs.of(
        options.output_file, options.error_file, options.output_tmp_dir
    )
    if options.dry_run:
        outputs.check(inputs)
        return _plan(*run_options.plan_instead(_parser(), options, rest))
    return run(
        RunOptions(
            inputs=inputs,
            outputs=outputs,
            overwrite=options.overwrite,
            policy=options.policy,
            max_inflight=options.max_inflight,
            server_argv=rest,
        )
    )


def _plan(options: argparse.Namespace, rest: list[str]) -> int:
    from .prediction.plan_command import plan

    return plan(options, rest)


def _simulate(options: argparse.Namespace, rest: list[str]) -> int:
    from .prediction.simulate_command import simulate

    return simulate(options)


def _demo_model(options: argparse.Namespace, rest: list[str]) -> int:
    from .demo_model import write_demo_model

    try:
        write_demo_model(
            options.directory,
            seed=options.seed,
            num_layers=options.layers,
            hidden_size=options.hidden_size,
            context_len=options.context_length,
        )
    except (FileExistsError, ValueError) as error:
        raise ConfigError(str(error)) from error
    print(f"wrote a demo model to {options.directory}")
    return 0
