"""Who may import whom: the rooms of the package and the direction between them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import sglang_batch

PACKAGE = Path(sglang_batch.__file__).parent
KERNELS = PACKAGE.parents[1] / "sgl_kernel_ext"
PURE_ROOMS = ("planner", "batch_api", "store", "workloads", "scheduling", "inputs")
# What a pure room may import besides itself and what all share.
NEIGHBOURS = {
    "workloads": {"planner"},
    "scheduling": {"planner"},
    "inputs": {"batch_api", "store"},
}
SHARED = {"request", "config", "errors"}
HEAVY = {"torch", "sglang"}
# Beside srt/, these may import sglang's frontend language: it runs in the programs
# of users, far from any engine.
FRONTEND = {"lang.py", "programs.py"}
# Imports torch and its like only when a model is to be written.
LAZY = {"demo_model.py": {"torch", "transformers", "tokenizers"}}


@dataclass(frozen=True)
class Import:
    """One imported module: its full name, and where it is imported."""

    module: str
    inside_function: bool
    typing_only: bool
    line: int

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    @property
    def ours(self) -> str | None:
        """The first part below the package's name, if it is the package's."""
        parts = self.module.split(".")
        return ".".join(parts[1:2]) if parts[0] == "sglang_batch" else None


def imports_of(source: str, package: str) -> Iterator[Import]:
    """Every import of a module that lies in ``package``, relative ones resolved."""

    def visit(node: ast.AST, inside: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, inside, typing_only, child.lineno)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parents = package.split(".")
                    parents = parents[: len(parents) - child.level + 1]
                    base = ".".join([*parents, base] if base else parents)
                for alias in child.names:
                    # Of "from package import x", x may be a module.
                    name = f"{base}.{alias.name}" if base == "sglang_batch" else base
                    yield Import(name, inside, typing_only, child.lineno)
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(
                child.test
            )
            yield from visit(child, inside or is_function, typing_only or is_typing)

    yield from visit(ast.parse(source), False, False)


def module_files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.py"))


def imports_in(path: Path) -> list[Import]:
    package = ".".join(path.relative_to(PACKAGE.parent).parts[:-1])
    return list(imports_of(path.read_text(), package))


def ids(path: Path) -> str:
    return str(path.relative_to(PACKAGE.parent))


PURE_FILES = [path for room in PURE_ROOMS for path in module_files(PACKAGE / room)]
ALL_FILES = module_files(PACKAGE)
KERNEL_FILES = module_files(KERNELS)


def test_imports_are_found_wherever_they_are() -> None:
    source = """
import a.b, sglang.c as d
from . import request
from .sibling import x
from ..store import y
from .. import errors
if TYPE_CHECKING:
    import t
class C:
    try:
        import in_class
    except ImportError:
        pass
    async def f(self):
        if True:
            from torch.nn import z
"""
    found = {
        i.module: (i.inside_function, i.typing_only)
        for i in imports_of(source, "sglang_batch.planner")
    }
    at_top = (False, False)
    assert found == {
        "a.b": at_top,
        "sglang.c": at_top,
        "sglang_batch.planner": at_top,
        "sglang_batch.planner.sibling": at_top,
        "sglang_batch.store": at_top,
        "sglang_batch.errors": at_top,
        "t": (False, True),
        "in_class": at_top,
        "torch.nn": (True, False),
    }


def test_every_room_is_looked_at() -> None:
    assert {path.relative_to(PACKAGE).parts[0] for path in PURE_FILES} == {*PURE_ROOMS}
    assert set(PURE_FILES) < set(ALL_FILES)
    assert KERNEL_FILES


@pytest.mark.parametrize("path", PURE_FILES, ids=ids)
def test_a_pure_room_imports_of_ours_itself_and_what_all_share(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0]
    for found in imports_in(path):
        if found.ours is not None:
            assert found.ours in {room, *SHARED, *NEIGHBOURS.get(room, ())}, found


@pytest.mark.parametrize("path", PURE_FILES, ids=ids)
def test_a_pure_room_imports_no_engine_and_no_web_framework(path: Path) -> None:
    foreign = {found.top for found in imports_in(path)}
    assert not foreign & {*HEAVY, "fastapi", "starlette", "transformers"}


@pytest.mark.parametrize("path", module_files(PACKAGE / "planner"), ids=ids)
def test_the_planner_does_no_input_or_output_and_reads_no_clock(path: Path) -> None:
    foreign = {found.top for found in imports_in(path)}
    assert not foreign & {"os", "io", "pathlib", "time", "datetime", "random", "socket"}
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"open", "print", "input"}


@pytest.mark.parametrize("name", sorted(SHARED))
def test_what_all_share_imports_nothing_of_ours_but_errors(name: str) -> None:
    for found in imports_in(PACKAGE / f"{name}.py"):
        assert found.ours in (None, "errors"), found
        assert found.top not in HEAVY, found


@pytest.mark.parametrize("path", ALL_FILES, ids=ids)
def test_only_srt_imports_sglang_and_torch(path: Path) -> None:
    relative = path.relative_to(PACKAGE)
    if relative.parts[0] == "srt":
        return
    name = str(relative)
    for found in imports_in(path):
        if name in FRONTEND and found.top == "sglang":
            assert not found.module.startswith("sglang.srt"), found
        elif name in LAZY and found.top in LAZY[name]:
            assert found.inside_function or found.typing_only, found
        else:
            assert found.top not in HEAVY, found


@pytest.mark.parametrize("path", ALL_FILES, ids=ids)
def test_srt_is_imported_by_its_own_and_lazily_by_those_on_top(path: Path) -> None:
    if path.relative_to(PACKAGE).parts[0] == "srt":
        return
    for found in imports_in(path):
        if found.ours == "srt":
            assert found.inside_function or found.typing_only, found


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda path: path.name)
def test_kernels_know_nothing_of_us_or_sglang(path: Path) -> None:
    package = ".".join(path.relative_to(KERNELS.parent).parts[:-1])
    for found in imports_of(path.read_text(), package):
        assert found.top not in ("sglang", "sglang_batch"), found


@pytest.mark.parametrize("room", PURE_ROOMS)
def test_importing_a_pure_room_loads_no_engine(room: str) -> None:
    names = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in module_files(PACKAGE / room)
    ]
    program = f"import sys, {', '.join(names)}\nprint(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert f"sglang_batch.{room}" in loaded
    tops = {name.partition(".")[0] for name in loaded}
    assert not tops & {*HEAVY, "fastapi", "transformers"}
