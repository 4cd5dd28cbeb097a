"""The soak of the batch service in its short form: nothing lost, nothing grown."""

from __future__ import annotations

import json

import preloaded
from forked_children import command

# The other rows are what test/srt/contract runs, against a server of its own.
ROWS = "memory,kill,validation,overhead,clients"


def test_the_short_soak_meets_its_targets() -> None:
    done = preloaded.run(command("short_soak", "--short", "--only", ROWS))
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report["figures"]) == set(ROWS.split(","))
    assert report["missed"] == []
    judged = [f for row in report["figures"].values() for f in row if f["target"]]
    assert len(judged) == 9
