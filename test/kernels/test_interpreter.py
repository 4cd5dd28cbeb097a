"""Runs the tests of the kernels in Triton's interpreter, in a child process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["test_merge_state.py", "test_shared_prefix_kernel.py"]
)
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="is itself interpreted"
)
def test_kernels_in_the_interpreter(name: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(HERE / name)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout
