"""What each command of the list would do, without a GPU.

The options are read by the command's own parser. Scripts have a ``--dry-run`` of their own,
which checks models and shapes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from command_list import BENCHMARK, HERE, ROOT, Command

MOST_MINUTES = 9
# Tools that start the command which follows them.
WRAPPERS = ("ncu", "compute-sanitizer")


def check(command: Command, save: Path) -> str:
    """What the command would do, in the words of its own dry run.

    Raises:
        ValueError: an option, a test, a model or a shape is not there.
    """
    if not 0 < command.minutes < MOST_MINUTES:
        raise ValueError(
            f"it has {command.minutes} minutes, not less than {MOST_MINUTES}"
        )
    said = io.StringIO()
    for line in command.lines(save, command.minutes):
        words = list(line)
        if words[0] in WRAPPERS:
            words = words[words.index("python") :]
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                _check_line(words)
        except SystemExit as end:
            if end.code:
                last = said.getvalue().strip().splitlines()[-1]
                raise ValueError(last) from None
    return said.getvalue()


def _check_line(words: list[str]) -> None:
    if words[:3] == ["python", "-m", "pytest"]:
        _check_tests(words[3:])
    elif words[:2] == ["sglang-batch", "exec"]:
        if not (HERE / f"{words[2]}.py").exists():
            raise ValueError(f"there is no module {words[2]}")
    elif words[0] == "sglang-batch":
        _check_product(words[1:])
    elif words[0] == "python" and words[1].endswith(".py"):
        status = _module(ROOT / words[1]).main([*words[2:], "--dry-run"])
        if status:
            raise ValueError(f"{words[1]} ends with {status}")
    else:
        raise ValueError(f"unknown command: {shlex.join(words)}")


def _module(path: Path) -> Any:
    """A script, with the modules beside it and above on the path."""
    known = sys.modules.get(path.stem)
    if known is not None and known.__file__ == str(path):
        return known
    for folder in (path.parent, BENCHMARK):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _check_tests(arguments: list[str]) -> None:
    """With pytest's parser, and that each file has a test that ``-k`` selects."""
    from _pytest.config import get_config
    from _pytest.mark.expression import Expression

    options = get_config()._parser.parse_known_args(
        [word for word in arguments if not word.startswith("--timeout")]
    )
    wanted = Expression.compile(options.keyword) if options.keyword else None
    for place in map(Path, options.file_or_dir):
        path = ROOT / place
        files = sorted(path.glob("test_*.py")) if path.is_dir() else [path]
        text = "".join(file.read_text() for file in files)
        if "pytest.mark.gpu" not in text:
            raise ValueError(f"{place} has no test for a GPU")
        # Names of tests, and of the cases of their parameters.
        names = re.findall(r"def (test_\w+)", text) + re.findall(
            r'^    "([\w-]+)":', text, re.M
        )
        chosen = [name for name in names if wanted is None or _selects(wanted, name)]
        if not chosen:
            raise ValueError(f"{place} has no test {options.keyword!r}")
        print(f"{place}: {', '.join(chosen)}")


def _selects(wanted: Any, name: str) -> bool:
    """Whether an expression of ``-k`` takes the test with this name."""
    chosen: bool = wanted.evaluate(lambda word, **_: word in name)
    return chosen


def _check_product(arguments: list[str]) -> None:
    from sglang_batch.__main__ import TAKE_SGLANG_OPTIONS, _parser
    from sglang_batch.srt.compat.command_line import check_arguments

    options, rest = _parser().parse_known_args(arguments)
    if options.command not in TAKE_SGLANG_OPTIONS and rest:
        raise ValueError(f"unrecognized arguments: {' '.join(rest)}")
    if options.command in TAKE_SGLANG_OPTIONS:
        # plan takes the model's option itself.
        check_arguments(["--model-path", "model", *rest])
    print(f"{options.command}, options of SGLang: {' '.join(rest) or 'none'}")


def dry_run(commands: Sequence[Command]) -> dict[str, str]:
    """What each command would do, by name.

    Raises:
        ValueError: a command cannot run. The message names it.
    """
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for command in commands:
            try:
                found[command.name] = check(command, Path(scratch))
            except ValueError as error:
                raise ValueError(f"{command.name}: {error}") from error
    return found
