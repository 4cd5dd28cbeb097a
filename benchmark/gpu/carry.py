"""Carry packages to a machine with a GPU that reaches no package index.

    python benchmark/gpu/carry.py probe > machine.txt       there: what it has
    python benchmark/gpu/carry.py pack PARTS                here: fetch the rest, and pack it
    python benchmark/gpu/carry.py unpack PARTS SITE         there: check and unpack

``pack`` takes the requirements of this package, SGLang among them, and all that these
require, at the versions of constraints.txt. It leaves out what the machine has, and writes
the rest as ``PARTS/part-000`` and so on with their
checksums in ``PARTS/parts.json``. Parts can be sent in any order. ``unpack`` is given the
folder with all of them and makes a folder for PYTHONPATH. Without other options the parts
are made for ``bare_machine.txt``: Python 3.12, PyTorch 2.11 and Triton 3.6 on x86-64 Linux.

This file needs nothing but Python to unpack.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import io
import json
import lzma
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import IO, Any, cast

ROOT = Path(__file__).resolve().parents[2]
MACHINE = Path(__file__).with_name("bare_machine.txt")
MANIFEST = "parts.json"
# A part and a checkout together fit an upload of 64 MiB.
PART_BYTES = 50 << 20
LARGE = 20_000_000
"""Packages of more bytes are printed: leaving one out may save parts."""
# sglang-kernel needs symbols that only the pinned PyTorch has, and torchvision its own
# PyTorch. Tiles are tuned for the pinned Triton.
REPLACED = ("torch", "torchvision", "triton")
# SGLang runs the commands of the list without these, which would be a third of all parts, and
# compiles kernels of FlashInfer for minutes where it finds that.
UNUSED = (
    "deepseek-recipe", "flash-attn-4", "flashinfer-python", "nvidia-cuda-cccl",
    "nvidia-cuda-nvcc", "nvidia-cutlass-dsl", "nvidia-mathdx", "nvshmem4py-cu13",
    "quack-kernels", "sgl-deep-ep", "sgl-flash-mla", "tilelang", "torchcodec",
)  # fmt: skip
# Files that no command of the list opens: kernels of other GPUs and of unused methods.
LEFT_OUT = (
    "sgl_kernel/sm100/*",
    "sgl_kernel/flashmla_ops*",
    "sgl_kernel/infllm_ops*",
    "triton/backends/amd/*",
    "*/__pycache__/*",
)
# glibc of the tags that wheels for Linux have.
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 24, 17, 5)]


class CarryError(Exception):
    """Something is missing or damaged. The message is for the person at the machine."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The target.

    python: such as "3.12".
    packages: version by normalized name, "" where it is unknown.
    """

    python: str
    packages: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Machine:
        """From the output of ``probe``: a line for Python, then one for each package.

        Raises:
            CarryError: the first line does not name Python.
        """
        lines = [
            line.partition("#")[0].strip() for line in path.read_text().splitlines()
        ]
        first, *others = [line for line in lines if line]
        if not first.startswith("python=="):
            raise CarryError(f"{path} does not begin with python==VERSION.")
        return cls(first.removeprefix("python=="), dict(map(_pin, others)))


def probe() -> str:
    """This machine, for :meth:`Machine.read`."""
    python = ".".join(platform.python_version_tuple()[:2])
    found = {
        _normal(each.metadata["Name"]): each.version
        for each in metadata.distributions()
        if each.metadata["Name"]
    }
    lines = [f"{name}=={version}" for name, version in sorted(found.items())]
    return "\n".join([f"python=={python}", *lines])


def _pin(line: str) -> tuple[str, str]:
    name, _, version = line.partition("==")
    return _normal(name), version.strip()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


# Pack ---------------------------------------------------------------------------------


def own_requirements() -> list[str]:
    """Names of the packages that pyproject.toml requires."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [re.split(r"[^\w.-]", each)[0] for each in project["dependencies"]]


