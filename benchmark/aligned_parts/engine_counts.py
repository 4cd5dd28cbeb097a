"""Counts of three jobs of prompts that share prefixes, on real SGLang and simulated."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sglang_batch.demo_model import write_demo_model

sys.path.append(str(Path(__file__).parents[2] / "test" / "helpers"))

from forked_children import command
from servers import SERVER_ARGS

HELPERS = Path(__file__).parents[2] / "test" / "helpers"
Counts = dict[str, dict[str, dict[str, int]]]
"""By job and policy, and by ``real`` and ``simulated``, the counts of
``steps_on_engine.COUNTS``."""


def counts_of(policies: Sequence[str], **config: int) -> Counts:
    """Run the jobs, with KV for 6,144 tokens and the demo model.

    Args:
        config: settings of the scheduler.

    Raises:
        SystemExit: the engine has failed.
    """
    args = [each for each in SERVER_ARGS if "max-total" not in each]
    with tempfile.TemporaryDirectory() as folder:
        write_demo_model(Path(folder))
        done = subprocess.run(
            [
                *command("steps_on_engine", json.dumps([*policies])),
                *("--model-path", folder, *args, "--max-total-tokens=6144"),
                *("--chunked-prefill-size=512", "--max-running-requests=40"),
                *("--enable-mixed-chunk", "--page-size=1"),
                f"--offline-batch-config={json.dumps(config)}",
            ],
            cwd=HELPERS,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found: Counts = json.loads(done.stdout.splitlines()[-1])
    return found
