"""Every call of the batch API, by two versions of the client, and inputs that are bad."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from contract_calls import CHECKS
from servers import Server

HERE = Path(__file__).parent
# SGLang needs a version of its own, so this one is installed beside: see make-env.
NEWEST = Path(sys.prefix) / "newest-openai"
CLIENTS = {"2.8.0": None, "3.54.0": NEWEST}
NUM_BAD_CASES = 800
TIMEOUT_S = 120


def started(
    script: str, *arguments: str, before: Path | None = None
) -> subprocess.Popen[str]:
    """A script of this folder, with a folder in front of the installed packages."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if before is not None:
        environment["PYTHONPATH"] = str(before)
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def report_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The line of JSON with which a script ends."""
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert output, errors
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    return report


@pytest.fixture(scope="module")
def reports(offline_server: Server) -> dict[str, dict[str, Any]]:
    """What each client's checks came to; all clients call at the same time."""
    assert NEWEST.is_dir(), f"{NEWEST} is missing; run `make env`"
    calls = {
        version: started("contract_calls.py", offline_server.url, "demo", before=path)
        for version, path in CLIENTS.items()
    }
    return {version: report_of(process) for version, process in calls.items()}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("version", CLIENTS)
def test_the_contract(
    reports: dict[str, dict[str, Any]], version: str, check: str
) -> None:
    report = reports[version]
    assert report["client"] == version
    failure = report["outcomes"][check]
    assert failure is None, failure


def test_bad_inputs_are_answered_each_and_harm_nobody(offline_server: Server) -> None:
    cases = ("--cases", str(NUM_BAD_CASES))
    report = report_of(started("bad_inputs.py", offline_server.url, *cases))
    assert report["problems"] == []
    assert report["cases"] >= NUM_BAD_CASES // 2
