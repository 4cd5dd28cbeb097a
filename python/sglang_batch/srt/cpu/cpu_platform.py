"""The platform that ``sglang_batch.srt.plugin.platform.activate`` names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang.srt.arg_groups import choices
from sglang.srt.platforms import interface
from sglang.srt.platforms.cpu import CpuDeviceMixin


class TorchNativeCpuPlatform(CpuDeviceMixin, interface.SRTPlatform):  # type: ignore[misc]
    """Serves on a CPU with torch-native ops only.

    It declares itself out of tree, so that SGLang picks the torch-native form of every
    op and never needs its CUDA or AMX kernel libraries.
    """

    _enum = interface.PlatformEnum.OOT
    capabilities = interface.PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Let SGLang take our attention for deterministic inference, and LoRA without a GPU."""
        if server_args.enable_lora or server_args.lora_paths:
            server_args.lora_backend = "torch_native"
        name = self.get_default_attention_backend()
        for names in (
            choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
            choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
        ):
            if name not in names:
                names.append(name)
        flags = ("enable_deterministic_inference", "rl_on_policy_target")
        chosen = server_args.attention_backend in (None, "intel_amx")  # by SGLang
        if chosen and any(getattr(server_args, flag) for flag in flags):
            server_args.attention_backend = name

    def get_device(self, device_id: int = 0) -> str:
        # SGLang uses this as ``--device``, which is a string.
        return "cpu"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> Any:
        import torch

        return torch.profiler.ProfilerActivity.CPU

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in ("STANDALONE", "EAGLE", "EAGLE3")

    def get_speculative_worker_cls(self, algorithm: str) -> type | None:
        # SGLang's own. It asks right before it makes one, which is when its kernels are
        # replaced.
        from . import cpu_backends

        cpu_backends.verify_drafts()
        return None

    def get_speculative_cache_locs_fn(self) -> Callable[..., Any]:
        from sgl_kernel_ext import draft_verification

        return draft_verification.assigned_slots

    def init_backend(self) -> None:
        # Imported where a model is: it imports torch.
        from sglang.srt import batch_invariant_ops
        from sglang.srt.constrained import xgrammar_backend as grammars

        from . import cpu_attention, cpu_backends, packed_linears, token_layers

        packed_linears.use()
        token_layers.use(self.get_dispatch_key_name())
        cpu_backends.use_pytorch()
        cpu_backends.register()
        cpu_backends.do_without()
        batch_invariant_ops.enable_batch_invariant_mode = cpu_attention.use_rows
        # Without a grammar, as in reasoning, SGLang masks tokens on accelerators only.
        masked = partial(grammars.XGrammarGrammar.apply_vocab_mask, None)
        grammars.XGrammarGrammarBackend.apply_vocab_mask = masked
