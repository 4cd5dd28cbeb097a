"""The supported SGLang release, and the parts of its private API that we use.

``private_api.txt`` has each method that we override or call, and its parameters. The next
release, or another plugin, may change them. :func:`check_private_api` compares the installed SGLang with
:data:`PRIVATE_API` before the server starts, so that a difference becomes an error message
and not a wrong batch hours later. It is also the code to read when a new release comes out.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from sglang.version import __version__ as installed_version

from ... import __version__
from ...errors import UnsupportedSGLang
from .support import STOCK_SCHEDULER

# The SGLang release that this package extends.
SUPPORTED_VERSION = "0.5.23"

# Stand for the parameters of a property, and of a field of a class with slots.
PROPERTY = "(property)"
ATTRIBUTE = "(attribute)"
# Without its type and default, a parameter prints as its stars and name.
PLAIN: Any = {"annotation": inspect.Parameter.empty, "default": inspect.Parameter.empty}

_ENTRY = re.compile(r" {4}(\w+)(?: (\(\w+\))|\((.*)\)): (.+)")


def _read(table: str) -> dict[str, dict[str, tuple[str, str]]]:
    api: dict[str, dict[str, tuple[str, str]]] = {}
    text = re.sub(r"\n {8}", " ", re.sub(r"(?m)^ *#.*\n", "", table)).strip()
    for line in text.split("\n"):
        if not line.startswith(" "):
            place = line
            api[place] = {}
        elif entry := _ENTRY.fullmatch(line):
            name, kind, expected, use = entry.groups()
            api[place][name] = kind or expected, use
        else:
            raise ValueError(f"not an entry of the private API: {line}")
    return api


PRIVATE_API = _read(files(__package__).joinpath("private_api.txt").read_text("utf-8"))


def check_private_api(
    api: Mapping[str, Mapping[str, tuple[str, str]]] = PRIVATE_API,
) -> None:
    """Compare :data:`PRIVATE_API` with the installed SGLang.

    It takes milliseconds where SGLang's scheduler is imported, and ten seconds elsewhere.

    Raises:
        UnsupportedSGLang: names the first method that is missing or has other
            parameters, the expected ones and those found.
    """
    for place, names in api.items():
        module, _, owner = place.partition(":")
        try:
            holder: Any = importlib.import_module(module)
            holder = getattr(holder, owner) if owner else holder
        except (ImportError, AttributeError):
            raise _unsupported(place.replace(":", "."), "to exist", "nothing") from None
        for name, (expected, _use) in names.items():
            found = parameters(inspect.getattr_static(holder, name, None))
            if found != expected:
                path = f"{owner or module}.{name}"
                raise _unsupported(path, f"({expected})", f"({found})")


def check_version() -> None:
    """Raise :class:`UnsupportedSGLang` unless the supported release is installed."""
    if installed_version != SUPPORTED_VERSION:
        raise UnsupportedSGLang(
            f"--offline-batch: sglang-batch {__version__} extends sglang "
            f"{SUPPORTED_VERSION}, but sglang {installed_version} is installed; "
            f"run `pip install sglang=={SUPPORTED_VERSION}` or remove the flag."
        )


def parameters(target: Any) -> str:
    """The parameters of a function as in the table. ``PROPERTY`` for a property,
    ``ATTRIBUTE`` for a field, and "missing" for anything else that cannot be called."""
    if isinstance(target, property):
        return PROPERTY
    if inspect.ismemberdescriptor(target):
        return ATTRIBUTE
    if isinstance(target, staticmethod | classmethod):
        target = target.__func__
    if not callable(target):
        return "missing"
    names: list[str] = []
    keyword_only = False
    for parameter in inspect.signature(target).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            names.append("*")
        keyword_only |= parameter.kind in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        )
        names.append(str(parameter.replace(**PLAIN)))
    return ", ".join(names[1:] if names[:1] in (["self"], ["cls"]) else names)


def _unsupported(path: str, expected: str, found: str) -> UnsupportedSGLang:
    return UnsupportedSGLang(
        f"--offline-batch: sglang-batch {__version__} expects {path} {expected} and "
        f"found {found} in the installed sglang {installed_version}; run "
        f"`pip install sglang=={SUPPORTED_VERSION}` without other plugins that change "
        f"it, or give {STOCK_SCHEDULER}."
    )
