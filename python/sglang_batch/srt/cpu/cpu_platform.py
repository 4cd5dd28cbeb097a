"""The platform that ``sglang_batch.srt.plugin.platform.activate`` names."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import (
    PlatformCapabilities,
    PlatformEnum,
    SRTPlatform,
)


class TorchNativeCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """Serves on a CPU with torch-native ops only.

    It declares itself out of tree, so that SGLang picks the torch-native form of every
    op and never needs its CUDA or AMX kernel libraries.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_device(self, device_id: int = 0) -> str:
        # SGLang uses this as ``--device``, which is a string.
        return "cpu"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def init_backend(self) -> None:
        # Imported where a model is: it imports torch.
        from . import cpu_attention, no_accelerator, parallel_ranks

        parallel_ranks.use_pytorch()
        cpu_attention.register()
        no_accelerator.do_without()
