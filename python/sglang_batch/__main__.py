"""The command ``sglang-batch``. Heavy imports happen inside each command."""

from __future__ import annotations

import sys

try:
    import argparse
    import gc
    import os
    import warnings
    from collections.abc import Sequence
    from functools import partial
    from pathlib import Path
    from typing import Any, NoReturn

    import platformdirs

    from . import __version__
    from .errors import (
        ConfigError,
        ExitStatus,
        InputError,
        SGLangBatchError,
        UnknownOption,
        did_you_mean,
    )
    from .job import traces
    from .prediction import options as prediction_options
    from .run import run_options
    from .run.client import client_options
    from .run.option_types import add_arguments, count, options_text, whole
except KeyboardInterrupt:  # as in main
    print("interrupted", file=sys.stderr)
    raise SystemExit(130) from None

# Commands that pass other options on to SGLang.
TAKE_SGLANG_OPTIONS = ("run", "plan", "serve", "calibrate")
# SGLang says these on every CPU, at the import of kernels that the model may not even use,
# and FastAPI of a class that SGLang makes answers with.
_NOT_OURS = (
    r"Only CUDA.* support (AWQ|GGUF)|Triton is not supported on current platf|"
    r"ORJSONResponse is deprecated"
)


def command() -> None:
    """The console script.

    If an engine ran in this process, it ends without Python's exit handlers: SGLang has
    ended its helper processes by then, and libraries that clean up with their help
    would print tracebacks after the results.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # it was closed
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    # Threads of torch that wait for one another sleep; torch reads it at its import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # SGLang's imports make a million objects that stay. Looking for garbage among them
    # takes a sixth of their time.
    gc.set_threshold(50_000, 20, 100)
    if not sys.warnoptions:  # set by python -W and PYTHONWARNINGS
        warnings.filterwarnings("ignore", _NOT_OURS, UserWarning)
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if "sglang" in sys.modules:
        os._exit(status)
    sys.exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options, rest = _parser().parse_known_args(arguments)
        own: _Parser = options.parser
        if rest and options.command not in TAKE_SGLANG_OPTIONS:
            own.error(f"unrecognized arguments: {' '.join(rest)}.")
        if options.command in (*TAKE_SGLANG_OPTIONS, "exec"):
            traces.check_propagators()
        status = int(options.run(options, rest))
        sys.stdout.flush()
        return status
    except (ConfigError, InputError) as error:
        meant = ""
        if isinstance(error, UnknownOption):
            also = options.parser._option_string_actions
            meant = own.meant(error.arguments, [*error.known, *also])
        print(f"error: {error}{meant}", file=sys.stderr)
        return ExitStatus.BAD_INPUT
    except SGLangBatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitStatus.FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return ExitStatus.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has closed it. Python must not flush again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitStatus.FAILED


class _Parser(argparse.ArgumentParser):
    """Its errors name the option or command that an unknown one may be meant to be.

    ``parser`` of the parsed options is the parser of their command.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = list(args)
        found, rest = super().parse_known_args(args, namespace)
        found.parser = getattr(found, "parser", self)
        return found, rest

    def error(self, message: str) -> NoReturn:
        of_value = message.startswith("argument -")
        others: list[str] = []
        if self.prog.rpartition(" ")[2] in TAKE_SGLANG_OPTIONS:
            from .srt.compat.command_line import sglang_flags

            others = sglang_flags()
        if not of_value and (meant := self.meant(self._given, others)):
            message = f"{message.removesuffix('.')}.{meant}"
        super().error(message)

    def meant(self, arguments: Sequence[str], others: Sequence[str] = ()) -> str:
        """A sentence that names what the first misspelt argument may be meant to be.

        Args:
            others: options that this parser passes on.
        """
        known = {*self._option_string_actions, *others}
        if self._subparsers is not None:
            known |= {*self._subparsers._group_actions[0].choices}  # type: ignore[misc]
        names = (argument.partition("=")[0] for argument in arguments)
        found = (
            did_you_mean(name, sorted(known))
            for name in names
            if name not in known
            and (name.startswith("--") or self._subparsers is not None)
        )
        return next(filter(None, found), "")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="sglang-batch",
        description="Offline batch inference on SGLang.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    run_options.add_run(commands, _run)
    run_options.add_serve(commands, _serve)
    prediction_options.add_plan(commands, _plan)
    prediction_options.add_simulate(commands, _simulate)
    prediction_options.add_calibrate(commands, _calibrate)
    client_options.add(commands)
    _add_backup(commands)
    module = commands.add_parser(
        "exec",
        help="run one of SGLang's own tools with --offline-batch",
        description="Run a Python module as `python -m` does, with --offline-batch "
        "among SGLang's options.",
    )
    module.add_argument("module", help="such as sglang.benchmark.offline_throughput")
    module.add_argument("arguments", nargs=argparse.REMAINDER, help="of the module")
    module.set_defaults(run=_exec)
    _add_demo_model(commands)
    return parser


