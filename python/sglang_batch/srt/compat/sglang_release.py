"""The source of a release of SGLang, read without importing it: of the installed one, a wheel,
or a version that pip or uv fetches."""

from __future__ import annotations

import ast
import copy
import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeAlias

from ...errors import ConfigError, ServerError, UnsupportedSGLang

Named: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# Parts of syntax trees that change nothing at run time, or differ between Pythons.
_IGNORED = {"annotation", "returns", "type_comment", "kind", "ctx", "type_params"}


class Definition(NamedTuple):
    """A function or a class in a release.

    path, line: its file below the release's root, and its first line.
    parameters: their names and stars, without ``self``.
    digest: of its syntax tree without docstrings, comments, layout and annotations.
    """

    path: Path
    line: int
    parameters: str
    digest: str
    text: str


class Release:
    """SGLang's source below ``root``, the folder with the package ``sglang``."""

    def __init__(self, root: Path, version: str) -> None:
        self.root, self.version = root, version
        self._body = cache(lambda path: ast.parse(path.read_text("utf-8")).body)

    def find(self, place: str, name: str) -> Definition:
        """A name that is defined in a ``module`` or ``module:Class``. Or UnsupportedSGLang."""
        module, _, owner = place.partition(":")
        path = self.root.joinpath(*module.split("."))
        inside = path / "__init__.py"
        path = inside if inside.exists() else path.with_suffix(".py")
        body = self._body(path) if path.exists() else []
        if owner:
            body = [x for cls in _named(body, owner) for x in cls.body]
        if found := _named(body, name):
            return self._definition(path, found[-1])
        raise UnsupportedSGLang(
            f"sglang {self.version} has no {place}.{name}; remove its use, and its entry "
            "in private_api.json."
        )

    def all_of(self, name: str) -> Iterator[Definition]:
        """Every function and class of this name."""
        for path in sorted((self.root / "sglang").rglob("*.py")):
            text = path.read_text("utf-8")
            if re.search(rf"\b(def|class) {name}\b", text):
                for node in _named(ast.walk(ast.parse(text)), name):
                    yield self._definition(path, node)

    def _definition(self, path: Path, node: Named) -> Definition:
        lines = path.read_text("utf-8").splitlines()
        first = min(x.lineno for x in (node, *node.decorator_list))
        return Definition(
            path=path.relative_to(self.root),
            line=first,
            parameters=_parameters(node),
            digest=hashlib.sha256(_shape(node).encode()).hexdigest()[:10],
            text="\n".join(lines[first - 1 : node.end_lineno]),
        )


def _named(nodes: Iterable[ast.AST], name: str) -> list[Named]:
    return [x for x in nodes if isinstance(x, Named) and x.name == name]


def _parameters(node: Named) -> str:
    if isinstance(node, ast.ClassDef):  # a dataclass
        fields = (x.target for x in node.body if isinstance(x, ast.AnnAssign))
        return ", ".join(map(ast.unparse, fields))
    plain = copy.deepcopy(node.args)
    plain.defaults, plain.kw_defaults = [], [None] * len(plain.kwonlyargs)
    for each in ast.walk(plain):
        if isinstance(each, ast.arg):
            each.annotation = None
    return without_self(ast.unparse(plain))


def without_self(parameters: str) -> str:
    """Parameters without the first one of a method."""
    return re.sub(r"^(self|cls)(, |$)", "", parameters)


def _shape(node: object) -> str:
    """A syntax tree as a text that is the same in each release of Python."""
    if isinstance(node, list):
        return f"[{','.join(map(_shape, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, Named) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    shown = (
        f"{name}={_shape(value)}"
        for name, value in fields.items()
        if name not in _IGNORED and value is not None and value != []
    )
    return f"{type(node).__name__}({','.join(shown)})"


def installed_release() -> Release:
    """The installed SGLang, or PackageNotFoundError if there is none."""
    installed = version("sglang")
    spec = find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations is not None
    return Release(Path(spec.submodule_search_locations[0]).parent, installed)


def fetch_release(asked: str, folder: Path) -> Release:
    """A wheel, or a version of the package index, unpacked into an empty folder. ConfigError
    if it is neither, and ServerError if it could not be fetched."""
    if zipfile.is_zipfile(asked):
        with zipfile.ZipFile(asked) as wheel:
            wheel.extractall(folder)
    elif asked[:1].isdigit() and not Path(asked).exists():
        command = [sys.executable, "-m", "pip", "install"]
        if uv := shutil.which("uv"):
            command = [uv, "pip", "install", "--python", sys.executable]
        # Only wheels: building one would run code of the release.
        command += ["--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--target", str(folder), f"sglang=={asked}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = " ".join(done.stderr.split())[-300:]
            raise ServerError(
                f"sglang {asked} could not be fetched: {said}; give a version for this "
                "Python (`pip index versions sglang` lists them), or the path of a wheel."
            )
    found = next(iter(distributions(name="sglang", path=[str(folder)])), None)
    if found is None:
        raise ConfigError(
            f"{asked} is neither a wheel of SGLang nor a version such as 0.5.22; give one."
        )
    return Release(folder, found.version)
