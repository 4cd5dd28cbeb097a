"""A stranger's first hour: mistakes, memory, lines and silence of ``sglang-batch``.

Makes mistakes with each command and times the refusals, then runs the demo with default
options on a terminal, kills its engine, and continues. Prints one table; the last line
is the same as JSON. The exit status is 0 only if every bound is kept.

    python benchmark/first_hour.py [--no-engine]
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from report import finish, print_table

from sglang_batch.run.demo_model import write_demo_model
from sglang_batch.store.files import FileLock

DATA = Path(__file__).parent / "data" / "demo_requests.jsonl"
EARLY_S = 0.5
REPEATS = 5
MAX_LINES = 15
MAX_SILENCE_S = 5.0
MAX_MEMORY_GB = 4.0
POLL_S = 0.2
TRACEBACK = "Traceback (most recent call last)"


@dataclass
class Run:
    """A command that ran.

    lines: printed lines, with what redraws of the same line left.
    silence: longest time without output, in seconds.
    memory: most proportional memory (PSS) of all its processes, in bytes.
    """

    status: int = 0
    seconds: float = 0.0
    output: str = ""
    silence: float = 0.0
    memory: int = 0

    @property
    def lines(self) -> list[str]:
        found = self.output.replace("\r\n", "\n").split("\n")
        return [line.rpartition("\r")[2].strip() for line in found if line.strip()]


@dataclass
class Table:
    """Rows of measured values with their bounds."""

    rows: list[list[object]] = field(default_factory=list)
    met: bool = True

    def add(self, check: str, measured: object, bound: str, *, met: bool) -> None:
        self.rows.append([check, measured, bound, "met" if met else "NOT MET"])
        self.met &= met
        print(".", end="", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Mistake:
    """A command that cannot work.

    said: part of its sentence.
    """

    name: str
    arguments: list[str]
    status: int
    said: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--no-engine", action="store_true", help="only what is refused early"
    )
    options = parser.parse_args()
    table = Table()
    with tempfile.TemporaryDirectory(prefix="sglang-batch-first-hour-") as scratch:
        home = Path(scratch)
        write_demo_model(home / "demo")
        with _occupied(home) as mistakes:
            for mistake in mistakes:
                _check_early(table, home, mistake)
        if not options.no_engine:
            _check_late(table, home)
            _check_run(table, home)
            _check_death(table, home)
            _check_skipped(table, home)
    print(file=sys.stderr)
    print_table("First hour", ["check", "measured", "bound", ""], table.rows)
    finish({"met": table.met})
    return 0 if table.met else 1


# Mistakes ---------------------------------------------------------------------------


@contextmanager
def _occupied(home: Path) -> Iterator[list[Mistake]]:
    """The early mistakes, while a port, an output and a directory are in use."""
    (home / "empty").mkdir()
    (home / "notes.txt").write_text("not a result\n")
    (home / "bad.jsonl").write_text('{"custom_id": "a"}\nnope\n')
    (home / "busy.jsonl.job").mkdir()
    (home / "batches").mkdir()
    locks = [FileLock(home / d / "lock") for d in ("busy.jsonl.job", "batches")]
    for lock in locks:
        assert lock.acquire("another process") is None
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        try:
            yield _mistakes(taken.getsockname()[1])
        finally:
            for lock in locks:
                lock.release()


def _mistakes(port: int) -> list[Mistake]:
    def run(*more: str, i: str = str(DATA), o: str = "o", m: str = "demo") -> list[str]:
        served = ["--served-model-name", "demo"]
        return ["run", "-i", i, "-o", o, "--model-path", m, *served, *more]

    def serve(*more: str, m: str = "demo") -> list[str]:
        return ["serve", "--model-path", m, *more]

    return [
        Mistake("input is missing", run(i="none.jsonl"), 2, "does not exist"),
        Mistake("input is a directory", run(i="empty"), 2, "directory"),
        Mistake("input has bad lines", run(i="bad.jsonl"), 2, "line 2"),
        Mistake("output's directory is missing", run(o="no/o"), 2, "does not exist"),
        Mistake("output is another file", run(o="notes.txt"), 2, "not written by"),
        Mistake("output is the input", run(o=str(DATA)), 2, "both input and output"),
        Mistake("output is being written", run(o="busy.jsonl"), 1, "in use by"),
        Mistake("model is missing", run(m="./none"), 2, "no such directory"),
        Mistake("model has no such name", run(m="a/b/c"), 2, "no such directory"),
        Mistake("model is not cached", run(m="none/none"), 2, "neither a directory"),
        Mistake("model has no config", run(m="empty"), 2, "no config.json"),
        Mistake("option is unknown", run("--max-totl-tokens=9"), 2, "did you mean"),
        Mistake("option has no value", run("--dtype"), 2, "expected one argument"),
        Mistake("option is no number", run("--tp", "two"), 2, "invalid int value"),
        Mistake("template is no JSON", run("--template", "{"), 2, "template"),
        Mistake("serve: port in use", serve("--port", str(port)), 1, "is in use"),
        Mistake(
            "serve: directory in use",
            serve("--offline-batch-dir", "batches", "--port", str(_free_port())),
            1,
            "in use by another server",
        ),
        Mistake(
            "serve: setting is unknown",
            serve("--offline-batch-config", '{"polcy": "dfs"}'),
            2,
            "has no setting",
        ),
        Mistake("serve: model is missing", serve(m="./none"), 2, "no such directory"),
        Mistake("serve: option is unknown", serve("--prot", "1"), 2, "unrecognized"),
    ]


def _check_early(table: Table, home: Path, mistake: Mistake) -> None:
    runs = [_run(home, mistake.arguments) for _ in range(REPEATS)]
    best = min(runs, key=lambda run: run.seconds)
    _check_refusal(table, mistake, best)
    table.add(
        f"{mistake.name}: seconds", f"{best.seconds:.2f}", f"<= {EARLY_S}",
        met=best.seconds <= EARLY_S,
    )  # fmt: skip


def _check_refusal(table: Table, mistake: Mistake, run: Run) -> None:
    said = mistake.said in run.output and TRACEBACK not in run.output
    measured = f"status {run.status}, {len(run.lines)} lines"
    if not said:
        print(f"\n{mistake.name}: {run.output[-1000:]}", file=sys.stderr)
    table.add(
        mistake.name, measured, f"status {mistake.status}",
        met=said and run.status == mistake.status,
    )  # fmt: skip


def _check_late(table: Table, home: Path) -> None:
    """Mistakes that only SGLang can find."""
    unknown = home / "unknown-model"
    write_demo_model(unknown)
    config = json.loads((unknown / "config.json").read_text())
    config["architectures"] = ["NoSuchModelForCausalLM"]
    (unknown / "config.json").write_text(json.dumps(config))
    torn = home / "torn-model"
    write_demo_model(torn)
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    served = ["--served-model-name", "demo"]
    for mistake in (
        Mistake("dtype is unknown", ["demo", "--dtype", "float99"], 2, "float99"),
        Mistake("architecture is unknown", [str(unknown)], 2, "NoSuchModel"),
        Mistake("weights are torn", [str(torn)], 2, "SafetensorError"),
    ):
        command = ["run", "-i", str(DATA), "-o", "late", *served, "--model-path"]
        run = _run(home, [*command, *mistake.arguments])
        _check_refusal(table, mistake, run)
        table.add(
            f"{mistake.name}: lines", len(run.lines), "<= 5", met=len(run.lines) <= 5
        )


# Runs -------------------------------------------------------------------------------


def _command(output: str, *more: str) -> list[str]:
    served = ["--served-model-name", "demo"]
    return [
        "run",
        "-i",
        str(DATA),
        "-o",
        output,
        "--model-path",
        "demo",
        *served,
        *more,
    ]


def _check_run(table: Table, home: Path) -> None:
    """The demo with default options, on a terminal."""
    run = _run(home, _command("answers.jsonl"), terminal=True)
    table.add("run: status", run.status, "0", met=run.status == 0)
    before = [line for line in run.lines if not line.startswith("{")]
    summary = next(
        (n for n, line in enumerate(before) if line.startswith("requests completed")),
        len(before),
    )
    table.add(
        "run: lines before the summary", summary, f"<= {MAX_LINES}",
        met=summary <= MAX_LINES,
    )  # fmt: skip
    table.add(
        "run: longest silence", f"{run.silence:.1f} s", f"<= {MAX_SILENCE_S:g} s",
        met=run.silence <= MAX_SILENCE_S,
    )  # fmt: skip
    memory = run.memory / 1e9
    table.add(
        "run: peak memory", f"{memory:.2f} GB", f"<= {MAX_MEMORY_GB:g} GB",
        met=0 < memory <= MAX_MEMORY_GB,
    )  # fmt: skip
    names_file = any(line.endswith("answers.jsonl") for line in run.lines)
    table.add("run: names its output", names_file, "True", met=names_file)
    done = [_run(home, _command("answers.jsonl")) for _ in range(REPEATS)]
    seconds = min(each.seconds for each in done)
    said = all(each.status == 0 and "nothing to do" in each.output for each in done)
    table.add(
        "job is complete: seconds", f"{seconds:.2f}", f"<= {EARLY_S}",
        met=said and seconds <= EARLY_S,
    )  # fmt: skip


def _check_death(table: Table, home: Path) -> None:
    """The system kills the engine; the same command continues."""
    run = _run(home, _command("killed.jsonl"), kill_after=20)
    said = "the system killed" in run.output and TRACEBACK not in run.output
    table.add(
        "engine is killed", f"status {run.status}", "status 1",
        met=said and run.status == 1,
    )  # fmt: skip
    again = _run(home, _command("killed.jsonl"))
    summary = json.loads(again.lines[-1]) if again.status == 0 else {}
    part = (summary.get("this_run") or {}).get("completed", 0)
    table.add(
        "continued: done by this run", f"{part} of {summary.get('completed')}",
        "fewer than all", met=0 < part < summary.get("completed", 0),
    )  # fmt: skip


def _check_skipped(table: Table, home: Path) -> None:
    """Lines with a wrong model, a wrong URL, and a stream."""
    lines = [json.loads(line) for line in DATA.read_bytes().splitlines()[:5]]
    lines[0]["body"]["model"] = "other"
    lines[1]["url"] = "/v1/none"
    lines[2]["body"]["stream"] = True
    (home / "some.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    command = _command("some.out")
    command[2] = "some.jsonl"
    _check_refusal(
        table, Mistake("invalid lines", [], 2, "line 3"), _run(home, command)
    )
    run = _run(home, [*command, "--skip-invalid"])
    summary = json.loads(run.lines[-1]) if run.status == 0 else {}
    counts = (summary.get("completed"), summary.get("failed"))
    groups = len(summary.get("errors", ()))
    table.add(
        "invalid lines skipped", f"{counts}, {groups} reasons", "(2, 3), 3 reasons",
        met=counts == (2, 3) and groups == 3,
    )  # fmt: skip


# Processes --------------------------------------------------------------------------


def _run(
    home: Path,
    arguments: list[str],
    *,
    terminal: bool = False,
    kill_after: int | None = None,
) -> Run:
    """Run ``sglang-batch`` in a directory.

    Args:
        terminal: let it print to a terminal, and measure memory.
        kill_after: kill the scheduler when this many results are stored.
    """
    command = [sys.executable, "-m", "sglang_batch", *arguments]
    reader, writer = pty.openpty() if terminal else os.pipe()
    run, began = Run(), time.monotonic()
    process = subprocess.Popen(
        command, cwd=home, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer,
        env={**os.environ, "HF_HUB_OFFLINE": "1"}, start_new_session=True,
    )  # fmt: skip
    os.close(writer)
    spoke, output = began, b""
    while True:
        ready, _, _ = select.select([reader], [], [], POLL_S)
        if ready:
            try:
                data = os.read(reader, 1 << 16)
            except OSError:  # a terminal that nobody writes to any more
                data = b""
            if not data:
                break
            now = time.monotonic()
            run.silence, spoke = max(run.silence, now - spoke), now
            output += data
        if terminal:
            run.memory = max(run.memory, _memory(process.pid))
        if kill_after is not None and _num_results(home, arguments) >= kill_after:
            _kill_scheduler(process.pid)
            kill_after = None
    run.status = process.wait()
    os.close(reader)
    run.seconds = time.monotonic() - began
    run.output = output.decode(errors="replace")
    return run


def _processes(pid: int) -> list[psutil.Process]:
    try:
        main = psutil.Process(pid)
        return [main, *main.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _memory(pid: int) -> int:
    total = 0
    for process in _processes(pid):
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def _num_results(home: Path, arguments: list[str]) -> int:
    name = arguments[arguments.index("-o") + 1]
    with suppress(OSError):
        return (home / f"{name}.job" / "results.jsonl").read_bytes().count(b"\n")
    return 0


def _kill_scheduler(pid: int) -> None:
    for process in _processes(pid):
        with suppress(psutil.Error):
            if "scheduler" in " ".join(process.cmdline()[:1]):
                process.send_signal(signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
