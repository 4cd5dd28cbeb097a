"""Runs a part of the benchmark in a process of its own, since an engine takes all of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def last_line_of(script: str, *arguments: str) -> Any:
    """What the JSON of the last line that a script prints stands for.

    Raises:
        RuntimeError: it failed. The message has the end of its output.
    """
    done = subprocess.run(
        [sys.executable, script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])
