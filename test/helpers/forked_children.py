"""Engines whose child processes are forks of a process that has imported SGLang.

An engine starts two processes, and SGLang has Python start them anew: each imports
SGLang for ten seconds of processor time. Scripts run by :func:`command` import it once,
or not at all if :mod:`preloaded` runs them.
Their children come from a fork server, as those of Python's ``forkserver`` method:
forked before any plugin was loaded, and given the pickled target and arguments that a
new process would get. A fork cannot show it all: prometheus_client, for one, is imported
before SGLang sets its directory. So servers with metrics or several tokenizer workers, and
the one that most tests share, start as a user starts them.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any


def command(module: str, *argv: str) -> list[str]:
    """The command that runs the ``main`` of a module of this folder."""
    code = f"import forked_children; forked_children.run({module!r})"
    return [sys.executable, "-c", code, *argv]


def script_command(script: Path, *argv: str) -> list[str]:
    """The command that runs a script, which becomes ``__main__``."""
    code = f"import forked_children; forked_children.run_script({str(script)!r})"
    return [sys.executable, "-c", code, *argv]


def run_script(path: str) -> None:
    start_fork_server()
    sys.path[0] = str(Path(path).parent)  # as Python does
    sys.argv[0] = path
    runpy.run_path(path, run_name="__main__")


def run(name: str) -> None:
    module = importlib.import_module(name)
    start_fork_server()
    module.main()


def start_fork_server() -> None:
    """Fork the server from this process. SGLang's children are then its forks.

    They import the models of ``quick_models`` first, and all others only for another model.
    """
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "quick_models")
    for name in ("scheduler", "detokenizer_manager"):
        importlib.import_module(f"sglang.srt.managers.{name}")
    start_new, set_method = util.spawnv_passfds, multiprocessing.set_start_method

    def fork(path: Any, arguments: Sequence[Any], fds: Sequence[int]) -> int:
        if "forkserver" not in str(arguments[-1]):
            return start_new(path, arguments, fds)
        return os.fork() or _serve(str(arguments[-1]), fds)

    util.spawnv_passfds = fork
    forkserver.ensure_running()
    util.spawnv_passfds = start_new

    def set_start_method(method: str | None, force: bool = False) -> None:
        set_method("forkserver" if method == "spawn" else method, force=force)

    multiprocessing.set_start_method = set_start_method


def _serve(program: str, fds: Sequence[int]) -> int:
    """Be the fork server. Never returns."""
    status = 1
    try:
        # A scheduler that fails sends it to its parent, which must end, also where the tests run
        # in the background of a shell, which ignores it.
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        # As a new process: no other files than those handed over, and no held lock.
        kept = sorted({0, 1, 2, *fds})
        for low, high in zip(kept, [*kept[1:], 1 << 16], strict=True):
            os.closerange(low + 1, high)
        forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]
        tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
        tracker._fd = tracker._pid = None
        exec(program, {"__name__": "__main__"})
        status = 0
    finally:
        os._exit(status)
