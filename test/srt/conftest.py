"""Real SGLang: one offline server for all tests that do not hurt it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import preloaded
import pytest
from batches import ADMIN, ANN, BOB, close_clients
from forked_children import command
from prompts import Case, reference
from servers import SERVER_ARGS, Server, server, shared
from stress_runs import scenario

# Importing SGLang warns that there is no accelerator, and its
# dependencies of one another: import it all once, before warnings become errors.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang.srt.entrypoints.engine
    import sglang.srt.entrypoints.http_server  # noqa: F401

NUM_CASES = 60


@pytest.fixture(autouse=True)
def _clients_are_closed() -> Iterator[None]:
    yield
    close_clients()


@pytest.fixture(scope="session")
def cases(demo_model: Path) -> list[Case]:
    """Prompts with the answers that ``transformers`` gives."""
    return reference(demo_model, NUM_CASES)


@shared
def offline_server(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with ``--offline-batch``, shared: leave it alive."""
    directory = tmp_path_factory.mktemp("offline-server")
    with server(
        demo_model,
        "--offline-batch",
        f"--offline-batch-dir={directory / 'batches'}",
        log_dir=directory,
        as_user=True,
    ) as running:
        yield running


@shared
def keyed_server(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with keys of clients and of an admin, which keeps responses and budgets."""
    directory = tmp_path_factory.mktemp("keyed-server")
    keys = directory / "keys"
    keys.write_text(f"ann {ANN}\nbrian {BOB}\n")
    with server(
        demo_model,
        "--offline-batch",
        f"--offline-batch-dir={directory / 'batches'}",
        f"--offline-batch-config={json.dumps({'api_keys': str(keys)})}",
        f"--admin-api-key={ADMIN}",
        "--enable-metrics",
        "--enable-response-store",
        "--reasoning-parser=nemotron_3",  # which excludes no tokens
        "--enable-strict-thinking",
        "--max-running-requests=40",
        log_dir=directory,
    ) as running:
        yield running


@shared
def job_runs(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The output of ``jobs_on_engine``, and the log of the engine's steps."""
    step_log = tmp_path_factory.mktemp("job") / "steps.csv"
    config = json.dumps({"step_log": str(step_log), "gather_s": 0.05})
    done = preloaded.run(
        [
            *command("jobs_on_engine", "--model-path", str(demo_model)),
            *("--offline-batch-config", config, *SERVER_ARGS),
        ],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    result["steps"] = step_log.read_text().splitlines()
    return result


@shared
def stress_run(demo_model: Path) -> dict[str, Any]:
    """The results of each focused scenario, and of jobs at random, in one engine."""
    what = "too_long,aborts,online,kinds,between,unmixed,apart,prompt_logprobs,random"
    return scenario(demo_model, what, 1, 9, "--enable-mixed-chunk")
