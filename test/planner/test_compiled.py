"""Machine code on disk is that of the planner's present sources."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_batch.planner import compiled

CALLER = """
from .compiled import jit_in_place
from .callee import Pair, doubled

@jit_in_place
def total(pair):
    value = 0
    for each in pair:
        value += doubled(each)
    for _ in range(3):
        value += 0 * value + 0 * value + 0 * value + 0 * value + 0 * value
    return value
"""
CALLEE = """
from typing import NamedTuple
from .compiled import jit

class Pair(NamedTuple):
    one: int
    two: int

@jit
def doubled(number):
    return 2 * number
"""


@compiled.jit
def half(number: float) -> float:
    return number / 2


@compiled.jit
def quarter(number: float) -> float:
    return half(half(number))


def test_python_calls_functions_that_compiled_code_has_called() -> None:
    assert quarter(8.0) == 2.0
    assert half(3.0) == 1.5
    assert half(3) == 1.5


def test_modules_whose_constants_are_compiled_are_among_the_sources() -> None:
    known = {compiled.PLANNER / name for name in compiled.PLAIN_MODULES}
    sources = {
        path
        for path in compiled.PLANNER.rglob("*.py")
        if b"compiled import" in path.read_bytes()
    }
    known |= sources
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            folder = path.parents[node.level - 1]
            module = folder.joinpath(*(node.module or "").split(".")).with_suffix(".py")
            if compiled.PLANNER in module.parents and module.exists():
                constants = [each.name for each in node.names if each.name.isupper()]
                assert module in known or not constants, (path, module, constants)


@pytest.mark.slow
def test_code_of_a_changed_callee_or_a_type_that_is_gone_is_not_run(
    tmp_path: Path,
) -> None:
    package = tmp_path / "planner"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(Path(compiled.__file__), package)
    (package / "caller.py").write_text(CALLER)
    # Python's own cache would take a change within the same second for none.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    outputs = []
    for callee, pair in [
        (CALLEE, "Pair"),
        (CALLEE.replace("2 *", "3 *"), "Pair"),
        (CALLEE.replace("class Pair", "class Other") + "\nPair = Other\n", "Other"),
    ]:
        (package / "callee.py").write_text(callee)
        code = f"from planner import caller, callee; print(caller.total(callee.{pair}(1, 2)))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(int(done.stdout))
        # Only the newest code stays.
        assert len(list(package.glob("__pycache__/planner-*"))) == 1
    assert outputs == [6, 9, 6]
