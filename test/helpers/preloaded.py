"""Programs that need SGLang, each in a fork of a process that has imported it.

Importing SGLang takes ten to fifteen seconds of processor time. :class:`Popen` and
:func:`run` take the place of their namesakes in :mod:`subprocess` for commands of the form
``python -c CODE``. The first of a test process starts the *template*, a Python that imports
SGLang and loads no plugin. Each program then runs in a fork of it: with the arguments,
environment, folder, streams and session that a new process would have, in ``__main__``, and
it ends as Python ends. Where an environment could change what imports do, and elsewhere
than on Linux, a new process is started.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# SGLang reads these, and we ours, when an engine starts, not when they are imported.
READ_LATER = (
    "ADAPTER",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUTE_DSL_LOG_",
    "ENCODER_",
    "NCCL_",
    "OFFLOAD",
    "PROMETHEUS_",
    "PYTEST_",
    "PYTHONBREAKPOINT",
    "SGLANG_BATCH_",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS",
    "SGLANG_CPU_OMP_THREADS_BIND",
    "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY",
    "SGLANG_EXTERNAL_MODEL_PACKAGE",
    "SGLANG_HOST_IP",
    "SGLANG_MAMBA_CONV_DTYPE",
    "SGLANG_RUN_ID",
    "TRTLLM_ENABLE_PDL",
    "XDG_",
)
MODULES = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    # Not SGLang's models, which import functions that a plugin replaces.
    "timm",
    # Each scheduler looks for all of torch.compile's rules as it imports these.
    "sglang.srt.dllm.algorithm",
    # Of ours, those that know nothing of SGLang.
    "sglang_batch.job.job",
    "sglang_batch.job.job_planner",
    "sglang_batch.server.http.all_routes",
)
PR_SET_CHILD_SUBREAPER = 36
MESSAGE_BYTES = 1 << 17


class Started(NamedTuple):
    """How :class:`subprocess.Popen` starts a process."""

    cwd: str
    env: dict[str, str]
    new_session: bool
    pipes: list[int]

    @classmethod
    def of(cls, rest: Sequence[Any]) -> Started:
        """From the arguments of ``_execute_child`` in Python 3.11 to 3.14."""
        _, _, _, cwd, env, _, _, _, *pipes = rest[:14]
        env = dict(os.environ if env is None else env)
        return cls(str(cwd or os.getcwd()), env, bool(rest[19]), pipes)

    @property
    def streams(self) -> list[int]:
        """The new process's stdin, stdout and stderr."""
        given = (self.pipes[0], self.pipes[3], self.pipes[5])
        return [own if fd == -1 else fd for own, fd in enumerate(given)]


class Popen(subprocess.Popen[Any]):
    """A program in a fork of the template. Needs ``[sys.executable, "-c", code, ...]``."""

    def _execute_child(self, args: Any, executable: Any, *rest: Any) -> None:  # type: ignore[override]
        started = Started.of(rest)
        is_code = list(args[:2]) == [sys.executable, "-c"]
        template = _template(started.env) if is_code else None
        if template is None:
            super()._execute_child(args, executable, *rest)  # type: ignore[misc]
            return
        wanted = (list(map(str, args[2:])), *started[:3])
        self.pid = template.fork(pickle.dumps(wanted), started.streams)
        self._child_created = True
        self._close_pipe_fds(*started.pipes)  # type: ignore[attr-defined]


