"""The structure of the product: which module may import which, and that each is used.

Each rule is one test, which lists every violation.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import sglang_batch

PACKAGE = Path(sglang_batch.__file__).parent
ROOT = PACKAGE.parents[1]
KERNELS = ROOT / "sgl_kernel_ext"

# Lowest first. A part imports only from layers below its own, and nothing from its
# neighbours in the same layer.
LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "sglang_batch": (
        ("errors",),
        ("request",),
        ("batch_api",),
        ("config",),
        ("store", "planner"),
        ("scheduling", "inputs", "rollout"),
        ("job",),
        ("fleet", "dense"),
        ("server",),
        ("srt",),
        ("run",),
        ("prediction", "lang", "upgrade"),
        ("__main__",),
    ),
    "sglang_batch.planner": (
        ("compiled", "requests"),
        ("prefixes",),
        ("costs", "output_lengths"),
        ("kv_lengths", "fields"),
        ("ordering", "machine_model"),
        ("sharding", "admission_rules"),
        ("simulator",),
        ("plan",),
        ("choosing",),
    ),
    "sglang_batch.srt": (
        ("compat",),
        ("cpu",),
        ("engine",),
        ("calls",),
        ("attention", "overlap"),
        ("scheduler",),
        ("disaggregation",),
        ("plugin",),
        ("dense",),
    ),
}
# The packages that run without SGLang, torch and a web server, and which other
# packages each may import besides SHARED.
PURE: dict[str, set[str]] = {
    "planner": set(),
    "batch_api": set(),
    "store": set(),
    "prediction.workloads": {"planner"},
    "scheduling": {"planner"},
    "inputs": {"batch_api", "store", "planner"},
    "rollout": {"planner"},
}
SHARED = {"request", "config", "errors"}
HEAVY = {"torch", "sglang"}
WEB = {"fastapi", "starlette"}
# Outside srt/, these alone import sglang: its frontend language, which runs in users'
# programs, far from any engine.
FRONTEND = {"lang.batch_backend", "lang.program_runner"}
# A dataset of Ray Data comes with Ray.
RAY = ("sglang_batch.fleet.ray", "sglang_batch.lang.ray_processor")
# Imports these only when a model is written.
LAZY = {"run.demo_model": {"torch", "transformers", "tokenizers"}}
# Where Python itself, SGLang or a user's command enters: pyproject.toml, and modules that
# users import or name in the settings of a framework.
ENTRIES = {
    "sglang_batch",
    "sglang_batch.__main__",
    "sglang_batch.lang",
    "sglang_batch.rollout.slime_generate",
    "sglang_batch.srt.plugin.hooks",
    "sglang_batch.srt.plugin.platform",
    "sglang_batch.upgrade",
}


@dataclass(frozen=True)
class Import:
    """An import: the full name of the module or of the name in it, and its place."""

    name: str
    inside_function: bool
    typing_only: bool
    line: int

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]

    @property
    def part(self) -> str | None:
        """The package or module directly below ``sglang_batch``, if it is in there."""
        parts = self.name.split(".")
        return parts[1] if parts[0] == "sglang_batch" and parts[1:] else None


def imports_of(source: str, package: str) -> Iterator[Import]:
    """Every import of a module of ``package``, with relative names resolved."""

    def absolute(name: str, level: int) -> str:
        parents = package.split(".")
        kept = parents[: len(parents) - level + 1] if level else []
        return ".".join([*kept, *filter(None, [name])])

    def names(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node.module or "", node.level)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in ast.dump(node.func):
            match node.args:
                case [ast.Constant(value=str(name)), *_]:
                    bare = name.lstrip(".")
                    yield absolute(bare, len(name) - len(bare))

    def visit(node: ast.AST, inside: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            for name in names(child):
                yield Import(name, inside, typing_only, getattr(child, "lineno", 0))
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(
                child.test
            )
            yield from visit(child, inside or is_function, typing_only or is_typing)

    yield from visit(ast.parse(source), False, False)


@dataclass(frozen=True)
class Module:
    """A module of the product; a package's ``__init__`` has the package's name."""

    name: str
    path: Path

    @property
    def part(self) -> str:
        """The package or module directly below ``sglang_batch``."""
        return self.name.split(".")[1] if "." in self.name else ""

    @property
    def pure(self) -> str | None:
        """The entry of PURE that the module belongs to."""
        name = self.name.partition(".")[2] + "."
        return next((part for part in PURE if name.startswith(part + ".")), None)

    def where(self, found: Import) -> str:
        return f"{self.path.relative_to(ROOT)}:{found.line} imports {found.name}"


def modules_in(directory: Path) -> list[Module]:
    found = []
    for path in sorted(directory.rglob("*.py")):
        parts = path.relative_to(directory.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, path))
    return found


@cache
def imports_in(module: Module) -> list[Import]:
    is_package = module.path.name == "__init__.py"
    package = module.name if is_package else module.name.rpartition(".")[0]
    return list(imports_of(module.path.read_text(), package))


OURS = modules_in(PACKAGE)
KERNEL_MODULES = modules_in(KERNELS)
PRODUCT = [*OURS, *KERNEL_MODULES]
PURE_MODULES = [module for module in OURS if module.pure is not None]


@cache
def imported_modules(module: Module) -> dict[str, Import]:
    """The product's modules that a module imports, by name."""
    names = {each.name for each in PRODUCT}
    found = {}
    for each in imports_in(module):
        # Of "from package import x", x may be a module.
        candidates = (each.name, each.name.rpartition(".")[0])
        name = next((name for name in candidates if name in names), None)
        if name is not None:
            found[name] = each
    return found


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
        importlib.import_module(".late", __package__)
        importlib.import_module("numpy")
        import_module(variable)
