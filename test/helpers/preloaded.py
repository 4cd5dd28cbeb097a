"""Several short programs that need SGLang, each in a process that has it imported.

:func:`run_each` starts one Python, which imports SGLang for ten seconds of processor
time and loads no plugin; each program runs in a fork of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Done:
    """How a program ended, and all that it printed."""

    returncode: int
    stdout: str
    stderr: str


def run_each(programs: dict[str, str]) -> dict[str, Done]:
    """The end and the output of each program. They run one after the other."""
    with tempfile.TemporaryDirectory() as directory:
        code = "import preloaded; preloaded.main()"
        subprocess.run(
            [sys.executable, "-c", code, directory, json.dumps(programs)], check=True
        )
        return {
            name: Done(
                int((Path(directory) / f"{name}.status").read_text()),
                (Path(directory) / f"{name}.out").read_text(),
                (Path(directory) / f"{name}.err").read_text(),
            )
            for name in programs
        }


def main() -> None:
    import sglang.srt.entrypoints.http_server  # noqa: F401

    directory, programs = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name, program in programs.items():
        if child := os.fork():
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            (directory / f"{name}.status").write_text(str(status))
        else:
            _be(program, directory / name)


def _be(program: str, path: Path) -> None:
    """Run as ``python -c program``. Never returns."""
    for stream, end in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(path.with_suffix(end), os.O_WRONLY | os.O_CREAT), stream)
    status = 1
    try:
        sys.argv = ["-c"]
        exec(program, {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        else:
            status = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
