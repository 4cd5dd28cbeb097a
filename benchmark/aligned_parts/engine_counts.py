"""Counts of three jobs of prompts that share prefixes, on real SGLang and simulated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang_batch.run.demo_model import write_demo_model

sys.path.append(str(Path(__file__).parents[2] / "test" / "helpers"))

from forked_children import command
from servers import SERVER_ARGS
from step_jobs import JOBS

HELPERS = Path(__file__).parents[2] / "test" / "helpers"
Counts = dict[str, dict[str, dict[str, int]]]
"""By job and policy, and by ``real`` and ``simulated``, the counts of
``steps_on_engine.COUNTS``."""


def counts_of(
    policies: Sequence[str],
    jobs: Sequence[str] = tuple(JOBS),
    row_share: float = 0.0,
    config: Mapping[str, int] | None = None,
    *,
    model: Path | None = None,
    arguments: Sequence[str] = (),
) -> Counts:
    """Run the jobs, with KV for 6,144 tokens.

    Args:
        jobs: of ``step_jobs.MORE_JOBS``.
        row_share: of the law by which the jobs are planned and simulated.
        config: settings of the scheduler.
        model: a checkpoint. None: the demo model.
        arguments: further ones of SGLang.

    Raises:
        SystemExit: the engine has failed.
    """
    args = [each for each in SERVER_ARGS if "max-total" not in each]
    # Steps are counted, which must not depend on how long they take here.
    settings = {"learn_costs": False, **(config or {})}
    cases = [(job, policy) for job in jobs for policy in policies]
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            model = Path(folder)
            write_demo_model(model)
        done = subprocess.run(
            [
                *command("steps_on_engine", json.dumps([cases, row_share])),
                *("--model-path", str(model), *args, "--max-total-tokens=6144"),
                *("--chunked-prefill-size=512", "--max-running-requests=40"),
                *("--enable-mixed-chunk", "--page-size=1"),
                f"--offline-batch-config={json.dumps(settings)}",
                *arguments,
            ],
            cwd=HELPERS,
            # As the weights. SGLang keeps the last inputs of convolutions in bfloat16.
            env=os.environ | {"SGLANG_MAMBA_CONV_DTYPE": "float32"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found: Counts = json.loads(done.stdout.splitlines()[-1])
    return found