def _add_backup(commands: Any) -> None:
    usual = platformdirs.user_data_path("sglang-batch")
    for name, about in {
        "backup": "Write a backup of a server while it runs.",
        "restore": "Make the directory of a server, which goes on with it, from a backup.",
    }.items():
        parser = commands.add_parser(
            name,
            help=about[0].lower() + about[1:-1],
            description=about,
            allow_abbrev=False,
        )
        add_arguments(
            parser,
            options_text("backup"),
            offline_batch_dir={"type": Path, "default": usual},
        )
        parser.set_defaults(run=_backup)


def _add_demo_model(commands: Any) -> None:
    demo = commands.add_parser(
        "demo-model",
        help="write a small model for trying out commands",
        description="Write a Llama checkpoint with random weights, a byte-level "
        "tokenizer and a chat template. Its answers are meaningless; those of --real "
        "are not.",
    )
    add_arguments(
        demo,
        options_text("demo-model"),
        directory={"type": Path},
        seed={"type": whole(0), "default": 0},
        layers={"type": count, "default": 2},
        hidden_size={"type": count, "default": 64},
        context_length={"type": count, "default": 2048},
    )
    demo.set_defaults(run=_demo_model)


def _run(options: argparse.Namespace, rest: list[str]) -> int:
    from .run.prepare import RunOptions
    from .run.run_command import run

    asked = RunOptions.of(options, rest)
    if not options.dry_run:
        return run(asked)
    asked.check_files()
    planned, rest = run_options.plan_options(_parser(), options, [*asked.engine.argv])
    options.parser = planned.parser  # its options, too, may be meant
    return _plan(planned, rest)


def _serve(options: argparse.Namespace, rest: list[str]) -> int:
    from .run.fleet_options import engine_options
    from .run.serve_command import serve

    return serve(engine_options(options, rest))


def _plan(options: argparse.Namespace, rest: list[str]) -> int:
    from .prediction.plan_command import plan

    return plan(options, rest)


def _simulate(options: argparse.Namespace, rest: list[str]) -> int:
    from .prediction.simulate_command import simulate

    return simulate(options)


def _calibrate(options: argparse.Namespace, rest: list[str]) -> int:
    from .prediction.calibration.calibrate_command import calibrate

    return calibrate(rest, rows=options.rows, tokens=options.tokens)


def _exec(options: argparse.Namespace, rest: list[str]) -> int:
    from .srt.plugin.serve_help import exec_module

    return exec_module(options.module, options.arguments)


def _backup(options: argparse.Namespace, rest: list[str]) -> int:
    from .inputs import urls
    from .store.backup import restore_backup, write_backup

    directory, name = options.offline_batch_dir, options.backup
    reads = options.command == "restore"
    os.umask(0o077)  # they are the prompts and answers of clients
    with urls.opened(name, "rb" if reads else "wb") as file:
        title = urls.named(name)
        restore = partial(restore_backup, title=title)
        number = (restore if reads else write_backup)(directory, file)
    place = directory if reads else title
    print(f"{number:,} files are in {place}", file=sys.stderr)
    return ExitStatus.OK


def _demo_model(options: argparse.Namespace, rest: list[str]) -> int:
    from .run.demo_model import write_demo_model, write_real_model

    try:
        if options.real:
            written = write_real_model(options.directory, overwrite=options.overwrite)
        else:
            written = write_demo_model(
                options.directory,
                seed=options.seed,
                num_layers=options.layers,
                hidden_size=options.hidden_size,
                context_len=options.context_length,
                overwrite=options.overwrite,
            )
    except (FileExistsError, ModuleNotFoundError, ValueError) as error:
        raise ConfigError(str(error)) from error
    done = "wrote a demo model to" if written else "the same demo model is already in"
    print(f"{done} {options.directory}")
    return ExitStatus.OK


if __name__ == "__main__":
    command()