"""
    found = {
        i.name: (i.inside_function, i.typing_only)
        for i in imports_of(source, "sglang_batch.planner")
    }
    at_top, in_function = (False, False), (True, False)
    assert found == {
        "a.b": at_top,
        "sglang.c": at_top,
        "sglang_batch.planner.request": at_top,
        "sglang_batch.planner.sibling.x": at_top,
        "sglang_batch.store.y": at_top,
        "sglang_batch.errors": at_top,
        "t": (False, True),
        "in_class": at_top,
        "torch.nn.z": in_function,
        "sglang_batch.planner.late": in_function,
        "numpy": in_function,
    }


def test_every_part_of_the_product_has_a_layer() -> None:
    for package, layers in LAYERS.items():
        listed = Counter(part for layer in layers for part in layer)
        prefix = package + "."
        parts = {
            module.name.removeprefix(prefix).split(".")[0]
            for module in OURS
            if module.name.startswith(prefix)
        }
        assert listed == Counter(parts)
    assert {module.pure for module in PURE_MODULES} == set(PURE)
    assert KERNEL_MODULES


@pytest.mark.slow
def test_no_import_leads_upward() -> None:
    layer_of = {
        f"{package}.{part}": i
        for package, layers in LAYERS.items()
        for i, layer in enumerate(layers)
        for part in layer
    }
    found = []
    for module in OURS:
        for name, each in imported_modules(module).items():
            for package in LAYERS:
                depth = package.count(".") + 2
                ends = [".".join(x.split(".")[:depth]) for x in (module.name, name)]
                inside = all(x.startswith(package + ".") for x in ends)
                # A package's own __init__ has no layer: it may be in a circle only.
                if inside and ends[0] != ends[1]:
                    here, there = (layer_of[end] for end in ends)
                    if there >= here:
                        found.append(module.where(each))
    assert not found, listing(found)


@pytest.mark.slow
def test_no_circle_of_imports() -> None:
    """Imports in functions and for types alone count, too."""
    graph = {module.name: set(imported_modules(module)) for module in PRODUCT}
    assert not (circles := circles_of(graph)), listing(map(" <-> ".join, circles))


def circles_of(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, directly or through others."""
    while leaves := {name for name, ends in graph.items() if not ends}:
        graph = {
            name: ends - leaves for name, ends in graph.items() if name not in leaves
        }
    reach = {name: set(ends) for name, ends in graph.items()}
    for middle in graph:
        for name in graph:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    groups = {frozenset(b for b in reach[a] if a in reach[b]) for a in graph}
    return sorted(sorted(group) for group in groups if group)