def needed(
    roots: Iterable[str], machine: Machine, without: Iterable[str] = ()
) -> list[str]:
    """Packages that ``roots`` require on that machine, themselves included, by the
    metadata of this environment. Extras count where a requirement names them.

    without: packages that stay, and so do those that nothing else requires.
    """
    from packaging.requirements import Requirement

    environment = {
        "python_version": machine.python,
        "python_full_version": f"{machine.python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }
    stays = {*map(_normal, without)}
    seen: set[tuple[str, str]] = set()
    todo = [(_normal(root), "") for root in roots]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen or name in stays:
            continue
        seen.add((name, extra))
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # only on other platforms, or of the target's Python
        for each in map(Requirement, requirements):
            if each.marker and not each.marker.evaluate(
                {**environment, "extra": extra}
            ):
                continue
            todo += [(_normal(each.name), one) for one in ["", *each.extras]]
    return sorted({name for name, _ in seen})


def missing(
    roots: Iterable[str],
    constraints: dict[str, str],
    machine: Machine,
    replace: Iterable[str] = REPLACED,
    without: Iterable[str] = (),
) -> list[str]:
    """``NAME==VERSION`` of each package that has to travel.

    constraints: pinned versions by name. What they do not name is no part of an install.
    replace: packages that travel also where the machine has another version.
    without: see :func:`needed`.
    """
    renewed = set(map(_normal, replace))
    found = []
    for name in needed(roots, machine, without):
        pinned, there = constraints.get(name), machine.packages.get(name)
        if pinned is None:
            continue
        if there is None or (name in renewed and there != pinned):
            found.append(f"{name}=={pinned}")
    return found


def fetch(pins: Iterable[str], folder: Path, python: str) -> None:
    """Download wheels for the target with pip, one by one; an older one stays.

    Raises:
        CarryError: there is no pip, or some have no wheel for the target. The message
            names them.
    """
    failed, pip = [], _pip()
    platforms = [f"--platform={each}" for each in PLATFORMS]
    for pin in pins:
        name, version = _pin(pin)
        if any(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl")):
            continue
        done = subprocess.run(
            [
                *pip,
                "download", "--quiet", "--no-deps",
                "--only-binary=:all:", "--implementation=cp",
                f"--python-version={python}", *platforms, "--platform=manylinux2014_x86_64",
                "--platform=manylinux1_x86_64", "-d", str(folder), pin,
            ],
            check=False,
        )  # fmt: skip
        if done.returncode:
            failed.append(pin)
    if failed:
        raise CarryError(
            f"no wheel for Python {python} was found of {', '.join(failed)}: leave them "
            "out with --without, or put wheels into the folder of --wheels."
        )


def _pip() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip3") or shutil.which("pip")
    if found is None:
        raise CarryError("pip is not installed: `python -m ensurepip` installs it.")
    return [found]


class _Parts(io.RawIOBase):
    """A file that is written in parts of at most ``size`` bytes."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size
        self._file: IO[bytes] | None = None
        self._room = 0
        self.names: list[str] = []

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        rest = memoryview(data)
        while rest:
            if not self._room:
                self._next()
            assert self._file is not None
            now = rest[: self._room]
            self._file.write(now)
            self._room -= len(now)
            rest = rest[len(now) :]
        return len(data)

    def _next(self) -> None:
        if self._file is not None:
            self._file.close()
        self.names.append(f"part-{len(self.names):03}")
        self._file = (self._folder / self.names[-1]).open("wb")
        self._room = self._size

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()


def pack(
    wheels: Iterable[Path],
    parts: Path,
    *,
    part_bytes: int = PART_BYTES,
    left_out: Iterable[str] = LEFT_OUT,
) -> list[str]:
    """Write the wheels' modules as parts, and the manifest. Returns the parts' names.

    Wheels are unpacked before, since their own compression is worse. Of their data
    folders only modules are kept: no scripts, headers or manuals.

    Raises:
        CarryError: the folder has parts, or two wheels are of one package.
    """
    parts.mkdir(parents=True, exist_ok=True)
    if any(parts.iterdir()):
        raise CarryError(f"{parts} is not empty.")
    packages: dict[str, str] = {}
    patterns = tuple(left_out)
    writer = _Parts(parts, part_bytes)
    # Level 1: PyTorch's libraries hardly shrink, and hours are not worth the rest.
    with (
        writer,
        lzma.open(cast(IO[bytes], writer), "wb", preset=1) as packed,
        tarfile.open(fileobj=packed, mode="w|") as archive,
    ):
        for wheel in sorted(wheels):
            name, version, *_ = wheel.name.split("-")
            if _normal(name) in packages:
                raise CarryError(f"there are two wheels of {_normal(name)}.")
            packages[_normal(name)] = version
            size = _add(wheel, archive, patterns)
            if size >= LARGE:
                print(f"{name} {version}: {size / 1e6:,.0f} MB", flush=True)
    sums = {name: _sha256(parts / name) for name in writer.names}
    manifest = {"parts": sums, "packages": packages}
    (parts / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return writer.names


def _add(wheel: Path, archive: tarfile.TarFile, left_out: tuple[str, ...]) -> int:
    """Returns the bytes of the files that were added."""
    size = 0
    with zipfile.ZipFile(wheel) as files:
        for info in files.infolist():
            place = _place(info.filename)
            if place is None or any(fnmatch(place, each) for each in left_out):
                continue
            entry = tarfile.TarInfo(place)
            entry.size, entry.mode = info.file_size, 0o755
            with files.open(info) as content:
                archive.addfile(entry, content)
            size += entry.size
    return size


def _place(name: str) -> str | None:
    """Where a wheel's file belongs in the folder of modules. None: nowhere."""
    if name.endswith("/"):
        return None
    folder, found, rest = name.partition("/")
    if not (found and folder.endswith(".data")):
        return name
    kind, _, path = rest.partition("/")
    return path if kind in ("purelib", "platlib") else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Unpack -------------------------------------------------------------------------------


class _Joined(io.RawIOBase):
    """The parts as one file."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._blocks = self._read(paths)
        self._rest = b""

    @staticmethod
    def _read(paths: Iterable[Path]) -> Iterator[bytes]:
        for path in paths:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    yield block

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        self._rest = self._rest or next(self._blocks, b"")
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def check(parts: Path) -> list[Path]:
    """All parts, in order.

    Raises:
        CarryError: a part is missing or has another checksum. The message names all.
    """
    manifest = parts / MANIFEST
    if not manifest.exists():
        raise CarryError(f"{parts} has no {MANIFEST}.")
    sums: dict[str, str] = json.loads(manifest.read_text())["parts"]
    absent = [name for name in sums if not (parts / name).exists()]
    if absent:
        raise CarryError(f"{parts} lacks {', '.join(absent)}: send these.")
    damaged = [name for name, known in sums.items() if _sha256(parts / name) != known]
    if damaged:
        raise CarryError(f"damaged, send again: {', '.join(damaged)}.")
    return [parts / name for name in sums]


def unpack(parts: Path, site: Path) -> dict[str, str]:
    """Check the parts and unpack them into ``site``. Returns versions by package.

    Raises:
        CarryError: a part is missing or damaged; nothing was unpacked.
    """
    joined = io.BufferedReader(cast(Any, _Joined(check(parts))))
    site.mkdir(parents=True, exist_ok=True)
    with (
        lzma.open(joined) as packed,
        tarfile.open(fileobj=packed, mode="r|") as archive,
    ):
        archive.extractall(site, filter="data")
    packages: dict[str, str] = json.loads((parts / MANIFEST).read_text())["packages"]
    return packages


# The command --------------------------------------------------------------------------


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("probe", help="print the packages of this machine")
    packing = commands.add_parser(
        "pack", help="fetch what a machine lacks, and pack it"
    )
    packing.add_argument("parts", type=Path, help="empty folder for the parts")
    packing.add_argument(
        "--machine", type=Path, default=MACHINE, metavar="FILE",
        help="output of probe (default: bare_machine.txt)",
    )  # fmt: skip
    packing.add_argument(
        "--roots", nargs="+", default=own_requirements(), metavar="NAME",
        help="packages that are used, with all that they require (default: the"
        " requirements in pyproject.toml)",
    )  # fmt: skip
    packing.add_argument(
        "--replace", nargs="*", default=list(REPLACED), metavar="NAME",
        help="packages whose pinned version is wanted (default: torch torchvision triton)",
    )  # fmt: skip
    packing.add_argument(
        "--without", nargs="*", default=list(UNUSED), metavar="NAME",
        help="packages to leave out, with what only they require (default: "
        f"{' '.join(UNUSED)})",
    )  # fmt: skip
    packing.add_argument(
        "--wheels", type=Path, metavar="DIR", help="keep the wheels here, and take those there"
    )  # fmt: skip
    packing.add_argument(
        "--list", action="store_true", help="only print the packages that would travel"
    )
    unpacking = commands.add_parser("unpack", help="check the parts and unpack them")
    unpacking.add_argument("parts", type=Path, help="folder with the parts")
    unpacking.add_argument("site", type=Path, help="folder for PYTHONPATH")
    return parser.parse_args(argv)


def run_pack(options: argparse.Namespace) -> None:
    machine = Machine.read(options.machine)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = dict(_pin(line) for line in lines if "==" in line)
    pins = missing(
        options.roots, constraints, machine, options.replace, options.without
    )
    if options.list:
        print("\n".join(pins))
        return
    with tempfile.TemporaryDirectory() as scratch:
        wheels = options.wheels or Path(scratch)
        wheels.mkdir(parents=True, exist_ok=True)
        fetch(pins, wheels, machine.python)
        names = pack(wheels.glob("*.whl"), options.parts)
    print(f"packages: {len(pins)}, parts: {len(names)}, in {options.parts}")


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    try:
        if options.command == "probe":
            print(probe())
        elif options.command == "pack":
            run_pack(options)
        else:
            packages = unpack(options.parts, options.site)
            print(f"{len(packages)} packages in {options.site}")
    except CarryError as error:
        print(f"carry.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
