"""LiteLLM before our server: each of its calls for files and batches, as a library and a proxy.

LiteLLM runs in an environment of its own, made with uv: it needs other releases than SGLang of
packages that both use. What it sends is compared with ``test/http_api/litellm_requests.json``,
which the tests send to the server's routes. With ``RECORD_LITELLM=1`` in the environment, that
file is written.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from demo_server import launched
from report import Figure

from sglang_batch.run.demo_model import write_demo_model

sys.path.append(str(Path(__file__).parents[2] / "test" / "helpers"))
from request_recorder import calls_of, recorded

VERSION = "1.108.7"
# The proxy imports prisma for some errors, database or not.
PACKAGES = (f"litellm[proxy]=={VERSION}", "prisma==0.15.0")
CALLS = Path(__file__).with_name("litellm_calls.py")
RECORDED = Path(__file__).parents[2] / "test" / "http_api" / "litellm_requests.json"
MODEL = "demo"
TIMEOUT_S = 600


def measure(quick: bool) -> list[Figure]:
    """All calls, whatever ``quick`` is."""
    with tempfile.TemporaryDirectory(prefix="bench-litellm-") as scratch:
        place = Path(scratch)
        python = environment(place / "venv")
        write_demo_model(place / "model")
        with (
            launched(place / "model", MODEL, place, "--dtype=float32") as server,
            recorded(server) as recorder,
        ):
            outcomes = outcomes_of(python, recorder.url)
            flows = recorder.document()
    failed = {name: why for name, why in outcomes.items() if why is not None}
    for name, why in failed.items():
        print(f"{name}: {why}", file=sys.stderr)
    if os.environ.get("RECORD_LITELLM"):
        RECORDED.write_text(json.dumps(flows, indent=1, ensure_ascii=False) + "\n")
    unknown = set(requests_of(flows)) - set(
        requests_of(json.loads(RECORDED.read_text()))
    )
    for request in sorted(unknown):
        print(f"not sent by the tests: {request}", file=sys.stderr)
    return [
        Figure(
            f"checks through LiteLLM {VERSION} that fail", len(failed),
            target=("=", 0), note=f"of {len(outcomes)}",
        ),
        Figure(
            "kinds of requests that the tests do not send", len(unknown),
            target=("=", 0), note=f"of {len(set(requests_of(flows)))}",
        ),
    ]  # fmt: skip


def environment(place: Path, packages: Sequence[str] = PACKAGES) -> str:
    """The Python of a new environment with these packages."""
    uv = shutil.which("uv") or str(Path(sys.executable).parent / "uv")
    python = place / "bin" / "python"
    subprocess.run(
        [uv, "venv", "--quiet", "--python", sys.executable, place], check=True
    )
    install = (uv, "pip", "install", "--quiet", "--python", python)
    subprocess.run([*install, *packages], check=True)
    return str(python)


def outcomes_of(python: str, url: str) -> dict[str, Any]:
    """What each check came to: None, or its error."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        # This folder has a module named litellm, too.
        [python, "-P", str(CALLS), url, MODEL],
        capture_output=True, text=True, timeout=TIMEOUT_S, env=inherited, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def requests_of(flows: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """The requests of all flows."""
    for flow in flows.values():
        yield from (call.request for call in calls_of(flow))
