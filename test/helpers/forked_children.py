"""Engines whose child processes are forks of a process that has imported SGLang.

An engine starts two processes, and SGLang has Python start them anew: each imports
SGLang for ten seconds of processor time. Scripts run by :func:`command` import it once,
or not at all if :mod:`preloaded` runs them.
Their children come from a fork server, as those of Python's ``forkserver`` method:
forked before any plugin was loaded, and given the pickled target and arguments that a
new process would get, and its environment. So do ``python -m sglang_batch`` and scripts,
started by a script. A fork cannot show it all, so the server that most tests share starts as
a user starts it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing import (
    forkserver,
    popen_forkserver,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from pathlib import Path
from typing import Any

import preloaded
import psutil


def command(module: str, *argv: str) -> list[str]:
    """The command that runs the ``main`` of a module of this folder."""
    code = f"import forked_children; forked_children.run({module!r})"
    return [sys.executable, "-c", code, *argv]


def script_command(script: Path, *argv: str) -> list[str]:
    """The command that runs a script, which becomes ``__main__``."""
    code = f"import forked_children; forked_children.run_script({str(script)!r})"
    return [sys.executable, "-c", code, *argv]


def run_script(path: str) -> None:
    preloaded.keep_template()
    start_fork_server()
    subprocess.Popen = Popen  # type: ignore[misc]
    _run([path, *sys.argv[1:]])


def run(name: str) -> None:
    module = importlib.import_module(name)
    start_fork_server(getattr(module, "MORE_FORK_SERVERS", 0))
    module.main()


def _run(argv: list[str]) -> None:
    """Be ``python ARGV``: the package or a script becomes ``__main__``."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module("sglang_batch", run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path[0] = str(Path(argv[0]).parent)  # as Python does
        runpy.run_path(argv[0], run_name="__main__")


class Popen(subprocess.Popen[Any]):
    """A script, or ``python -m sglang_batch``, in a child of the fork server."""

    _forked: popen_forkserver.Popen | None = None

    def _execute_child(self, args: Any, executable: Any, *rest: Any) -> None:  # type: ignore[override]
        python, *argv = [args] if isinstance(args, str) else map(str, args)
        ours = argv[:2] == ["-m", "sglang_batch"] and "serve" not in argv
        script = bool(argv) and argv[0].endswith(".py")
        if python != sys.executable or not (ours or script):
            super()._execute_child(args, executable, *rest)  # type: ignore[misc]
            return
        started = preloaded.Started.of(rest)
        command = _Command(argv, started)
        describe = spawn.get_preparation_data
        spawn.get_preparation_data = lambda name: {"environment": started.env}
        try:
            self._forked = popen_forkserver.Popen(command)  # type: ignore[arg-type]
        finally:
            spawn.get_preparation_data = describe
        self.pid = self._forked.pid
        self._child_created = True
        self._close_pipe_fds(*started.pipes)  # type: ignore[attr-defined]

    def _internal_poll(self, *args: Any, **kwargs: Any) -> int | None:
        if self._forked is None:
            return super()._internal_poll(*args, **kwargs)  # type: ignore[misc,no-any-return]
        self.returncode = self._forked.poll()
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._forked is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]
        code = self._forked.poll(wait_flags)
        if code is None:
            return 0, 0
        return self.pid, code << 8 if code >= 0 else -code


class _Command:
    """In place of a :class:`multiprocessing.Process`: the arguments of Python."""

    _name = "sglang_batch"

    def __init__(self, argv: list[str], started: preloaded.Started) -> None:
        self.argv = argv
        self.started = started
        self.streams = [_Passed(fd) for fd in started.streams]

    def _bootstrap(self, parent_sentinel: int) -> int:
        os.close(parent_sentinel)
        for own, given in enumerate(self.streams):
            os.dup2(given.fd, own)
        sys.stdin = os.fdopen(0, closefd=False)  # a fork server closes its own
        if self.started.new_session:
            os.setsid()
        os.chdir(self.started.cwd)
        start_fork_server()
        try:
            _run(self.argv)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(bool(end.code))
        finally:
            util._flush_std_streams()  # type: ignore[attr-defined]
        return 0


