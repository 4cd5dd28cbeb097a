"""Two thousand calls at the same time, a third of whose clients leave before the answer."""

from __future__ import annotations

import json
from pathlib import Path

import preloaded
from forked_children import command


def test_every_answer_is_that_of_its_own_prompt(demo_model: Path) -> None:
    done = preloaded.run(
        command("gathered_crowd", str(demo_model)),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["different"] > 1500  # so that another's answer would be seen
    assert found["left"]["in flight"] > 300
    assert found["wrong"] == []
    assert found["missing"] == []
    assert set(found["kinds"]) == {"list", "CancelledError"}
    assert (found["states"], found["unsent"], found["jobs"]) == (0, 0, 0)
