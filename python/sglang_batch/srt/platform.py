"""SGLang on a machine without an accelerator.

SGLang asks every installed ``sglang.srt.platforms`` entry point whether it wants
to be the platform. This one says yes only where nothing else can: torch sees no
accelerator, nobody asked for SGLang's own CPU kernels, and no other platform
plugin is installed. The stock install then serves models with torch-native ops,
which is slow and exact: good for a laptop, for tests and for CI.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

from . import serve_help

PLATFORM_GROUP = "sglang.srt.platforms"
PLATFORM_NAME = "sglang_batch_cpu"
PLATFORM_CLASS = "sglang_batch.srt.cpu_platform.TorchNativeCpuPlatform"


def activate() -> str | None:
    """The class path of the platform to use, or None to step aside."""
    serve_help.install()
    if os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME:
        return PLATFORM_CLASS
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    if any(ep.name != PLATFORM_NAME for ep in entry_points(group=PLATFORM_GROUP)):
        return None
    return None if _accelerator_present() else PLATFORM_CLASS


def _accelerator_present() -> bool:
    import torch

    return bool(torch.accelerator.is_available())
