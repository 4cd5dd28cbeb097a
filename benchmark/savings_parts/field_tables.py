"""Tables with real dependencies, made of what Python and installed packages ship.

Each is a list of rows with the same fields, which are in the order in which their source
has them: the subject of a row first, then the facts that were looked up for it.
"""

from __future__ import annotations

import ast
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from importlib.metadata import Distribution, distributions
from itertools import islice
from pathlib import Path
from zoneinfo import ZoneInfo, available_timezones

import pycountry

Rows = list[dict[str, str]]


def tables(rows: int) -> dict[str, Callable[[], Rows]]:
    """What makes each table, by its name, of up to so many rows."""
    return {
        "functions": lambda: list(islice(functions(), rows)),
        "files": lambda: list(islice(files(), rows)),
        "characters": lambda: list(islice(characters(), rows)),
        "local times": lambda: list(islice(local_times(), rows)),
        "subdivisions": lambda: list(islice(subdivisions(), rows)),
    }


def functions() -> Iterator[dict[str, str]]:
    """The functions of installed packages, with their class, module and package."""
    for package in _packages():
        about = _about(package)
        for path in package.files or ():
            if path.suffix != ".py":
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    module = ast.parse(Path(str(path.locate())).read_text("utf-8"))
            except (OSError, SyntaxError, ValueError):
                continue
            for name, node in _functions_in(module, ""):
                yield {
                    "function": node.name,
                    "arguments": ast.unparse(node.args),
                    "returns": ast.unparse(node.returns) if node.returns else "",
                    "documentation": (ast.get_docstring(node) or "").partition("\n")[0],
                    "class": name,
                    "module": str(path.with_suffix("")).replace("/", "."),
                    **about,
                }


def _functions_in(
    node: ast.AST, owner: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions_in(child, child.name)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner, child


def files() -> Iterator[dict[str, str]]:
    """The files of installed packages."""
    for package in _packages():
        about = _about(package)
        for path in package.files or ():
            yield {
                "path": str(path),
                "bytes": str(path.size),
                "kind": path.suffix,
                "folder": str(path.parent),
                **about,
            }


def _packages() -> list[Distribution]:
    found = {package.name.lower(): package for package in distributions()}
    return [found[name] for name in sorted(found)]


def _about(package: Distribution) -> dict[str, str]:
    meta = package.metadata

    def first(*names: str) -> str:
        return next((meta[name] for name in names if name in meta), "")

    return {
        "package": package.name,
        "version": package.version,
        "license": first("License-Expression", "License")[:60],
        "author": first("Author-email", "Author")[:80],
        "python": first("Requires-Python"),
        "summary": first("Summary"),
    }


def characters() -> Iterator[dict[str, str]]:
    """Every fifth character of Unicode that has a name, and its properties."""
    for code in range(0, 0x110000, 5):
        char = chr(code)
        name = unicodedata.name(char, "")
        if not name:
            continue
        words = name.replace("-", " ").split()
        yield {
            "code point": f"U+{code:04X}",
            "name": name,
            "category": unicodedata.category(char),
            "script": words[0].capitalize(),
            "form": " ".join(words[1:3]).lower(),
            "direction": unicodedata.bidirectional(char),
            "width": unicodedata.east_asian_width(char),
            "combining class": str(unicodedata.combining(char)),
            "mirrored": "yes" if unicodedata.mirrored(char) else "no",
            "decomposition": unicodedata.decomposition(char).partition(">")[0],
            "numeric value": str(unicodedata.numeric(char, "none")),
            "plane": ("Basic", "Supplementary", "Ideographic")[min(code >> 16, 2)],
        }


def local_times() -> Iterator[dict[str, str]]:
    """The time in each time zone at noon UTC, on the first of months of four years."""
    for zone in sorted(available_timezones()):
        region, _, city = zone.partition("/")
        if not city:
            continue
        for month in range(48):
            utc = datetime(
                2020 + month // 12, month % 12 + 1, 1, 12, tzinfo=ZoneInfo("UTC")
            )
            local = utc.astimezone(ZoneInfo(zone))
            yield {
                "local time": local.strftime("%A, %d %B %Y, %H:%M"),
                "month": local.strftime("%B"),
                "year": str(local.year),
                "city": city.replace("_", " "),
                "region": region,
                "abbreviation": local.tzname() or "",
                "offset from UTC": str(local.utcoffset()),
                "daylight saving": "no" if local.dst() == timedelta(0) else "yes",
                "UTC": utc.strftime("%A, %d %B %Y, %H:%M"),
            }


QUESTIONS = (
    "Which language do most people there speak at home?",
    "Is there a coast, and of which sea?",
    "What is the largest city, and is it the capital?",
    "Which river is the longest there?",
    "Is the mean temperature in January below freezing?",
)


def subdivisions() -> Iterator[dict[str, str]]:
    """Five questions about each subdivision of each country."""
    for place in sorted(pycountry.subdivisions, key=lambda place: place.code):
        country = pycountry.countries.get(alpha_2=place.country_code)
        assert country is not None
        for question in QUESTIONS:
            yield {
                "code": place.code,
                "name": place.name,
                "kind": place.type,
                "part of": place.parent.name if place.parent else "",
                "question": question,
                "country": country.name,
                "official name": getattr(country, "official_name", country.name),
                "country codes": f"{country.alpha_2}, {country.alpha_3}, {country.numeric}",
            }
