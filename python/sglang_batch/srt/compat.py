"""The SGLang release this package extends, and the hooks it takes there.

The signatures of what is overridden are checked in ``seams.py``.
"""

from __future__ import annotations

from sglang.version import __version__ as installed_version

from .. import __version__
from ..errors import EngineError, UnsupportedSGLang

SUPPORTED_VERSION = "0.5.23"

__all__ = [
    "SUPPORTED_VERSION",
    "check_hooks_took",
    "check_version",
    "installed_version",
]


def check_version() -> None:
    """Raise :class:`UnsupportedSGLang` unless the supported release is installed."""
    if installed_version != SUPPORTED_VERSION:
        raise UnsupportedSGLang(
            f"--offline-batch: sglang-batch {__version__} extends sglang "
            f"{SUPPORTED_VERSION}, but sglang {installed_version} is installed; "
            f"run `pip install sglang=={SUPPORTED_VERSION}` or remove the flag."
        )


def check_hooks_took(targets: tuple[str, ...]) -> None:
    """Raise :class:`EngineError` for a hook SGLang did not apply.

    SGLang logs a hook that fails to apply and goes on without it; a server that
    looks like an offline one and is not would be worse than none.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    for target in targets:
        if target not in HookRegistry._patched:
            raise EngineError(
                f"--offline-batch: the hook on {target} did not take effect; "
                "see the log above for SGLang's reason, or remove the flag."
            )