class _Passed:
    """A file descriptor that a child of the fork server gets, too."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        return _passed, (reduction.DupFd(self.fd),)


def _passed(duplicate: Any) -> _Passed:
    return _Passed(duplicate.detach())


class _Spare:
    """A fork of this process that becomes a fork server when the one before was ended."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid:
            theirs.close()
            return
        self._socket.close()
        message, given, _, _ = socket.recv_fds(theirs, 1 << 16, 16)
        if not message:  # this process has ended
            os._exit(0)
        # A child of an engine that starts processes of its own forks them as well.
        util.spawnv_passfds = _fork_or_start
        program, wanted = pickle.loads(message)
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, 1 << 10) for fd in given]
        for fd, number in zip(moved, wanted, strict=True):
            os.dup2(fd, number)
            os.close(fd)
        _serve(program, wanted)

    def serve(self, program: str, fds: Sequence[int]) -> int:
        """Its process id, as of a new fork server."""
        message = pickle.dumps((program, list(fds)))
        socket.send_fds(self._socket, [message], list(fds))
        return self.pid


def start_fork_server(more: int = 0) -> None:
    """Fork the server from this process. SGLang's children are then its forks.

    They import the models of ``quick_models`` first, and all others only for another model.

    more: servers for later engines. The end of an engine ends all children of its process, but
        not those that wait for their turn.
    """
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "quick_models")
    for name in ("scheduler", "detokenizer_manager"):
        importlib.import_module(f"sglang.srt.managers.{name}")
    set_method = multiprocessing.set_start_method
    describe, prepare = spawn.get_preparation_data, spawn.prepare

    def prepare_with_environment(data: dict[str, Any]) -> None:
        os.environ.clear()
        os.environ.update(data["environment"])
        prepare(data)

    spawn.prepare = prepare_with_environment
    spawn.get_preparation_data = lambda name: (
        describe(name) | {"environment": dict(os.environ)}
    )

    spares = [_Spare() for _ in range(more + 1)]
    children = psutil.Process.children

    def fork(path: Any, arguments: Sequence[Any], fds: Sequence[int]) -> int:
        if "forkserver" not in str(arguments[-1]) or not spares:
            return _start_new(path, arguments, fds)
        return spares.pop().serve(str(arguments[-1]), fds)

    def children_at_work(process: Any, recursive: bool = False) -> list[psutil.Process]:
        waiting = {spare.pid for spare in spares}
        found = children(process, recursive)
        return [child for child in found if child.pid not in waiting]

    util.spawnv_passfds = fork
    psutil.Process.children = children_at_work
    forkserver.ensure_running()

    def set_start_method(method: str | None, force: bool = False) -> None:
        set_method("forkserver" if method == "spawn" else method, force=force)

    multiprocessing.set_start_method = set_start_method


_start_new = util.spawnv_passfds


def _fork_or_start(path: Any, arguments: Sequence[Any], fds: Sequence[int]) -> int:
    if "forkserver" not in str(arguments[-1]):
        return _start_new(path, arguments, fds)
    return os.fork() or _serve(str(arguments[-1]), fds)


def _serve(program: str, fds: Sequence[int]) -> int:
    """Be the fork server. Never returns."""
    status = 1
    try:
        # A scheduler that fails sends it to its parent, which must end, also where the tests run
        # in the background of a shell, which ignores it.
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        # As a new process: no other files than those handed over, and no held lock. But the
        # numbers stay in use: objects from before the fork close them when they end.
        empty = os.open(os.devnull, os.O_RDWR)
        for number in {int(name) for name in os.listdir("/proc/self/fd")}:
            if number not in {0, 1, 2, empty, *fds}:
                with contextlib.suppress(OSError):  # it was open for the listing
                    fcntl.fcntl(number, fcntl.F_GETFD)
                    os.dup2(empty, number)
        os.close(empty)
        forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]
        tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
        tracker._fd = tracker._pid = None
        exec(program, {"__name__": "__main__"})
        status = 0
    finally:
        os._exit(status)
