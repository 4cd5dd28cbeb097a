"""Runs ``images_on_engine`` in a process of its own."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import preloaded
from forked_children import command
from servers import SERVER_ARGS

Line = tuple[str | dict[str, Any], str, int]
"""Where the image is or a part of a message, the question, and ``max_tokens``."""


def run_images(
    model: Path, job: Sequence[Line], *args: str, policy: str = "dfs", ahead: int = 0
) -> dict[str, Any]:
    """Run a job by a policy: ``texts``, ``encoded`` images, ``cached`` and ``input``
    tokens, the ``ratio`` of tokens that a perfect cache saves, and the most requests
    ``sent`` at a time.

    Args:
        ahead: most requests with images that are sent at a time, 0 for the default.
    """
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        runs.touch()
        done = preloaded.run(
            [
                *command("images_on_engine"),
                *("--model-path", str(model), *SERVER_ARGS, *args),
            ],
            input=json.dumps({"policy": policy, "lines": list(job), "ahead": ahead}),
            cwd=Path(__file__).parent,
            env=os.environ | {"ENCODER_RUNS_FILE": str(runs)},
        )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