def run(
    args: list[str],
    *,
    input: str | None = None,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program as ``subprocess.run(..., capture_output=True, text=True)`` does."""
    pipe = subprocess.PIPE
    options |= {"stdin": None if input is None else pipe, "text": True}
    with Popen(args, stdout=pipe, stderr=pipe, **options) as process:
        try:
            stdout, stderr = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, stdout, stderr)


class _Template:
    def __init__(
        self,
        start: Callable[[socket.socket, socket.socket], subprocess.Popen[Any]],
    ) -> None:
        self.env = dict(os.environ)
        self._lock = threading.Lock()
        # It ends when this process does, which closes the socket.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = start(self._socket, theirs)
        theirs.close()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        self._socket.close()
        self._process.wait()

    def fork(self, wanted: bytes, streams: list[int]) -> int:
        """The id of a new child of this process."""
        if len(wanted) > MESSAGE_BYTES:
            raise ValueError("more arguments than a message has room for")
        with self._lock:
            # The template's child forks once more and ends. Its orphan becomes ours.
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._socket, [wanted], streams)
                answer = self._socket.recv(64)
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0)
        if not answer:
            raise RuntimeError("the process that has SGLang imported has ended")
        return int(answer)


def _new_template(_: socket.socket, connection: socket.socket) -> subprocess.Popen[Any]:
    fd = connection.fileno()
    code = (
        f"import sys; sys.path.insert(1, {str(Path(__file__).parent)!r})\n"
        f"import preloaded; exec(preloaded.next_program({fd}))"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=2, pass_fds=[fd])


_templates: dict[int, _Template] = {}
_is_fork = False


def _template(env: dict[str, str]) -> _Template | None:
    """The template of this process, if its imports were no others with ``env``."""
    if sys.platform != "linux":
        return None
    template = _templates.get(os.getpid())
    if template is None or template.has_ended or not _are_alike(template.env, env):
        # The environment of this process may have changed since the template began.
        if not _are_alike(dict(os.environ), env):
            return None
        if template is not None:
            template.end()
        template = _templates[os.getpid()] = _Template(_new_template)
    return template


class _Fork(subprocess.Popen[Any]):
    """A fork of this process. In it, ``pid`` is 0."""

    def _execute_child(self, *_: Any) -> None:
        self.pid = os.fork()
        self._child_created = bool(self.pid)


def keep_template() -> None:
    """If this program is a fork, its own will be too: of a fork that is made now."""
    if _is_fork:
        _templates[os.getpid()] = _Template(_forked_template)


def _forked_template(
    ours: socket.socket, connection: socket.socket
) -> subprocess.Popen[Any]:
    template = _Fork([""])
    if not template.pid:
        ours.close()
        exec(_next_program(connection, {}, {}), vars(sys.modules["__main__"]))
        raise SystemExit
    return template


def _are_alike(one: dict[str, str], other: dict[str, str]) -> bool:
    """Whether imports are the same in both environments."""
    changed = {name for name, _ in one.items() ^ other.items()}
    return all(name.startswith(READ_LATER) for name in changed)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def next_program(fd: int) -> str:
    """Be the template. Returns in its forks, each with the program that it runs."""
    before = dict(os.environ)
    for name in MODULES:
        importlib.import_module(name)
    by_imports = dict(os.environ.items() - before.items())
    _load_planner()
    _find_references()
    # It finds the place of a process's name as long as the environment is the first one.
    importlib.import_module("setproctitle").getproctitle()
    gc.collect()
    gc.freeze()  # else each fork would copy them as it looks for garbage
    return _next_program(socket.socket(fileno=fd), before, by_imports)


def _next_program(
    connection: socket.socket, before: dict[str, str], by_imports: dict[str, str]
) -> str:
    while True:
        message, streams, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
        if not message:
            os._exit(0)
        read_end, write_end = os.pipe()
        if not (child := os.fork()):
            own = os.getpid()
            if not os.fork():
                while os.getppid() == own:
                    time.sleep(0.001)
                argv, cwd, env, new_session = pickle.loads(message)
                for name in by_imports:
                    if before.get(name) == env.get(name):
                        env[name] = by_imports[name]
                if new_session:
                    os.setsid()
                os.write(write_end, str(os.getpid()).encode())
                connection.close()
                _become(streams, cwd, env)
                for each in (read_end, write_end, *streams):
                    os.close(each)
                sys.argv = ["-c", *argv[1:]]
                global _is_fork
                _is_fork = True
                return str(argv[0])
            os._exit(0)
        os.waitpid(child, 0)
        connection.send(os.read(read_end, 64))
        for each in (read_end, write_end, *streams):
            os.close(each)


def _load_planner() -> None:
    """Load its compiled functions, which takes each process two seconds."""
    from sglang_batch.config import OfflineBatchConfig
    from sglang_batch.job.job_planner import compile_planner

    compile_planner(OfflineBatchConfig(policy="auto"))


def _find_references() -> None:
    """Find once which modules refer to a function or class.

    SGLang looks through all modules for each function that it hooks, a tenth of a second. Forks
    look through those modules alone that they import.
    """
    from sglang.srt.plugins import hook_registry

    known: dict[str, types.ModuleType] = {}
    references: dict[int, set[str]] = {}
    for name, module in sys.modules.items():
        if isinstance(module, types.ModuleType):
            known[name] = module
            for value in vars(module).values():
                if callable(value):
                    references.setdefault(id(value), set()).add(name)

    def propagate(original: object, wrapped: object, source: object) -> int:
        referring = references.get(id(original), set())
        count = 0
        for name, module in list(sys.modules.items()):
            if module is source or not isinstance(module, types.ModuleType):
                continue
            if known.get(name) is module and name not in referring:
                continue
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, wrapped)
                    count += 1
        return count

    hook_registry._propagate_patch = propagate


def _become(streams: list[int], cwd: str, env: dict[str, str]) -> None:
    """Files that the imports opened stay open. Their owners close them when they end, which
    would close whatever else had the number by then."""
    import numpy as np

    # The numbers of the streams passed on are above 2.
    for own, given in enumerate(streams):
        os.dup2(given, own)
    with contextlib.suppress(FileNotFoundError):
        os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    np.random.seed()
