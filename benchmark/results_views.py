"""Tables of ``benchmark/results/README.md`` from a document of ``results/``: chosen columns, or figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """A table as the page shows it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]


# From a document to the tables that are shown of it.
View = Callable[[Document], Iterator[Table]]


@dataclass(frozen=True, slots=True)
class Saved:
    """The tables that a benchmark printed, with some of their columns and rows.

    columns: headers to show, each with its name on the page; a number is the place of a
        column whose header another one has as well. Without any, all columns.
    where: for some headers, the values of the rows to show.
    tables: their places in the document, by default all.
    titles: in place of those that the benchmark printed.
    """

    columns: Mapping[str | int, str] = field(default_factory=dict)
    where: Mapping[str, Sequence[str]] = field(default_factory=dict)
    tables: Sequence[int] = ()
    titles: Sequence[str] = ()

    def __call__(self, document: Document) -> Iterator[Table]:
        """One table for each that was printed."""
        chosen = self.tables or range(len(document["tables"]))
        for i, table in enumerate(document["tables"][place] for place in chosen):
            header: list[str] = table["header"]
            columns = self.columns or dict(enumerate(header))
            places = [c if isinstance(c, int) else header.index(c) for c in columns]
            wanted = {header.index(c): values for c, values in self.where.items()}
            rows = [
                [row[place] for place in places]
                for row in table["rows"]
                if all(str(row[place]) in values for place, values in wanted.items())
            ]
            title = self.titles[i] if self.titles else table["title"]
            yield Table(title, list(columns.values()), rows)


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures whose names match one of the patterns, with their targets.

    notes: whether their notes are shown, such as a paper's figure.
    """

    title: str
    patterns: Sequence[str] = ("*",)
    notes: bool = True

    def __call__(self, document: Document) -> Iterator[Table]:
        """One table."""
        rows = [
            [
                figure["name"].strip(),
                value_of(figure),
                _target(figure),
                figure["beside"] if self.notes else "",
            ]
            for figure in figures(document)
            if any(fnmatchcase(figure["name"].strip(), p) for p in self.patterns)
        ]
        yield Table(self.title, ["figure", "measured", "target", "note"], rows)


def figures(document: Document) -> list[dict[str, Any]]:
    """The figures of a document, of all its groups."""
    found = document["figures"]
    if isinstance(found, dict):
        return [figure for group in found.values() for figure in group]
    return list(found)


def value_of(figure: dict[str, Any]) -> str:
    """Its value with its unit."""
    value = figure["value"]
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{_digits(value)} {figure['unit']}".strip()


def _digits(value: float) -> str:
    """Whole and large numbers without decimals, others with four digits."""
    whole = float(value).is_integer() or abs(value) >= 1000
    return f"{value:,.0f}" if whole else f"{value:.4g}"


def _target(figure: dict[str, Any]) -> str:
    if figure["target"] is None:
        return ""
    relation, bound = figure["target"]
    missed = "" if figure["met"] else ", missed"
    return f"{relation} {_digits(bound)}{missed}"


def kernel_times(document: Document) -> Iterator[Table]:
    """Microseconds of each attention variant on each shape of ``shared_prefix_gpu.json``."""
    variants = {
        "ours": "this kernel",
        "FlashAttention 3": "FlashAttention 3",
        "no sharing": "our split-KV, nothing shared",
        "cascade emulation": "in three launches",
    }
    rows = []
    for shape in document["results"]:
        times = {time["variant"]: time["us"] for time in shape["times"]}
        cells = [f"{times[v]:.0f}" if times.get(v) else "" for v in variants]
        rows.append([shape["shape"], f"{shape['floor_us']:.0f}", *cells])
    title = "Microseconds per layer; shapes are `name: prefixes,decodes prefix tokens,own tokens`"
    yield Table(title, ["shape", "floor", *variants.values()], rows)


def published_errors(document: Document) -> Iterator[Table]:
    """Errors of predicted throughputs by device, from ``costs_published.json``."""
    by_name = {figure["name"]: figure for figure in figures(document)}
    rows = []
    for name, figure in by_name.items():
        device, found, _ = name.partition(": median error")
        if not found:
            continue
        held_out = by_name.get(f"{device}: held out, median error")
        predicted = f"{held_out['value']:.0%}" if held_out else ""
        rows.append([device, f"{figure['value']:.0%}", figure["beside"], predicted])
    every = by_name["median error of all"]
    rows.append(["all", f"{every['value']:.0%}", every["beside"], ""])
    header = [
        "device",
        "median error",
        "points",
        "half fitted, the other half predicted",
    ]
    yield Table("Errors of predicted throughputs", header, rows)


def field_orders(document: Document) -> Iterator[Table]:
    """Prompt tokens by the order of the fields, from ``savings_fields.json``."""
    header = [
        "25,000 rows of",
        "prompt tokens",
        "computed in own order",
        "`--optimize-fields`",
        "greedy group recursion",
        "orders from every fourth row: share of the saving",
    ]
    rows: list[list[object]] = []
    keys = {
        "computed, template's order": 2,
        "computed, --optimize-fields": 3,
        "computed, greedy group recursion": 4,
    }
    for figure in figures(document):
        name = figure["name"]
        table, found, _ = name.partition(", 25,000 rows: prompt tokens")
        if found:
            rows.append([table, value_of(figure), *[""] * 4])
        elif name.strip() in keys:
            rows[-1][keys[name.strip()]] = value_of(figure)
        elif name.strip().startswith("share of that saving"):
            rows[-1][5] = f"{figure['value']:.0%}"
    yield Table("Prompt tokens computed", header, rows)


def fleet_sharing(document: Document) -> Iterator[Table]:
    """What shards keep of the sharing of one engine, from ``fleet.json``."""
    table = document["tables"][0]
    rows = [
        [file, lines, engines, *(f"{share / optimum:.1%}" for share in (ours, blocks))]
        for file, lines, engines, optimum, ours, blocks, _ in table["rows"]
    ]
    header = ["file", "lines", "engines", "shards", "blocks of 16 rows in turn"]
    yield Table("Cached tokens, as a share of those of one engine", header, rows)


def long_documents(document: Document) -> Iterator[Table]:
    """The jobs of long documents of ``order_traces.json``, summed up by law."""
    table = document["tables"][1]
    columns: dict[str, list[list[str]]] = {}
    for row in table["rows"]:
        columns.setdefault(row[1], []).append(row)
    place = table["header"].index
    rows = []
    for law, jobs in columns.items():
        ours = [job[place("dual-scan")] for job in jobs]
        others = [
            max(job[place("dfs")], job[place("dfs-weight")], key=_share) for job in jobs
        ]
        ratios = [float(job[place("dual-scan / best")]) for job in jobs]
        auto = max(float(job[place("auto / best")].split()[-1]) for job in jobs)
        kept = min((job[place("sharing kept")] for job in jobs), key=_share)
        mean = sum(ratios) / len(ratios)
        rows.append(
            [
                law,
                _range(ours),
                _range(others),
                f"{mean:.4f}",
                f"{max(ratios):.4f}",
                f"{auto:.4f}",
                kept,
            ]
        )
    header = [
        "law",
        "dual-scan",
        "dfs or dfs-weight",
        "seconds, dual-scan / best other, mean",
        "worst",
        "`auto` / best other, worst",
        "sharing kept, worst",
    ]
    yield Table(
        "Questions on long documents, share of the tightest bound", header, rows
    )


def _share(percent: str) -> float:
    return float(percent.rstrip("%"))


def _range(percents: Sequence[str]) -> str:
    ordered = sorted(percents, key=_share)
    return f"{ordered[0]} to {ordered[-1]}"


def replicas(document: Document) -> Iterator[Table]:
    """How evenly replicas end, from ``doors_replicas.json``."""
    rows: list[list[object]] = []
    for figure in figures(document):
        job, _, kind = figure["name"].partition(": ")
        if kind == "ends apart":
            most, before = re.findall(r"(?:at most|was) ([\d.]+ %)", figure["beside"])
            rows.append([job, f"{figure['value']:.1f} %", most, before])
        elif kind == "cached share":
            rows[-1].append(f"{figure['value']:.1f} %")
    header = ["job", "ends apart, mean", "most", "without a plan", "cached share"]
    yield Table(
        "Ends of the replicas, of the job's time, with four seeds", header, rows
    )


def page_sizes(document: Document) -> Iterator[Table]:
    """Steps by the size of a page, from ``doors_pages.json``."""
    steps: dict[str, dict[str, object]] = {}
    for table in document["tables"]:
        size, _, kind = table["title"].removeprefix("page size ").partition(", ")
        for job, count, _, _ in table["rows"]:
            steps.setdefault(f"{job}, {kind}", {})[size] = count
    sizes = list(dict.fromkeys(size for counts in steps.values() for size in counts))
    rows = [[job, *(counts[size] for size in sizes)] for job, counts in steps.items()]
    header = ["prompt and answer", *(f"pages of {size}" for size in sizes)]
    yield Table("Steps of 160 requests", header, rows)


def throughput(document: Document) -> Iterator[Table]:
    """Engines on the job of a ``throughput_job*.json``."""
    job, table = document["jobs"][0], document["tables"][0]
    header = ["policy", "cached", "steps", "blend", "seconds", "from-to"]
    places = [table["header"].index(column) for column in header]
    rows = [[row[place] for place in places] for row in table["rows"]]
    share = f"{job['possible_cached_share']:.1%}"
    shown = [
        "order",
        f"cached ({share} possible)",
        "steps",
        "spread",
        "seconds",
        "range",
    ]
    limits = table["title"].partition(";")[2]
    yield Table(f"Job {job['job']};{limits}", shown, rows)
