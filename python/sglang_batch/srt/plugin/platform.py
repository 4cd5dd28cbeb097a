"""SGLang on a machine without an accelerator.

SGLang calls every installed ``sglang.srt.platforms`` entry point to find its platform.
This one offers itself only where torch sees no accelerator, SGLang's own CPU kernels are
not selected and no other platform plugin is installed. Models then run with torch-native ops,
which is slow but exact: good enough for a laptop, for tests and for CI.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

from . import serve_help

PLATFORM_GROUP = "sglang.srt.platforms"
PLATFORM_NAME = "sglang_batch_cpu"
PLATFORM_CLASS = "sglang_batch.srt.cpu.cpu_platform.TorchNativeCpuPlatform"


def activate() -> str | None:
    """The class path of our platform, or None where it should not be used."""
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
