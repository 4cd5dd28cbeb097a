"""The scripts in examples/ run as they are and end well."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import preloaded
import pytest
from forked_children import script_command
from servers import Server

EXAMPLES = Path(__file__).parents[2] / "examples"
# By script: whether it takes the URL of a server, and a line that it prints.
SCRIPTS = {
    "batch_api.py": (True, "completed=3, failed=0"),
    "message_batches.py": (True, "succeeded=3"),
    "programs.py": (True, "What is a page of KV? "),
    "engine.py": (False, "2 of 3 programs"),
    "other_model.py": (False, "question-2: "),
    "plan_file.py": (False, "order: dfs"),
    "run_file.py": (False, "question-2: "),
    "run_frame.py": (False, "Fire engine"),
    "run_table.py": (False, "c: "),
    "stream.py": (True, "a window: "),
}
# With packages that are not of this environment, or start a cluster:
# ``benchmark/savings_parts/frames.py`` runs these.
ELSEWHERE = {"daft_frame.py", "ray_data.py"}


def test_every_script_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        *SCRIPTS,
        *ELSEWHERE,
        "demo.py",
        # It gives its server new weights, so it runs with one of its own, in test_rollouts.
        "train_rollouts.py",
    }


@pytest.mark.parametrize("script", sorted(ELSEWHERE))
def test_a_missing_package_is_named(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = script.partition("_")[0]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=f"pip install .*{package}"):
        runpy.run_path(str(EXAMPLES / script))


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_ends_well(script: str, offline_server: Server) -> None:
    takes_url, said = SCRIPTS[script]
    arguments = ["--url", offline_server.url] if takes_url else []
    done = preloaded.run(script_command(EXAMPLES / script, *arguments))
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    assert said in output
