"""``python -m sglang_batch.upgrade``: compares the private functions of SGLang in use with
those of another release, or records those of the supported one."""

from __future__ import annotations

import argparse
import difflib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .errors import SGLangBatchError, UnsupportedSGLang
from .run.option_types import add_arguments

if TYPE_CHECKING:
    from .srt.compat.private_api import PrivateApi
    from .srt.compat.sglang_release import Definition, Release

TROUBLE = 2
KINDS = GONE, MOVED, SIGNATURE, BODY = "gone", "moved", "new signature", "changed body"


class Difference(NamedTuple):
    """A function that another release does not have as we know it. kind: of ``KINDS``."""

    kind: str
    path: str
    use: str
    ours: Definition
    theirs: Definition | None


def compare(api: PrivateApi, ours: Release, theirs: Release) -> Iterator[Difference]:
    """What of the private API differs in the release ``theirs``. ``ours`` is supported."""
    for place, names in api.items():
        for name, function in names.items():
            known, found = ours.find(place, name), None
            try:
                found = theirs.find(place, name)
                kind = BODY if found.parameters == known.parameters else SIGNATURE
            except UnsupportedSGLang:
                # In a file that had none of the name, one with the same parameters.
                before = {each.path for each in ours.all_of(name)}
                new = (x for x in theirs.all_of(name) if x.path not in before)
                found = next((x for x in new if x.parameters == known.parameters), None)
                kind = MOVED if found else GONE
            if found is None or found.digest != known.digest or kind == MOVED:
                path = f"{place}.{name}"
                yield Difference(kind, path, function.use, known, found)


def report(found: Sequence[Difference], old: str, new: str) -> str:
    """The differences between releases ``old`` and ``new``: a line each, then the texts."""
    ordered = sorted(found, key=lambda each: KINDS.index(each.kind))
    lines = [f"{each.kind}: {each.path}" for each in ordered]
    for each in ordered:
        a, b = each.ours, each.theirs
        was, now = a.text.splitlines(), b.text.splitlines() if b else []
        before = f"{old} {a.path}:{a.line}"
        after = f"{new} {b.path}:{b.line}" if b else new
        lines += ["", f"{each.kind}: {each.path} ({each.use})"]
        lines += difflib.unified_diff(was, now, before, after, lineterm="")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: that of ``diff``."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_batch.upgrade",
        description="Tell which of SGLang's private functions that sglang-batch uses are "
        "gone, moved or changed in another release, with the old and the new text.",
        epilog="Exit status: 0 if all are the same, 1 if some differ, 2 if not compared.",
    )
    add_arguments(
        parser,
        """
--against WHEEL_OR_VERSION  the other release: a wheel, or a version, which pip or uv fetches
""",
        against={"required": True},
    )
    options = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _compare(options.against, Path(folder))
    except (SGLangBatchError, PermissionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return TROUBLE


def _compare(asked: str, folder: Path) -> int:
    from .srt.compat import private_api
    from .srt.compat.sglang_release import fetch_release, installed_release

    version, api = private_api.SUPPORTED_VERSION, private_api.PRIVATE_API
    theirs = fetch_release(asked, folder / "theirs")
    ours = installed_release()
    if ours.version != version:
        ours = fetch_release(version, folder / "ours")
    found = list(compare(api, ours, theirs))
    counts = [f"{sum(x.kind == kind for x in found)} {kind}" for kind in KINDS]
    number, others = sum(map(len, api.values())), ", ".join(counts)
    print(f"{number} functions of sglang {version}, in {theirs.version}: {others}")
    print(report(found, version, theirs.version))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