def test_circles_are_found() -> None:
    assert circles_of({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circles_of({"a": {"a"}}) == [["a"]]
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": {"d"}}
    assert circles_of(graph) == [["a", "b", "c"], ["d", "e"]]


def test_a_pure_package_imports_itself_its_neighbours_and_what_all_share() -> None:
    found = []
    for module in PURE_MODULES:
        assert module.pure is not None
        allowed = {module.pure, *SHARED, *PURE[module.pure]}
        for each in imports_in(module):
            name = each.name.removeprefix("sglang_batch.")
            if name != each.name and not any(
                f"{name}.".startswith(f"{part}.") for part in allowed
            ):
                found.append(module.where(each))
    assert not found, listing(found)


def test_a_pure_package_imports_no_engine_and_no_web_framework() -> None:
    found = [
        module.where(each)
        for module in PURE_MODULES
        for each in imports_in(module)
        if each.top in {*HEAVY, *WEB, "transformers"}
    ]
    assert not found, listing(found)


def test_the_planner_does_no_input_or_output_and_reads_no_clock() -> None:
    foreign = {"os", "io", "pathlib", "time", "datetime", "random", "socket"}
    found = []
    for module in PURE_MODULES:
        # Machine code is kept on disk.
        if module.pure == "planner" and module.path.name != "compiled.py":
            found += [module.where(x) for x in imports_in(module) if x.top in foreign]
            found += [
                f"{module.path}:{node.lineno} calls {node.func.id}"
                for node in ast.walk(ast.parse(module.path.read_text()))
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in {"open", "print", "input"}
            ]
    assert not found, listing(found)


def test_only_srt_imports_sglang_and_only_srt_and_dense_import_torch() -> None:
    found = []
    for module in OURS:
        name = module.name.removeprefix("sglang_batch.")
        lazy = LAZY.get(name, set())
        for each in imports_in(module):
            late = each.inside_function or each.typing_only
            if name in FRONTEND and each.top == "sglang":
                allowed = not each.name.startswith("sglang.srt")
            else:
                allowed = late if each.top in lazy else each.top not in HEAVY
            if module.part == "dense":
                allowed = each.top != "sglang"
            if module.part != "srt" and not allowed:
                found.append(module.where(each))
    assert not found, listing(found)


def test_ray_is_imported_by_its_fleet_and_for_its_datasets_alone() -> None:
    found = [
        module.where(each)
        for module in OURS
        for each in imports_in(module)
        if each.top == "ray" and not module.name.startswith(RAY)
    ]
    assert not found, listing(found)


def test_srt_is_imported_at_the_top_by_itself_alone() -> None:
    found = [
        module.where(each)
        for module in OURS
        for each in imports_in(module)
        if each.part == "srt"
        and module.part != "srt"
        and not (each.inside_function or each.typing_only)
    ]
    assert not found, listing(found)


def test_kernels_import_neither_sglang_nor_this_package() -> None:
    found = [
        module.where(each)
        for module in KERNEL_MODULES
        for each in imports_in(module)
        if each.top in ("sglang", "sglang_batch")
    ]
    assert not found, listing(found)


@pytest.mark.slow
def test_importing_the_pure_packages_loads_no_engine() -> None:
    names = [module.name for module in PURE_MODULES]
    program = f"import sys, {', '.join(names)}\nprint(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(names) <= set(loaded)
    tops = {name.partition(".")[0] for name in loaded}
    assert not tops & {*HEAVY, "fastapi", "transformers"}


@pytest.mark.slow
def test_tests_that_import_an_engine_are_in_its_lane() -> None:
    """``make test-fast`` runs all but test/srt. A helper is in the lane of its users."""
    tests = Path(__file__).parent
    heavy = {
        path.stem
        for path in tests.rglob("*.py")
        if any(
            each.name.startswith("sglang.srt") and not each.inside_function
            for each in imports_of(path.read_text(), "")
        )
    }
    found = []
    for path in sorted(tests.rglob("test_*.py")):
        if tests / "srt" not in path.parents:
            names = {each.top for each in imports_of(path.read_text(), "")}
            if path.stem in heavy or names & heavy:
                found.append(path.relative_to(tests))
    assert len(heavy) > 5
    assert not found, listing(found)


@pytest.mark.slow
def test_tests_and_benchmarks_import_modules_that_exist() -> None:
    """A helper that only an engine's process imports is checked by nothing else."""
    names = {each.name for each in PRODUCT}
    found = [
        f"{path.relative_to(ROOT)}:{each.line} imports {each.name}"
        for folder in ("test", "benchmark")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for each in imports_of(path.read_text(), "")
        if each.part and not {each.name, each.name.rpartition(".")[0]} & names
    ]
    assert not found, listing(found)


def test_the_makefile_imports_what_exists() -> None:
    """And so does the script that makes the environment: nothing else checks them."""
    names = {each.name: each.path for each in PRODUCT}
    text = (ROOT / "Makefile").read_text() + (ROOT / ".ci" / "make-env").read_text()
    found = re.findall(r"from (sglang_batch[\w.]*) import (\w+)", text)
    assert len(found) >= 4
    for module, name in found:
        assert module in names, module
        assert re.search(rf"^(def|class) {name}\b", names[module].read_text(), re.M)


@pytest.mark.slow
def test_every_module_is_reached_from_an_entry_point() -> None:
    """What only tests and benchmarks use belongs to them. Packages are reached as parents."""
    modules = {module.name: module for module in PRODUCT}
    reached, todo = set[str](), list(ENTRIES)
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += [*imported_modules(modules[name]), *named_modules(modules[name])]
            if "." in name:
                todo.append(name.rpartition(".")[0])
    assert set(modules) >= ENTRIES
    assert not (found := sorted(set(modules) - reached)), listing(found)


def named_modules(module: Module) -> set[str]:
    """Modules named in strings, as hooks, commands and lazy exports are: ``pkg.mod:name``."""
    is_package = module.path.name == "__init__.py"
    package = module.name if is_package else module.name.rpartition(".")[0]
    names = {each.name for each in PRODUCT}
    found = set()
    for node in ast.walk(ast.parse(module.path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value.partition(":")[0]
            full = (text, package + text, f"{package}.{text}", text.rpartition(".")[0])
            found |= {name for name in full if name in names}
    return found


def listing(found: object) -> str:
    lines = [str(each) for each in found]  # type: ignore[attr-defined]
    return "\n".join([f"{len(lines)} found:", *lines])
