"""Which attention a model gets on a CPU."""

from __future__ import annotations

from typing import Any

from sglang.srt.configs.hybrid_arch import (
    hybrid_gdn_config,
    hybrid_kda_config,
    mamba2_config,
)
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.runtime_context import get_exec

from . import kimi_attention, linear_attention, state_space
from .batch_invariance import BatchInvariantAttention
from .cpu_attention import CpuAttention

# Backends that SGLang chooses for some models whatever the device is.
NAMES = ("torch_native", "triton")


def make_backend(model_runner: Any) -> TorchNativeAttnBackend:
    """SGLang's backend where it is right, and ours where it is not."""
    model = model_runner.model_config
    if model_runner.use_mla_backend:
        _attend_latents()
    if hybrid_gdn_config(model) is not None:
        linear_attention.use_pytorch()
    if hybrid_kda_config(model) is not None:
        kimi_attention.use_pytorch()
    if mamba2_config(model) is not None:
        state_space.use_pytorch()
    if get_exec().deterministic.enable_deterministic_inference:
        return BatchInvariantAttention(model_runner)
    speculates = not model_runner.spec_algorithm.is_none()
    if model_runner.is_hybrid_swa or model.has_attention_sinks or speculates:
        return CpuAttention(model_runner)
    return TorchNativeAttnBackend(model_runner)


def _attend_latents() -> None:
    """Have latent attention read the latents of a prompt, as that of decodes does.

    SGLang expands the KV of new prompts. Its ``torch_native`` attention reads the pool,
    which has only latents, as if they were that KV.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    for name in NAMES:
        handlers.AttentionBackendRegistry.register(
            name, lambda *_: handlers.AttnForwardMethod.MLA
        )


def register() -> None:
    """Make the backend under the names that SGLang chooses."""
    for name in NAMES:
        register_attention_backend(name)(make_backend)
