"""The SGLang release this package extends."""

from __future__ import annotations

from sglang.version import __version__ as installed_version

from ... import __version__
from ...errors import UnsupportedSGLang

SUPPORTED_VERSION = "0.5.23"

__all__ = ["SUPPORTED_VERSION", "check_version", "installed_version"]


def check_version() -> None:
    """Raise :class:`UnsupportedSGLang` unless the supported release is installed."""
    if installed_version != SUPPORTED_VERSION:
        raise UnsupportedSGLang(
            f"--offline-batch: sglang-batch {__version__} extends sglang "
            f"{SUPPORTED_VERSION}, but sglang {installed_version} is installed; "
            f"run `pip install sglang=={SUPPORTED_VERSION}` or remove the flag."
        )
