"""Another release of SGLang is compared with the supported one, without being imported."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from record_release import write_functions

from sglang_batch import upgrade
from sglang_batch.errors import ConfigError, ServerError, UnsupportedSGLang
from sglang_batch.srt.compat import private_api, sglang_release
from sglang_batch.srt.compat.private_api import (
    PRIVATE,
    PRIVATE_API,
    PrivateFunction,
)
from sglang_batch.srt.compat.sglang_release import (
    Release,
    fetch_release,
    installed_release,
)
from sglang_batch.upgrade import Difference, compare, report

OLD = """
from .base import Base

class Worker(Base):
    def stays(self, x): return x
    def grows(self, x): return x
    async def changes(self, x):
        \"\"\"Doubles x.\"\"\"
        return x * 2  # as ever
    def goes(self): ...
    def moves(self, a, *, key=None, **rest): ...
    @staticmethod
    def fixed(x: int, /, *rest: int) -> int: return x

def helper(a, b=1): return a
"""
NEW = """
class Worker(Base):
    def stays(
        self, x: "int"
    ) -> int:
        '''The docstring is new, and so is the layout.'''
        # And a comment.
        return x

    def grows(self, x, y=0): return x
    async def changes(self, x):
        \"\"\"Doubles x.\"\"\"
        return x * 3  # as ever
    @staticmethod
    def fixed(x, /, *rest): return x
