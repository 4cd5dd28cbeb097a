"""Documentation that does not rot: links resolve, named files exist, the front page is short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").glob("*.md"),
        *(ROOT / "deploy").glob("*.md"),
        *(ROOT / "benchmark").rglob("*.md"),
    ]
)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#([\w-]+))?\)")
# Files of the repository in `code`, from its root or from the package's.
NAMED = re.compile(
    r"`([A-Za-z.][\w./-]*/[\w.-]+\.(?:py|md|json|jsonl|txt|yml))(?::\w+)?`"
)
BASES = (
    "",
    "python/sglang_batch",
    "python/sglang_batch/srt",
    "benchmark",
    "benchmark/results",
    "docs",
)


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", prose(page), re.M)
    kept = (re.sub(r"[^\w\- ]", "", head.lower()) for head in heads)
    return {head.replace(" ", "-") for head in kept}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    broken = []
    for target, anchor in LINK.findall(prose(page)):
        if "://" in target:
            continue
        path = (page.parent / target).resolve()
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(f"{target}#{anchor}" if anchor else target)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    missing = [
        name
        for name in NAMED.findall(prose(page))
        if not any((ROOT / base / name).exists() for base in BASES)
    ]
    assert not missing


def test_every_page_is_in_the_reading_order() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages == {name for name, _ in LINK.findall(index) if "/" not in name}


def test_the_picture_of_packages_has_each() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    picture = page.partition("## Packages")[2].partition("## ")[0]
    package = ROOT / "python" / "sglang_batch"
    folders = [file.parent for file in package.glob("*/__init__.py")]
    missing = {each.name for each in folders if f"{each.name}/" not in picture}
    gone = {
        name
        for name in re.findall(r"\b(\w+)/", picture)
        if not any(each.is_dir() for each in package.rglob(name))
    }
    assert not missing
    assert gone <= {"sgl_kernel_ext", "test"}


def test_the_front_page_comes_to_the_point() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 600
    before, found, _ = text.partition("sglang-batch run -i")
    assert found and len(before.split()) <= 90


def test_the_documentation_is_short() -> None:
    pages = (ROOT / "docs").glob("*.md")
    assert sum(len(page.read_text().split()) for page in pages) <= 30_000


def test_the_pages_together_are_short() -> None:
    pages = (ROOT / "docs").glob("*.md")
    assert sum(len(page.read_text().split()) for page in pages) <= 30_000
