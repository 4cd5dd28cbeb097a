"""The options of the installed SGLang. As a program, this writes them to ``sglang_options.json``,
which a new release needs."""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from typing import Any

from sglang_batch.srt.compat.command_line import OPTIONS


def _described(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        flags = list(action.option_strings)
        option: dict[str, Any] = {"flags": flags, "dest": action.dest}
        if action.nargs is not None:
            option["nargs"] = action.nargs
        if action.type in (int, float):
            option["type"] = action.type.__name__  # type: ignore[union-attr]
        if action.choices is not None and action.type in (None, str):
            option["choices"] = sorted(map(str, action.choices))
        found.append(option)
    return found


def sglangs_options() -> list[dict[str, Any]]:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return _described(parser)


def main() -> None:
    lines = ",\n".join(map(json.dumps, sglangs_options()))
    release = json.dumps(version("sglang"))
    OPTIONS.write_text(f'{{"release": {release}, "options": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
