"""Records a new release of SGLang, which must be installed, in the lists of the package.

    PYTHONPATH=test/helpers python -m record_release

``sglang_options.json`` gets its options, and ``private_api.json`` the parameters and digests of
the functions in use. Read what has changed in them first.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from typing import Any

from sglang_batch.srt.compat import private_api
from sglang_batch.srt.compat.command_line import _TYPES, OPTIONS
from sglang_batch.srt.compat.sglang_release import Release, installed_release


def _described(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        flags = list(action.option_strings)
        option: dict[str, Any] = {"flags": flags, "dest": action.dest}
        if action.nargs is not None:
            option["nargs"] = action.nargs
        kind = getattr(action.type, "__name__", "")
        if kind in _TYPES:
            option["type"] = kind
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


def write_options() -> None:
    lines = ",\n".join(map(json.dumps, sglangs_options()))
    release = json.dumps(version("sglang"))
    OPTIONS.write_text(f'{{"release": {release}, "options": [\n{lines}\n]}}\n')


def write_functions(release: Release) -> None:
    files: set[str] = set()
    functions: dict[str, dict[str, Any]] = {}
    for place, names in private_api.PRIVATE_API.items():
        for name, function in names.items():
            now = release.find(place, name)
            files.add(now.path.as_posix())
            changed = function._replace(parameters=now.parameters, digest=now.digest)
            functions.setdefault(place, {})[name] = changed._asdict()
    digest = private_api.digest_of(release, files)
    record = {"files": sorted(files), "digest": digest, "functions": functions}
    private_api.LIST.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    write_options()
    write_functions(installed_release())