"""
PLACE = "sglang.worker:Worker"


def release(root: Path, version: str, **modules: str) -> Release:
    """A made-up release. Importing it would end the tests."""
    package = root / "sglang"
    package.mkdir(parents=True)
    bomb = "raise SystemExit('imported')\n"
    for name, text in {"__init__": "", **modules}.items():
        (package / f"{name}.py").write_text(bomb + text)
    info = root / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n"
    )
    return Release(root, version)


@pytest.fixture
def old(tmp_path: Path) -> Release:
    return release(tmp_path / "old", "1.0", worker=OLD)


@pytest.fixture
def new(tmp_path: Path) -> Release:
    moved = "class Other:\n    def moves(self, a, *, key=None, **rest): ...\n"
    return release(tmp_path / "new", "2.0", worker=NEW, other=moved)


def api(release: Release, **places: str) -> dict[str, dict[str, PrivateFunction]]:
    """The private API of these names as a release has it."""
    found: dict[str, dict[str, PrivateFunction]] = {}
    for place, names in places.items():
        place = {"worker": PLACE}.get(place, f"sglang.{place}")
        found[place] = {}
        for name in names.split():
            known = release.find(place, name)
            found[place][name] = PrivateFunction(
                f"use of {name}", PRIVATE, known.parameters, known.digest
            )
    return found


def kinds(found: list[Difference]) -> dict[str, str]:
    return {each.path.rpartition(".")[2]: each.kind for each in found}


def test_each_kind_of_difference_is_told(old: Release, new: Release) -> None:
    names = "stays grows changes goes moves fixed"
    found = list(compare(api(old, worker=names), old, new))
    assert kinds(found) == {
        "grows": "new signature",
        "changes": "changed body",
        "goes": "gone",
        "moves": "moved",
    }
    moved = next(each for each in found if each.kind == "moved")
    assert moved.theirs is not None
    assert moved.theirs.path == Path("sglang/other.py")
    assert list(compare(api(old, worker=names), old, old)) == []


def test_both_texts_are_shown(old: Release, new: Release) -> None:
    text = report(
        list(compare(api(old, worker="changes goes"), old, new)), "1.0", "2.0"
    )
    lines = text.splitlines()
    assert lines[:2] == [f"gone: {PLACE}.goes", f"changed body: {PLACE}.changes"]
    assert f"changed body: {PLACE}.changes (use of changes)" in lines
    assert "-        return x * 2  # as ever" in lines
    assert "+        return x * 3  # as ever" in lines
    assert "-    def goes(self): ..." in lines
    begin = OLD.splitlines().index("    async def changes(self, x):") + 2
    assert f"--- 1.0 sglang/worker.py:{begin}" in lines


def test_names_are_found_where_they_are_defined(old: Release) -> None:
    assert old.find("sglang.worker", "helper").line == OLD.count("\n") + 1
    assert old.find("sglang.worker", "Worker").text.startswith("class Worker")
    for place, name in (
        ("sglang.worker", "Base"),
        ("sglang.gone", "helper"),
        ("sglang.worker:Gone", "stays"),
    ):
        with pytest.raises(UnsupportedSGLang, match=f"1.0 has no {place}.{name};"):
            old.find(place, name)


def test_parameters_are_names_and_stars(old: Release) -> None:
    assert old.find(PLACE, "moves").parameters == "a, *, key, **rest"
    assert old.find(PLACE, "fixed").parameters == "x, /, *rest"
    assert old.find("sglang.worker", "helper").parameters == "a, b"
    assert old.find(PLACE, "goes").parameters == ""


def test_a_changed_default_or_decorator_is_a_changed_body(tmp_path: Path) -> None:
    texts = ("def f(a=1): ...", "def f(a=2): ...", "@cached\ndef f(a=1): ...")
    digests = set()
    for i, text in enumerate(texts):
        made = release(tmp_path / str(i), "1", worker=text)
        digests.add(made.find("sglang.worker", "f").digest)
    assert len(digests) == 3


# The command ----------------------------------------------------------------------------


def wheel_of(release: Release, path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        for file in release.root.rglob("*"):
            wheel.write(file, file.relative_to(release.root))
    return path


@pytest.fixture
def supported(old: Release, monkeypatch: pytest.MonkeyPatch) -> Release:
    monkeypatch.setattr(sglang_release, "installed_release", lambda: old)
    monkeypatch.setattr(private_api, "SUPPORTED_VERSION", "1.0")
    monkeypatch.setattr(private_api, "PRIVATE_API", api(old, worker="stays changes"))
    return old


def test_a_wheel_is_compared(
    supported: Release,
    new: Release,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    same = wheel_of(supported, tmp_path / "sglang-1.0-py3-none-any.whl")
    assert upgrade.main(["--against", str(same)]) == 0
    assert capsys.readouterr().out == (
        "2 functions of sglang 1.0, in 1.0: 0 gone, 0 moved, 0 new signature, 0 changed "
        "body\n\n"
    )
    other = wheel_of(new, tmp_path / "sglang-2.0-py3-none-any.whl")
    assert upgrade.main(["--against", str(other)]) == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.endswith("0 new signature, 1 changed body")
    assert second == f"changed body: {PLACE}.changes"


def test_the_other_release_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        upgrade.main([])
    assert "--against" in capsys.readouterr().err


def test_the_list_is_written_for_the_supported_release(
    supported: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_api, "LIST", tmp_path / "private_api.json")
    write_functions(supported)
    record = json.loads((tmp_path / "private_api.json").read_text())
    assert record["files"] == ["sglang/worker.py"]
    entry = record["functions"][PLACE]["stays"]
    known = supported.find(PLACE, "stays")
    assert entry["digest"] == known.digest
    assert entry["parameters"] == "x"
    assert entry["use"] == "use of stays"


def test_a_name_that_the_supported_release_does_not_have_is_an_error(
    old: Release, new: Release
) -> None:
    with pytest.raises(UnsupportedSGLang, match=r"sglang 2.0 has no .*Worker\.goes"):
        list(compare(api(old, worker="goes"), new, old))


@pytest.mark.parametrize("asked", ["main", "1.0.whl", "{file}", "{wheel}"])
def test_neither_a_wheel_nor_a_version(asked: str, tmp_path: Path) -> None:
    file = tmp_path / "9.txt"
    file.write_text("text")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as wheel:
        wheel.writestr("other/__init__.py", "")
    asked = asked.format(file=file, wheel=tmp_path / "other.whl")
    if asked == "1.0.whl":
        asked = str(tmp_path / asked)
    with pytest.raises(ConfigError) as caught:
        fetch_release(asked, tmp_path / "unpacked")
    assert str(caught.value).startswith(f"{asked} is neither a wheel of SGLang nor")


@pytest.mark.parametrize("tool", ["uv", "pip"])
def test_a_version_is_fetched_without_dependencies_and_builds(
    tool: str, new: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if command[-1] == "sglang==2.0":
            folder = Path(command[command.index("--target") + 1])
            folder.parent.mkdir(exist_ok=True)
            new.root.rename(folder)
            return subprocess.CompletedProcess(command, 0, "", "")
        return subprocess.CompletedProcess(command, 1, "", "error: no\n such thing\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("shutil.which", lambda name: name if tool == "uv" else None)
    assert fetch_release("2.0", tmp_path / "fetched").version == "2.0"
    begin = ["uv", "pip"] if tool == "uv" else [sys.executable, "-m", "pip"]
    assert commands[0][: len(begin)] == begin
    assert "--no-deps" in commands[0]
    assert commands[0][commands[0].index("--only-binary") + 1] == ":all:"
    with pytest.raises(
        ServerError, match=r"sglang 9\.9 could not .*no such thing; give"
    ):
        fetch_release("9.9", tmp_path / "other")


def test_errors_are_one_line_and_status_2(
    supported: Release, capsys: pytest.CaptureFixture[str]
) -> None:
    assert upgrade.main(["--against", "main"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("error: main is neither")


# The installed release --------------------------------------------------------------------


@pytest.mark.slow
def test_the_list_is_that_of_the_installed_release() -> None:
    """Bodies, too. If this fails after a change of release, read each function, then run
    ``PYTHONPATH=test/helpers python -m record_release``."""
    installed = installed_release()
    assert installed.version == private_api.SUPPORTED_VERSION
    changed = [
        f"{place}.{name}"
        for place, names in PRIVATE_API.items()
        for name, function in names.items()
        if installed.find(place, name)[2:4] != (function.parameters, function.digest)
    ]
    assert not changed
    assert list(compare(PRIVATE_API, installed, installed)) == []


def test_few_functions_are_private() -> None:
    all_ = [each for names in PRIVATE_API.values() for each in names.values()]
    assert all(each.use for each in all_)
    assert sum(each.kind == PRIVATE for each in all_) <= 120


@pytest.mark.slow
def test_nothing_is_imported() -> None:
    program = (
        "import sys; from sglang_batch.upgrade import compare;"
        "from sglang_batch.srt.compat import private_api as p, sglang_release as r;"
        "i = r.installed_release(); list(compare(p.PRIVATE_API, i, i));"
        "print('sglang' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
