"""Run the commands of commands.toml, in order, within a budget.

    python benchmark/gpu/run_list.py --list
    python benchmark/gpu/run_list.py --dry-run                      on any machine
    python benchmark/gpu/run_list.py --save DIR --minutes 9         on the GPU's

A command starts if its minutes are left, or the least that it can use, and is ended when
they are over. One that fails does not keep the next from running. What a command prints goes
to ``DIR/NAME.log`` as it comes, and its state to ``DIR/status.jsonl``. The same call again
runs the rest: commands that are done, or failed, do not run again unless ``--only`` names them.

Packages that ``carry.py unpack`` has put into a folder are found with ``--site``. ``--bundle
FILE`` keeps everything in DIR in one archive that is written anew after each command, and
that a later machine unpacks into DIR to go on.

``--dry-run`` starts nothing and needs no GPU: it reads the options of each command with the
command's own parser, and checks tests, models and shapes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from command_list import BENCHMARK, HERE, ROOT, SCRATCH, Command, chosen, read_commands
from dry_run import dry_run

STATUS = "status.jsonl"
FINAL = ("done", "failed", "ended")
ENDED_WITHIN_S = 15
MARK = "GPU_LIST_COMMAND"
# What is imported of packages that a list of versions says little of.
IMPORTED = {"sglang": ("sgl_kernel.flash_attn", "sglang.srt.managers.scheduler")}
CHECK = """
import sys
from importlib import import_module, metadata
name, _, pinned = sys.argv[1].partition("==")
try:
    found = metadata.version(name).partition("+")[0]
except metadata.PackageNotFoundError:
    found = ""
if found != pinned:
    sys.exit(1)
for name in sys.argv[2:]:
    import_module(name)
