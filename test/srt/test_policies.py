"""Every policy's plan is the order in which real SGLang gets the requests."""

from __future__ import annotations

from typing import Any

from sglang_batch.config import POLICIES


def test_the_order_sent_is_that_of_the_plan(job_runs: dict[str, Any]) -> None:
    assert job_runs["capacity"] > 1000
    runs = job_runs["policies"]
    assert list(runs) == list(POLICIES)
    for policy, run in runs.items():
        assert run["ok"] == 24, policy
        assert sorted(run["sent"]) == list(range(24)), policy
        if policy == "fcfs":
            assert run["sent"] == list(range(24))
        else:
            # What is taken from both ends is sent from both ends.
            if run["chosen"] != "dual-scan":
                assert run["sent"] == run["plan"], policy
            assert run["chosen"] == policy or policy == "auto"
    orders = {tuple(run["sent"]) for run in runs.values()}
    assert len(orders) >= 6  # on so small a job some agree
