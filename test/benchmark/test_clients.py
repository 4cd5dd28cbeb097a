"""The scripts of the clients are in step with their benchmark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bench_clients import CHECKS, CLIENTS, NOTES, SCRIPTS, outcomes_of

SHARED = {"checks.py", "checks.mjs"}
FOUND = sorted(path for path in SCRIPTS.iterdir() if path.suffix in (".py", ".mjs"))
SETTINGS = dict.fromkeys(
    (
        "url",
        "gather_url",
        "embedding_url",
        "model",
        "embedding_model",
        "key",
        "recorder_url",
    ),
    "none",
)
CHUNK = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "demo",
    "choices": [],
    "ours": 1,
}


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.name)
def test_a_script_can_be_read(path: Path) -> None:
    assert path.name in {client.script for client in CLIENTS.values()} | SHARED
    if path.suffix == ".py":
        compile(path.read_text(), path, "exec")
    elif node := shutil.which("node"):
        subprocess.run([node, "--check", path], check=True)


def test_each_check_is_a_column() -> None:
    named = re.findall(
        r'\bcheck\("([^"]+)"', "\n".join(path.read_text() for path in FOUND)
    )
    assert set(named) == set(CHECKS)
    assert {check for check, _, _ in NOTES} <= set(CHECKS)
    assert {client.script for client in CLIENTS.values()} <= {
        path.name for path in FOUND
    }


def test_outcomes(tmp_path: Path) -> None:
    """One passes, one fails, one has an unknown field, and one ends the script."""
    shutil.copy(SCRIPTS / "checks.py", tmp_path)
    script = tmp_path / "script.py"
    script.write_text(f"""
import sys
import checks as c
from openai.types.chat import ChatCompletion

text = {json.dumps(CHUNK)!r}
c.check("chat")(lambda: c.refused(ValueError, lambda: int("x"), "'x'"))
c.check("chat")(lambda: c.strict(ChatCompletion, text))
c.check("stream")(lambda: c.strict(ChatCompletion, text.replace('"created": 1', '"created": "1"')))
c.check("tools")(lambda: c.refused(ValueError, lambda: 1))
c.check("schema")(lambda: c.refused(ValueError, lambda: int("x"), "y"))
c.check("models")(lambda: sys.exit("gone"))
c.report("openai")
""")
    found = outcomes_of([sys.executable, str(script)], SETTINGS, tmp_path)
    assert found.version and found.beyond == {"ChatCompletion.ours"}
    cells = {check: found.cell(check) for check in CHECKS[:7]}
    assert cells.pop("chat") == "yes" and cells.pop("embeddings") == ""
    assert cells.pop("responses") == "" and set(cells.values()) == {"no"}
    assert "created" in found.failed["stream"]
    assert "not refused: 1" in found.failed["tools"]
    assert "does not say 'y'" in found.failed["schema"]
    assert "gone" in found.failed["models"]


def test_a_script_that_does_not_start_fails(tmp_path: Path) -> None:
    found = outcomes_of([sys.executable, "-c", "raise OSError"], {}, tmp_path)
    assert "OSError" in found.failed["start"]
