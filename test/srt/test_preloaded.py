"""A program in a fork of the process that has SGLang imported runs as in a new process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import preloaded
import psutil
from servers import kill_group

REPORT = textwrap.dedent(
    """
    import atexit, gc, json, logging, os, signal, sys
    import setproctitle

    setproctitle.setproctitle("another title")
    found = {
        "argv": sys.argv,
        "title": open("/proc/self/cmdline").read().rstrip("\\0"),
        "folder": os.getcwd(),
        "environment": {k: os.environ.get(k) for k in ("PYTEST_OWN", "PATH", "HOME")},
        "leads a session": os.getsid(0) == os.getpid(),
        "parent": os.getppid(),
        "input": sys.stdin.read(),
        "files": sorted(map(int, os.listdir("/proc/self/fd")))[:4],
        "on SIGINT": str(signal.getsignal(signal.SIGINT)),
        "module": __name__,
    }
    # What the imports opened has no number of these.
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    logging.shutdown()
    gc.unfreeze()
    gc.collect()
    found["open"] = len([os.fstat(number) for number in opened])
    print(json.dumps(found))
    print("an error", file=sys.stderr)
    atexit.register(print, "ended")
    sys.exit(3)
    """
)


def report_of(popen: Any, folder: Path, new_session: bool) -> dict[str, Any]:
    process = popen(
        [sys.executable, "-c", REPORT, "one", "a 'b'"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=folder, env={**os.environ, "PYTEST_OWN": "x = y"},
        start_new_session=new_session,
    )  # fmt: skip
    stdout, stderr = process.communicate("typed", timeout=200)
    assert stderr.endswith("an error\n")
    printed, ended = stdout.splitlines()
    assert ended == "ended"
    return json.loads(printed) | {"status": process.returncode}


def test_a_fork_is_as_a_new_process(tmp_path: Path) -> None:
    for new_session in (False, True):
        new = report_of(subprocess.Popen, tmp_path, new_session)
        fork = report_of(preloaded.Popen, tmp_path, new_session)
        assert fork == new
        assert fork["status"] == 3
        assert fork["parent"] == os.getpid()


def test_sglang_is_there_without_a_plugin() -> None:
    code = """if True:
        import sys
        from sglang.srt.plugins.hook_registry import HookRegistry
        print("sglang.srt.managers.scheduler" in sys.modules, len(HookRegistry._hooks))
    """
    done = preloaded.run([sys.executable, "-c", code])
    assert done.stdout == "True 0\n", done.stderr


def test_a_session_of_forks_is_killed_at_once() -> None:
    code = "import os, time; os.fork(); time.sleep(600)"
    process = preloaded.Popen([sys.executable, "-c", code], start_new_session=True)
    kill_group(process)
    assert process.returncode == -signal.SIGKILL


def test_another_environment_means_a_new_process() -> None:
    code = "import sys; print('sglang' in sys.modules, flush=True); input()"
    process = preloaded.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "SGLANG_USE_HND_KVCACHE": "1"},
    )  # fmt: skip
    stdout, _ = process.communicate("\n", timeout=100)
    assert stdout == "False\n"


def test_a_template_that_was_killed_is_replaced() -> None:
    assert preloaded.run([sys.executable, "-c", "print(1)"]).stdout == "1\n"
    for child in psutil.Process().children():
        if "next_program" in " ".join(child.cmdline()):
            child.kill()
            child.wait(10)
    assert preloaded.run([sys.executable, "-c", "print(2)"]).stdout == "2\n"
