"""The page of results is made of the saved documents, and shows all of them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmark"


@pytest.fixture(scope="module")
def generator() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("results_page")
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_the_page_is_what_the_script_writes(generator: Any) -> None:
    assert generator.PAGE.read_text() == generator.page()


def test_every_document_is_shown(generator: Any) -> None:
    assert generator.unused() == set()


@pytest.mark.parametrize(
    "path", sorted((BENCHMARKS / "results").glob("*.json")), ids=lambda path: path.stem
)
def test_a_document_says_where_it_comes_from(path: Path) -> None:
    document = json.loads(path.read_text())
    if path.stem == "notes":
        assert all((path.parent / f"{name}.json").exists() for name in document)
        return
    assert document["command"]
    assert {"commit", "date"} <= document["machine"].keys()
    assert document["machine"].keys() & {"cpu", "device"}
