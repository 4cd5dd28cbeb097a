"""The supported SGLang release, and the parts of its private API that we use.

``private_api.json`` has each function that we override, hook or call. The next release, or
another plugin, may change them. :func:`check_private_api` compares the installed SGLang with
the list before the server starts, so that a difference becomes an error message and not a
wrong batch hours later. ``python -m sglang_batch.upgrade`` compares another release.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ... import __version__
from ...errors import UnsupportedSGLang
from .sglang_release import Release, installed_release, without_self

logger = logging.getLogger(__name__)

# The module that compares releases.
COMPARE = "sglang_batch.upgrade"
# The SGLang release that this package extends.
SUPPORTED_VERSION = "0.5.23"
LIST = Path(__file__).with_name("private_api.json")
PRIVATE, CALL, INTERFACE, FOLLOWED = "private", "call", "interface", "followed"

# Without its type and default, a parameter prints as its stars and name.
PLAIN: Any = {"annotation": inspect.Parameter.empty, "default": inspect.Parameter.empty}


class PrivateFunction(NamedTuple):
    """A function of SGLang that we use.

    kind: ``PRIVATE``; ``CALL`` if it has a public name and is only called; ``INTERFACE`` if
        SGLang declares it for extensions, in a registry or a base class; ``FOLLOWED`` if
        ours relies on it without calling it.
    parameters, digest: of a :class:`~.sglang_release.Definition`.
    """

    use: str
    kind: str
    parameters: str
    digest: str


PrivateApi: TypeAlias = Mapping[str, Mapping[str, PrivateFunction]]
"""By module or ``module:Class``, and by name."""

_RECORD = json.loads(LIST.read_bytes())
PRIVATE_API: PrivateApi = {
    place: {name: PrivateFunction(**entry) for name, entry in names.items()}
    for place, names in _RECORD["functions"].items()
}


def digest_of(release: Release, files: Iterable[str]) -> str:
    """The digest of these files of a release."""
    texts = [(release.root / file).read_bytes() for file in sorted(files)]
    return hashlib.sha256(b"".join(texts)).hexdigest()


def check_private_api(api: PrivateApi = PRIVATE_API) -> None:
    """Compare :data:`PRIVATE_API` with the installed SGLang.

    It takes milliseconds where SGLang's scheduler is imported, and ten seconds elsewhere.

    Raises:
        UnsupportedSGLang: names the first function that is missing or has other
            parameters, the expected ones and those found.
    """
    for place, names in api.items():
        module, _, owner = place.partition(":")
        try:
            holder: Any = importlib.import_module(module)
            holder = getattr(holder, owner) if owner else holder
        except (ImportError, AttributeError):
            raise _unsupported(place.replace(":", "."), "to exist", "nothing") from None
        for name, function in names.items():
            expected = function.parameters
            found = parameters(inspect.getattr_static(holder, name, None))
            if found != expected:
                path = f"{owner or module}.{name}"
                raise _unsupported(path, f"({expected})", f"({found})")


def warn_of_changes() -> None:
    """Log the functions of :data:`PRIVATE_API` with other code than in the supported release,
    as in a build of somebody's own. Takes milliseconds, or seconds if a file differs."""
    release = installed_release()
    if digest_of(release, _RECORD["files"]) == _RECORD["digest"]:
        return
    changed = [
        f"{place}.{name}"
        for place, names in PRIVATE_API.items()
        for name, function in names.items()
        if release.find(place, name).digest != function.digest
    ]
    if changed:
        logger.warning(
            "--offline-batch: the installed sglang %s has other code than the one that "
            "sglang-batch %s was tested with, in %s; if results are wrong, run `pip install "
            "--force-reinstall --no-deps sglang==%s`.",
            *(release.version, __version__, ", ".join(changed), SUPPORTED_VERSION),
        )


def check_version() -> None:
    """Raise :class:`UnsupportedSGLang` unless the supported release is installed."""
    from sglang.version import __version__ as installed  # of the code, wherever it lies

    if installed != SUPPORTED_VERSION:
        raise UnsupportedSGLang(
            f"--offline-batch: sglang-batch {__version__} extends sglang "
            f"{SUPPORTED_VERSION}, but sglang {installed} is installed; "
            f"run `pip install sglang=={SUPPORTED_VERSION}` or remove the flag. "
            f"`python -m {COMPARE} --against {installed}` tells the differences."
        )


def parameters(target: Any) -> str:
    """The parameters of a function as in the list, "missing" if it cannot be called."""
    if isinstance(target, staticmethod | classmethod):
        target = target.__func__
    if not callable(target) or isinstance(target, property):
        return "missing"
    given = inspect.signature(target).parameters.values()
    plain = inspect.Signature([each.replace(**PLAIN) for each in given])
    return without_self(str(plain)[1:-1])


def _unsupported(path: str, expected: str, found: str) -> UnsupportedSGLang:
    from .support import STOCK_SCHEDULER

    return UnsupportedSGLang(
        f"--offline-batch: sglang-batch {__version__} expects {path} {expected} and "
        f"found {found} in the installed sglang {installed_release().version}; run "
        f"`pip install sglang=={SUPPORTED_VERSION}` without other plugins that change "
        f"it, or give {STOCK_SCHEDULER}."
    )
