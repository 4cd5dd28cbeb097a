"""For all tests: one thread per process, helpers on the path, and the demo model."""

from __future__ import annotations

import ast
import atexit
import gc
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

# A failed check of a helper shows the values, as in a test.
pytest.register_assert_rewrite(
    "attention_cases",
    "batch_service",
    "builders",
    "jsonl_files",
    "keyed_server",
    "route_server",
)

# The same commit passes or fails the same way every time.
settings.register_profile("fixed", derandomize=True, max_examples=examples(100))
settings.load_profile("fixed")

# The demo model's layers are so small that a second OpenMP thread only spins.
# Servers started by tests inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Models of a few layers do not pay for the compiler that some functions of SGLang ask for.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")


# Hundreds of processes import the same modules: compile each once, also where Python is
# told to keep no compiled code.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What engines measure is kept where no other run of the tests, and no user, finds it.
if (
    "SGLANG_BATCH_TEST_DATA" not in os.environ
):  # else xdist's workers have their parent's
    os.environ["SGLANG_BATCH_TEST_DATA"] = tempfile.mkdtemp(
        prefix="sglang-batch-test-data-"
    )
    atexit.register(
        shutil.rmtree, os.environ["SGLANG_BATCH_TEST_DATA"], ignore_errors=True
    )
DATA = Path(os.environ["SGLANG_BATCH_TEST_DATA"]) / os.environ.get(
    "PYTEST_XDIST_WORKER", "alone"
)
os.environ["XDG_DATA_HOME"] = str(DATA)


# Processes of tests import the same helpers, and start as sitecustomize.py says.
HELPERS = str(Path(__file__).parent / "helpers")
_paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
if HELPERS not in _paths:
    os.environ["PYTHONPATH"] = os.pathsep.join([HELPERS, *_paths])

# But this process looks for garbage as often as ever, so that a file or connection that
# a test left open is found in that test, not in some later one.
gc.set_threshold(700, 10, 10)

if sys.version_info < (3, 11, 8) or (3, 12) <= sys.version_info < (3, 12, 1):
    # There, CPython counts the depth of the tree it builds for the whole process: one
    # that another thread parses meanwhile fails both (gh-106905). Threads only switch
    # within a tree where garbage is collected.
    _parse = ast.parse

    @wraps(_parse)
    def _parse_without_a_switch(*args: Any, **kwargs: Any) -> Any:
        collects = gc.isenabled()
        gc.disable()
        try:
            return _parse(*args, **kwargs)
        finally:
            if collects:
                gc.enable()

    ast.parse = _parse_without_a_switch  # type: ignore[assignment]

SRT = Path(__file__).parent / "srt"
_EXIT_STATUS = pytest.StashKey[int]()


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the demo model, written once for all tests."""
    from sglang_batch.run.demo_model import write_demo_model

    path = tmp_path_factory.mktemp("model") / "demo"
    write_demo_model(path)
    return path


@pytest.fixture(autouse=True)
def _warnings_are_logged() -> None:
    """SGLang sets the level of all logs of its process; another test may have run it."""
    logging.getLogger().setLevel(logging.WARNING)


@pytest.fixture(scope="module", autouse=True)
def _nothing_measured() -> None:
    """How long steps took in another file's engines does not change how these run."""
    (DATA / "sglang-batch" / "timed_steps.json").unlink(missing_ok=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start SGLang come first, so that two processes end together."""
    items.sort(key=lambda item: SRT not in item.path.parents)


class ServerScheduling(LoadFileScheduling):
    """Tests of a file run in one process, and so do files that share a server."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return shared_server(self.config.rootpath / path) or path


@cache
def shared_server(path: Path) -> str | None:
    """The first fixture of ``srt/conftest.py`` marked as shared that a file names."""
    names = re.findall(r"@shared\ndef (\w+)", (SRT / "conftest.py").read_text())
    text = path.read_text()
    return next((name for name in names if re.search(rf"\b{name}\b", text)), None)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ServerScheduling:
    return ServerScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    yield
    session.config.stash[_EXIT_STATUS] = int(session.exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave without tearing the interpreter down, once SGLang was imported.

    sentencepiece, which SGLang and some models bring, warns while the interpreter ends; under filters
    that make warnings errors it crashes there, after the summary, and would turn the
    exit status of a green run into that of a crash.
    """
    status = config.stash.get(_EXIT_STATUS, None)
    if status is not None and "sentencepiece" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@pytest.fixture
def accelerator() -> None:
    """Skip where there is no device."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no accelerator")
