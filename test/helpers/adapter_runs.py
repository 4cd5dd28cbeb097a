"""Runs ``adapters_on_engine`` in a process of its own."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import preloaded
from adapter_job import Line
from forked_children import command
from servers import SERVER_ARGS

# Names the file in which the engine notes the adapters that it loads.
LOADS = "ADAPTER_LOADS_FILE"
# Names the number of steps after which a request is offloaded, whatever the KV.
OFFLOAD_EVERY = "ADAPTERS_OFFLOAD_EVERY"


def run_adapters(
    model: Path,
    lora_paths: Sequence[str],
    job: Sequence[Line],
    *args: str,
    most: int,
    policies: Sequence[str] = (),
    online: bool = False,
    offload_every: int = 0,
) -> dict[str, Any]:
    """Run a job with each policy, or on stock SGLang if there is none.

    Args:
        most: adapters that fit at a time.
        offload_every: steps after which a request is offloaded, 0 for never.
        online: send online requests meanwhile, and a line with an unknown adapter.
        args: further arguments of the server.

    Returns:
        By policy, or for ``stock``: ``texts``, ``loads``, ``cached``.
    """
    given = {
        "stock": not policies,
        "policies": list(policies),
        "lines": list(job),
        "online": online,
    }
    with tempfile.TemporaryDirectory() as folder:
        done = preloaded.run(
            [
                *command("adapters_on_engine"),
                *("--model-path", str(model), *SERVER_ARGS, *args),
                "--enable-lora",
                *(f"--max-loras-per-batch={most}", "--lora-paths", *lora_paths),
            ],
            input=json.dumps(given),
            cwd=Path(__file__).parent,
            env=os.environ
            | {LOADS: str(Path(folder) / "loads"), OFFLOAD_EVERY: str(offload_every)},
        )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