"""


# Run ----------------------------------------------------------------------------------


class Runner:
    """Runs commands and keeps their states.

    site: folder of packages besides those of this Python, or None.
    """

    def __init__(self, save: Path, site: Path | None, bundle: Path | None) -> None:
        self._save, self._bundle = save.resolve(), bundle
        self._found: dict[str, str] = {}  # what is wrong with packages
        scratch = self._save / SCRATCH
        scratch.mkdir(parents=True, exist_ok=True)
        write_plugin(scratch / "plugin")
        places = [
            scratch / "plugin", *([site.resolve()] if site else []), ROOT / "python", ROOT,
            BENCHMARK, HERE, *filter(None, [os.environ.get("PYTHONPATH")]),
        ]  # fmt: skip
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, places)),
            "PYTHONUNBUFFERED": "1",
            "XDG_DATA_HOME": str(self._save / "data"),  # measured costs
            "TORCHDYNAMO_DISABLE": "1",  # as when the published figures were measured
        }

    def states(self) -> dict[str, str]:
        """The last state of each command that was started."""
        file = self._save / STATUS
        lines = file.read_text().splitlines() if file.exists() else []
        return {each["name"]: each["state"] for each in map(json.loads, lines)}

    def run(self, commands: Sequence[Command], minutes: float) -> None:
        """Run those that fit into the time, in order."""
        end = time.monotonic() + 60 * minutes
        for command in commands:
            for name in {*command.needs} - self._found.keys():
                self._found[name] = self._lacking(name)
            lacking = [*filter(None, (self._found[name] for name in command.needs))]
            if lacking:
                print(f"{command.name}: left out, it needs {', '.join(lacking)}")
                continue
            left = (end - time.monotonic()) / 60
            given = command.minutes_of(left)
            if not given:
                print(
                    f"{command.name}: later, {left:.1f} of {command.minutes} minutes left"
                )
                continue
            self._note(command.name, "started")
            began = time.monotonic()
            state = self._run(command, given)
            self._note(command.name, state, seconds=round(time.monotonic() - began, 1))
            self._write_bundle()

    def _run(self, command: Command, minutes: float) -> str:
        """``done``, ``failed``, or ``ended`` for one that took all of its time."""
        end = time.monotonic() + 60 * minutes
        with (self._save / f"{command.name}.log").open("ab") as log:
            mark = f"{os.getpid()} {command.name}"
            for line in command.lines(self._save, minutes):
                log.write(f"$ {shlex.join(line)}\n".encode())
                log.flush()
                if str(self._model) in " ".join(line):
                    self._write_model()
                try:
                    process = subprocess.Popen(
                        executable_line(line), cwd=ROOT,
                        env={**self._environment, MARK: mark},
                        stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )  # fmt: skip
                except OSError as error:
                    log.write(f"{error}\n".encode())
                    return "failed"
                try:
                    status = process.wait(max(0.0, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    return "ended"
                finally:
                    end_all(process, mark)
                if status:
                    return "failed"
        return "done"

    @property
    def _model(self) -> Path:
        return self._save / SCRATCH / "model"

    def _write_model(self) -> None:
        if not self._model.exists():
            code = "import sys, gpu_models; gpu_models.write_model(gpu_models.Path(sys.argv[1]))"
            subprocess.run(
                [sys.executable, "-c", code, str(self._model)],
                env=self._environment,
                check=False,
            )

    def _lacking(self, name: str) -> str:
        """What is wrong with a package, if it is not there in the pinned version or cannot be
        imported. Else every command that needs it would fail, in a minute each."""
        pin = f"{name}=={pinned_versions().get(name, 'any')}"
        done = subprocess.run(
            [sys.executable, "-c", CHECK, pin, *IMPORTED.get(name, ())],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        said = [pin, *done.stderr.strip().splitlines()]
        return said[-1] if done.returncode else ""

    def _note(self, name: str, state: str, **more: Any) -> None:
        entry = {"name": name, "state": state, **more}
        with (self._save / STATUS).open("a") as file:
            file.write(json.dumps(entry) + "\n")
        print(" ".join(map(str, entry.values())), flush=True)

    def _write_bundle(self) -> None:
        if self._bundle is None:
            return

        def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
            return None if entry.name.split("/")[1:2] == [SCRATCH] else entry

        part = self._bundle.with_name(f".{self._bundle.name}")
        with tarfile.open(part, "w:gz") as archive:
            archive.add(self._save, ".", filter=kept)
        part.replace(self._bundle)


def executable_line(line: Sequence[str]) -> list[str]:
    """With this Python in place of ``python`` and ``sglang-batch``."""
    names = {
        "python": [sys.executable],
        "sglang-batch": [sys.executable, "-m", "sglang_batch"],
    }
    return [word for each in line for word in names.get(each, [each])]


def end_all(process: subprocess.Popen[bytes], mark: str) -> None:
    """End a process, those below it and those it left behind: as on Ctrl-C first, since
    engines have sessions of their own, which a benchmark ends.

    mark: in the environment of all of them, unless they have overwritten it.
    """
    import psutil  # type: ignore[import-untyped]

    found: list[psutil.Process] = []
    if process.poll() is None:
        found = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDED_WITHIN_S)
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if each.environ().get(MARK) == mark:
                found.append(each)
    for each in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def pinned_versions() -> dict[str, str]:
    """Of constraints.txt, by name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = (line.strip().partition("==") for line in lines)
    return {name: version for name, found, version in pins if found}


def write_plugin(folder: Path) -> None:
    """What an install of this package tells about it: SGLang finds plugins by it.

    Modules alone are on the path where nothing is installed.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    text = "".join(
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for group, entries in groups.items()
    )
    (info / "entry_points.txt").write_text(text)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )


# The command --------------------------------------------------------------------------


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--save", type=Path, metavar="DIR", help="folder for the results"
    )
    parser.add_argument(
        "--minutes", type=float, default=9, help="for this call (default: 9)"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these commands")
    parser.add_argument("--site", type=Path, metavar="DIR", help="folder of packages")
    parser.add_argument(
        "--bundle", type=Path, metavar="FILE", help="such as all.tar.gz"
    )
    parser.add_argument("--list", action="store_true", help="print the commands")
    parser.add_argument("--dry-run", action="store_true", help="check the commands")
    options = parser.parse_args(argv)
    if not (options.save or options.list or options.dry_run):
        parser.error("give --save DIR, or --list or --dry-run.")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    try:
        commands = chosen(read_commands(), options.only)
        if options.list:
            for command in commands:
                needs = f" ({', '.join(command.needs)})" if command.needs else ""
                print(
                    f"{command.name:<22} {command.minutes:>4} min  {command.why}{needs}"
                )
        elif options.dry_run:
            for name, said in dry_run(commands).items():
                print(f"{name}\n  " + said.strip().replace("\n", "\n  "))
        else:
            runner = Runner(options.save, options.site, options.bundle)
            states = runner.states()
            runner.run(
                [
                    command
                    for command in commands
                    if options.only or states.get(command.name) not in FINAL
                ],
                options.minutes,
            )
    except ValueError as error:
        print(f"run_list.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
