"""Write ``benchmark/results/README.md``: every measured table, from the documents in ``results/``.

    python benchmark/results_page.py            write the page
    python benchmark/results_page.py --check    exit with 1 if the page differs

The page holds no figure of its own: to change one, run its command again with ``--save``.
A document with ``typed_from`` was copied from a page of an earlier version, because its
benchmark had not saved it. Its date is that of the commit which wrote the table.

``results_sections.py`` says which tables are shown, and in which order.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from results_sections import SECTIONS
from results_views import Document, Table

RESULTS = Path(__file__).parent / "results"
# By document: remarks on its tables, such as figures of runs that were not saved.
NOTES = RESULTS / "notes.json"
PAGE = Path(__file__).parent / "results" / "README.md"

PREAMBLE = """\
# Results

For people who want to know how a figure was measured. `benchmark/results_page.py` generates this page from `benchmark/results/`. *Stock*
is SGLang 0.5.23 without `--offline-batch`, and *ours* is sglang-batch. Unless stated, the model is the random demo model of two layers, with
`OMP_NUM_THREADS=1`. The CPUs are shared, so times vary by a tenth or more. Below each table are its document, machine, commit, date and
command, with `*` where it was copied from an earlier page.

"""

OTHERS = """\
## Commands without a table

`python benchmark/demo.py --random` runs the 240 requests of `benchmark/data/demo_requests.jsonl` over HTTP and prints the cached share.
`python benchmark/first_hour.py` makes 20 mistakes with `run` and `serve` and checks sentences, exit statuses and times (`--no-engine`
leaves out the rest). `python benchmark/bench_reserve.py` prices KV reserved by quantiles of the lengths. `python benchmark/bench_models.py
answers` and `simulated` compare tokens and simulated steps with the engine. `pytest -m gpu` runs on a GPU.
"""


def page() -> str:
    """The text of ``benchmark/results/README.md``."""
    documents = {
        name: json.loads((RESULTS / f"{name}.json").read_text())
        for section in SECTIONS
        for name, _ in section.sources
    }
    notes = json.loads(NOTES.read_text())
    machines = list(dict.fromkeys(map(_machine, documents.values())))
    rows = [[f"M{i}", *machine] for i, machine in enumerate(machines, 1)]
    parts = [PREAMBLE + _markdown(Table("", ["", "machine", "versions"], rows))]
    for section in SECTIONS:
        parts.append(f"## {section.title}\n")
        if section.about:
            parts.append(section.about + "\n")
        for i, (name, view) in enumerate(section.sources):
            document = documents[name]
            parts += map(_markdown, view(document))
            if name not in (other for other, _ in section.sources[i + 1 : i + 2]):
                label = f"M{machines.index(_machine(document)) + 1}"
                parts.append(_provenance(name, document, label))
                # Once, though a document may have tables in two sections.
                parts += [f"{note}\n" for note in notes.pop(name, ())]
    return "\n".join([*parts, OTHERS])


def unused() -> set[str]:
    """The documents that no section shows."""
    shown = {name for section in SECTIONS for name, _ in section.sources}
    return {path.stem for path in RESULTS.glob("*.json") if path != NOTES} - shown


def _markdown(table: Table) -> str:
    """A table without padding, since the page is read rendered, or empty columns."""
    kept = [
        i
        for i, head in enumerate(table.header)
        if not head or any(str(row[i]) for row in table.rows)
    ]
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    text = "".join(f"|{'|'.join(str(cells[i]) for i in kept)}|\n" for cells in lines)
    return f"{table.title}:\n\n{text}" if table.title else text


def _machine(document: Document) -> tuple[str, str]:
    """The machine and the versions."""
    machine = document["machine"]
    accelerator = document.get("device") or document.get("gpu")
    cpu = f"{machine.get('cores')} cores of {machine.get('cpu')}"
    versions = (
        f"{shown} {machine[package]}"
        for package, shown in (
            ("python", "Python"),
            ("numpy", "NumPy"),
            ("numba", "numba"),
            ("torch", "PyTorch"),
            ("transformers", "transformers"),
            ("sglang", "SGLang"),
        )
        if package in machine
    )
    return machine.get("device") or accelerator or cpu, ", ".join(versions)


def _provenance(name: str, document: Document, label: str) -> str:
    """The document, the machine, the commit, the date and the command, in one line."""
    machine = document["machine"]
    typed = "*" if "typed_from" in document else ""
    date = str(machine["date"])[:10]
    command = re.sub(r" --save( \w+)?$", "", document["command"])
    return f"{name}{typed}, {label}, {machine['commit'][:7]}, {date}: `{command}`\n"


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    text = page()
    if not options.check:
        PAGE.write_text(text)
        return 0
    same = PAGE.read_text() == text
    if not same:
        print(f"{PAGE} differs: run python benchmark/results_page.py")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
