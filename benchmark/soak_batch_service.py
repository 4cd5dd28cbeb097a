"""The batch service under everything that goes wrong, and the time it costs.

    python benchmark/soak_batch_service.py --short            some minutes
    python benchmark/soak_batch_service.py --save             long: an hour or so
    python benchmark/soak_batch_service.py --only kill,bad    some rows

A server runs the demo model on this machine, without an accelerator. The rows:

    kill         SIGKILL to all of the server at random moments of a batch, again and
                 again: no line is lost, answered twice, or run again once finished.
    bad          Thousands of inputs that no client should send: each gets its error, and
                 the server answers good ones as before.
    contract     Every call of both versions of the official client.
    memory       Memory of the serving process, of a few lines and of very many.
    validation   Lines checked in a second.
    overhead     Wall time of a batch against ``sglang.Engine.generate`` of stock SGLang
                 over the same requests at once, in alternation.
    clients      A batch while clients poll and upload all the time, in alternation with
                 a batch without them.

Nothing else should run on the machine during ``overhead`` and ``clients``. With
``--short`` times have no targets. The last line is one JSON document. The exit status is
1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from report import RESULTS, Figure, finish, print_figures
from soak_clients import client_rows
from soak_kill import kill_rows
from soak_memory import memory_rows, validation_rows
from soak_server import MODEL_NAME, SoakServer, running
from soak_service import overhead_rows

from sglang_batch.run.demo_model import write_demo_model

CONTRACT = Path(__file__).parents[1] / "test" / "srt" / "contract"
# The other version of the client, which is installed separately from SGLang's.
NEWEST_CLIENT = Path(sys.prefix) / "newest-openai"
SCRIPT_TIMEOUT_S = 900
# Units of figures that are times or are computed from times.
TIMES = ("%", "lines/s", "s")


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything."""

    kill_rounds: int
    kill_lines: int
    bad_cases: int | None
    memory_lines: tuple[int, int]
    validation_lines: int
    overhead: dict[str, int]
    clients: int
    client_lines: dict[str, int]
    repeats: int


LONG = Size(
    kill_rounds=20,
    kill_lines=20_000,
    bad_cases=None,
    memory_lines=(1_000, 500_000),
    validation_lines=1_000_000,
    overhead={"tiny": 5000, "realistic": 5000},
    clients=50,
    client_lines={"tiny": 5000, "realistic": 2000},
    repeats=3,
)
SHORT = Size(
    kill_rounds=2,
    kill_lines=300,
    bad_cases=400,
    memory_lines=(1_000, 20_000),
    validation_lines=20_000,
    overhead={"tiny": 1000},
    clients=50,
    client_lines={"tiny": 1000},
    repeats=1,
)


class Soak:
    """All rows over one server, which the first row that needs it starts."""

    def __init__(self, server: SoakServer, model: Path, scratch: Path, seed: int):
        self._server = server
        self._model = model
        self._scratch = scratch
        self._seed = seed

    def kill(self, size: Size) -> list[Figure]:
        return kill_rows(
            self._server, self._scratch, size.kill_rounds, size.kill_lines, self._seed
        )

    def bad(self, size: Size) -> list[Figure]:
        options = ["--seed", str(self._seed)]
        if size.bad_cases is not None:
            options += ["--cases", str(size.bad_cases)]
        report = _script("bad_inputs.py", self._server.url, *options)
        problems = report["problems"]
        for problem in problems[:20]:
            print(f"  {problem}")
        wrong = Figure("bad inputs handled wrong", len(problems), "", ("=", 0))
        return [
            Figure("bad inputs", report["cases"]),
            wrong,
            Figure(
                "servers that died of them", not self._server.is_alive, "", ("=", 0)
            ),
        ]

    def contract(self, size: Size) -> list[Figure]:
        figures = []
        for path in (None, NEWEST_CLIENT):
            arguments = (self._server.url, MODEL_NAME)
            report = _script("contract_calls.py", *arguments, python_path=path)
            failed = [name for name, why in report["outcomes"].items() if why]
            name = f"checks that client {report['client']} fails"
            told = ", ".join(failed) or f"of {len(report['outcomes'])}"
            figures.append(Figure(name, len(failed), "", ("=", 0), told))
        return figures

    def memory(self, size: Size) -> list[Figure]:
        return memory_rows(self._server, self._scratch, *size.memory_lines)

    def validation(self, size: Size) -> list[Figure]:
        return validation_rows(self._scratch, size.validation_lines)

    def overhead(self, size: Size) -> list[Figure]:
        return overhead_rows(
            self._server, self._model, self._scratch, size.overhead, size.repeats
        )

    def clients(self, size: Size) -> list[Figure]:
        return client_rows(
            self._server, self._scratch, size.clients, size.client_lines, size.repeats
        )


