"""SGLang's command line, known without importing SGLang, which takes ten seconds.

``sglang_options.json`` lists the options of the supported release. After a change of
release, ``python -m sglang_batch.srt.compat.command_line`` writes it again.
"""

from __future__ import annotations

import argparse
import difflib
import json
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, NoReturn

from ...errors import ConfigError

OPTIONS = Path(__file__).with_name("sglang_options.json")
HELP = "`sglang serve --help` lists SGLang's options"
# Entry points with which other packages add choices to SGLang's options.
_PLUGINS = ("sglang.srt.plugins", "sglang.srt.platforms")
# Packages with such entry points that come with SGLang or are recorded.
_NO_CHOICES = {"sglang-batch", "smg-grpc-servicer"}
_TYPES = {"int": int, "float": float}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {HELP}.")


def check_arguments(argv: list[str]) -> argparse.Namespace:
    """SGLang's arguments, as far as they are known without SGLang.

    Returns:
        The options that are given, by SGLang's names for them. Empty if another release
        is installed, or the options are in a file (``--config``).

    Raises:
        ConfigError: an option is unknown, or its value cannot be used.
    """
    recorded = json.loads(OPTIONS.read_bytes())
    try:
        if version("sglang") != recorded["release"]:
            return argparse.Namespace()
    except PackageNotFoundError:
        raise ConfigError(
            f"sglang is not installed; pip install sglang=={recorded['release']}."
        ) from None
    known, unknown = _parser(recorded["options"]).parse_known_args(argv)
    if unknown:
        flags = [flag for option in recorded["options"] for flag in option["flags"]]
        near = difflib.get_close_matches(
            unknown[0].partition("=")[0], flags, 1, cutoff=0.75
        )
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(
            f"unrecognized arguments: {' '.join(unknown)}{meant}; {HELP}."
        )
    if "config" in known:
        if not Path(known.config).is_file():
            raise ConfigError(f"--config {known.config}: there is no such file.")
        return argparse.Namespace()
    if "model_path" not in known:
        raise ConfigError("--model-path MODEL is required.")
    return known


def describe(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """The options of a parser, as they are written to ``sglang_options.json``."""
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        option: dict[str, Any] = {"flags": list(action.option_strings)}
        option["dest"] = action.dest
        if action.nargs is not None:
            option["nargs"] = action.nargs
        if action.type in _TYPES.values():
            option["type"] = action.type.__name__  # type: ignore[union-attr]
        if action.choices is not None and action.type in (None, str):
            option["choices"] = sorted(map(str, action.choices))
        found.append(option)
    return found


def _parser(options: list[dict[str, Any]]) -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    extended = any(
        found.dist is None or found.dist.name not in _NO_CHOICES
        for group in _PLUGINS
        for found in entry_points(group=group)
    )
    for option in options:
        values: dict[str, Any] = {"dest": option["dest"]}
        if option.get("nargs") == 0:
            values["action"] = "store_true"
        else:
            values["nargs"] = option.get("nargs")
            values["type"] = _TYPES.get(option.get("type", ""), str)
            values["choices"] = None if extended else option.get("choices")
        parser.add_argument(*option["flags"], **values)
    return parser


def _write() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs
    from sglang.version import __version__ as release

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    lines = ",\n".join(map(json.dumps, describe(parser)))
    OPTIONS.write_text(f'{{"release": "{release}", "options": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    _write()
