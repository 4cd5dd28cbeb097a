"""The page of results is made of the saved documents, and shows all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from results_page import PAGE, RESULTS, page, unused


def test_the_page_is_what_the_script_writes() -> None:
    assert PAGE.read_text() == page()


def test_every_document_is_shown() -> None:
    assert unused() == set()


@pytest.mark.parametrize(
    "path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem
)
def test_a_document_says_where_it_comes_from(path: Path) -> None:
    document = json.loads(path.read_text())
    if path.stem == "notes":
        assert all((path.parent / f"{name}.json").exists() for name in document)
        return
    assert document["command"]
    assert {"commit", "date"} <= document["machine"].keys()
    assert document["machine"].keys() & {"cpu", "device"}
