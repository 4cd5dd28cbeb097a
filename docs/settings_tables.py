"""Writes the documentation's tables of settings from the fields in ``config.py``.

Run ``python docs/settings_tables.py`` after a change of a setting.
"""

from __future__ import annotations

import json
from pathlib import Path

from sglang_batch.config import SECTIONS, settings_in

DOCS = Path(__file__).parent
PAGES = {"operating.md": SECTIONS, "experimental.md": ("experimental",)}


def rewritten(page: str) -> str:
    """The text of a page with the rows of its tables made anew."""
    text = (DOCS / page).read_text()
    for section in PAGES[page]:
        head = f"| {section} | default | |\n|---|---|---|\n"
        before, found, after = text.partition(head)
        assert found, f"{page} has no table {head.splitlines()[0]}"
        rest = after.splitlines(keepends=True)
        while rest and rest[0].startswith("|"):
            del rest[0]
        text = before + head + "".join(_rows(section, page)) + "".join(rest)
    return text


def _rows(section: str, page: str) -> list[str]:
    rows = []
    for each in settings_in(section):
        description = each.metadata["description"].replace(f"]({page}#", "](#")
        default = json.dumps(each.default)
        rows.append(f"| `{each.name}` | `{default}` | {description} |\n")
    return rows


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(rewritten(name))