ROWS: dict[str, Callable[[Soak, Size], list[Figure]]] = {
    "memory": Soak.memory,  # first, on a server that has done nothing else
    "kill": Soak.kill,
    "bad": Soak.bad,
    "contract": Soak.contract,
    "validation": Soak.validation,
    "overhead": Soak.overhead,
    "clients": Soak.clients,
}


def _outcome(name: str, soak: Soak, size: Size) -> list[Figure]:
    """The row's figures, or one that says it broke down. Other rows still run."""
    try:
        return ROWS[name](soak, size)
    except Exception as error:
        traceback.print_exc()
        return [Figure(f"{name} broke down", 1, "", ("=", 0), repr(error)[:200])]


def _unjudged_time(figure: Figure) -> Figure:
    """The figure, without its target if it is a time: short times are random."""
    return replace(figure, target=None) if figure.unit in TIMES else figure


def _script(
    name: str, *arguments: str, python_path: Path | None = None
) -> dict[str, Any]:
    """The report of one of the contract's scripts, which end with a line of JSON."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if python_path is not None:
        if not python_path.exists():
            raise SystemExit(f"error: {python_path} is missing; run `make env`.")
        environment["PYTHONPATH"] = str(python_path)
    done = subprocess.run(
        [sys.executable, str(CONTRACT / name), *arguments],
        capture_output=True,
        text=True,
        timeout=SCRIPT_TIMEOUT_S,
        env=environment,
    )
    if not done.stdout.strip():
        raise RuntimeError(f"{name} said nothing: {done.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def _rows_of(text: str) -> list[str]:
    chosen = text.split(",")
    for name in chosen:
        if name not in ROWS:
            raise argparse.ArgumentTypeError(
                f"{name!r} is not a row; choose from {','.join(ROWS)}"
            )
    return [name for name in ROWS if name in chosen]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="small sizes")
    parser.add_argument(
        "--only", type=_rows_of, default=list(ROWS), metavar="ROWS",
        help="rows to run, separated by commas (default: all)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--save", action="store_true", help="write the JSON to results/"
    )
    options = parser.parse_args()
    if options.save and options.short:
        parser.error("--save needs the full sizes: leave out --short.")
    # End on SIGTERM as on an error, so that the server is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    size = SHORT if options.short else LONG
    figures: dict[str, list[Figure]] = {}
    with tempfile.TemporaryDirectory(prefix="sglang-batch-") as directory:
        scratch = Path(directory)
        model = scratch / "demo-model"
        write_demo_model(model)
        with running(model, scratch) as server:
            soak = Soak(server, model, scratch, options.seed)
            for name in options.only:
                figures[name] = _outcome(name, soak, size)
                if options.short:
                    figures[name] = [_unjudged_time(each) for each in figures[name]]
                print_figures(name, figures[name])
                if not server.is_alive:
                    server.start()
    missed = [f.name for each in figures.values() for f in each if f.met is False]
    document = {
        "figures": {
            name: [figure.as_json for figure in each]
            for name, each in figures.items()
        },
        "missed": missed,
    }  # fmt: skip
    some = [] if options.only == list(ROWS) else options.only
    name = "_".join(("soak", *some))
    finish(document, RESULTS / f"{name}.json" if options.save else None)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
