"""Evaluations of inspect_ai through a server's batches: a client that reads strictly.

    python benchmark/check_inspect_ai.py [--environment VENV/bin/python]

It evaluates a task with ``--batch``, by OpenAI's Batch API over chats and over responses and
by Anthropic's message batches, and reads each answer with the types of the newest clients.
A server with the demo model is started. Without ``--environment`` the newest releases of
``inspect_ai``, ``openai`` and ``anthropic`` are installed into a new one. The exit status is
1 if a sample of an evaluation is lost.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from demo_server import launched
from report import Figure, finish, print_figures
from savings_parts.litellm import environment

from sglang_batch.run.demo_model import write_demo_model

PACKAGES = ("inspect_ai", "openai", "anthropic")
MODEL, SAMPLES, TIMEOUT_S = "demo", 12, 300
# Provider of inspect_ai, and the arguments of its model.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "chats": (f"openai/{MODEL}", {"responses_api": False}),
    "responses": (f"openai/{MODEL}", {"responses_api": True}),
    "messages": (f"anthropic/{MODEL}", {}),
}
# Runs in the environment: the task's samples that have an answer, and the first error.
EVALUATION = f"""
import json, sys
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

name, arguments, url, logs = sys.argv[1], json.loads(sys.argv[2]), *sys.argv[3:]
config = GenerateConfig(max_tokens=16, temperature=0, batch={{
    "size": {SAMPLES}, "send_delay": 1, "tick": 0.2, "max_batches": 4}})
model = get_model(name, base_url=url, api_key="none", config=config, **arguments)
samples = [Sample(f"What is {{i}} and {{i}}?", target=str(2 * i)) for i in range({SAMPLES})]
task = Task(samples, solver=generate(), scorer=includes())
(log,) = eval(task, model=model, log_dir=logs, display="none", fail_on_error=False)
done = [s for s in log.samples or [] if s.error is None and s.output.completion]
errors = [s.error.message for s in log.samples or [] if s.error is not None]
print(json.dumps([log.status, len(done), [*errors, str(log.error)][0]]))
"""


def main() -> int:
    options = _parse()
    with tempfile.TemporaryDirectory(prefix="check-inspect-ai-") as scratch:
        place = Path(scratch)
        python = options.environment or environment(place / "venv", PACKAGES)
        write_demo_model(place / "model")
        with launched(place / "model", MODEL, place, "--dtype=float32") as url:
            figures = [_evaluated(python, each, url, place) for each in MODELS]
    print_figures("samples of inspect_ai", figures)
    missed = [figure.name for figure in figures if figure.met is False]
    finish({"figures": [each.as_json for each in figures], "missed": missed})
    return 1 if missed else 0


def _evaluated(python: str, kind: str, url: str, place: Path) -> Figure:
    name, arguments = MODELS[kind]
    base_url = url if kind == "messages" else f"{url}/v1"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [
            *(python, "-P", "-c", EVALUATION, name, json.dumps(arguments)),
            *(base_url, str(place / "logs")),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    status, answered, error = json.loads(done.stdout.splitlines()[-1])
    if answered < SAMPLES:
        print(f"{kind}: {status}, {error}", file=sys.stderr)
    return Figure(
        f"samples with an answer, {kind}", answered, target=("=", SAMPLES), note=status
    )


def _parse() -> argparse.Namespace:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--environment", help="a Python that has the clients")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
