"""Ray Data and Daft as readers and writers of a stream, and a model of a stream's own.

Runs ``examples/ray_data.py``, ``examples/daft_frame.py`` and ``examples/stream.py``. Daft is installed
with uv in a folder of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from demo_server import launched
from report import Figure

from sglang_batch.run.demo_model import write_demo_model

DAFT = "daft==0.7.26"
ROOT = Path(__file__).parents[2]
ROWS = 64
TIMEOUT_S = 300


def measure(quick: bool) -> list[Figure]:
    """The examples, whatever ``quick`` is."""
    with tempfile.TemporaryDirectory(prefix="bench-frames-") as scratch:
        place = Path(scratch)
        write_demo_model(place / "model")
        uv = shutil.which("uv") or str(Path(sys.executable).parent / "uv")
        subprocess.run(
            [
                *(uv, "pip", "install", "--quiet", "--no-deps", "--python"),
                *(sys.executable, "--target", str(place / "daft"), DAFT),
            ],
            check=True,
        )
        with launched(place / "model", "demo", place, "--dtype=float32") as url:
            figures = [
                Figure(
                    f"{name}: rows with other answers as one stream and by blocks",
                    ROWS - same(output(script, place / "daft", "--url", url)),
                    target=("=", 0), note=f"of {ROWS}",
                )
                for name, script in (("Ray Data", "ray_data.py"), ("Daft", "daft_frame.py"))
            ]  # fmt: skip
        answered = output("stream.py", place / "daft").count("a ")
    figures.append(
        Figure("a model of its own: rows answered", answered, target=("=", 3))
    )
    return figures


def output(script: str, packages: Path, *arguments: str) -> str:
    """What an example prints."""
    path = os.pathsep.join([str(packages), *sys.path])
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *arguments],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return done.stdout


def same(said: str) -> int:
    found = re.search(rf"(\d+) of {ROWS} answers are the same", said)
    return 0 if found is None else int(found[1])
