"""Every import is of a package that is declared, by us or by SGLang."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = ("python", "sgl_kernel_ext")
OURS = {"sglang_batch", "sgl_kernel_ext"}
# Packages that nobody has to declare, with the reason.
WITH_ANOTHER = {
    "triton": "PyTorch's builds for accelerators bring it, and only there is it imported",
}


def imports() -> Iterator[tuple[str, Path]]:
    """Top-level names that the product imports from other packages, and where."""
    for path in (file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            for name in names:
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names and top not in OURS:
                    yield top, path.relative_to(ROOT)


def distribution(requirement: str) -> str:
    """The normalized name of a distribution in a requirement."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    ours = [*project["dependencies"]]
    ours += [each for extra in extras if extra != "dev" for each in extras[extra]]
    sglang = [each for each in requires("sglang") or () if "extra ==" not in each]
    return {distribution(each) for each in [*ours, *sglang]}


@pytest.mark.slow
def test_every_import_is_declared() -> None:
    owners, known = packages_distributions(), declared()
    missing = {}
    for name, path in imports():
        of = {distribution(each) for each in owners.get(name, [name])}
        if not of & known and name not in WITH_ANOTHER:
            missing.setdefault(name, str(path))
    assert not missing


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_ANOTHER)
def test_exceptions_are_imported_and_not_declared(name: str) -> None:
    assert name in {top for top, _ in imports()}
    assert name not in declared()
