"""Servers whose mixed steps are never split."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from ..compat.support import is_deterministic
from ..compat.tiers import keeps_states

# Names of the number of experts in configurations of models.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def why_never(model_runner: Any) -> str | None:
    """Why no step of a server is split, or None if steps may be.

    Args:
        model_runner: SGLang's, with its attention backend and pools.
    """
    arguments, model = model_runner.server_args, model_runner.model_config
    parallel = get_parallel()
    ranks = max(parallel.tp_size, parallel.pp_size, parallel.attn_dp_size)
    on_gpu = model_runner.device == "cuda"
    found = (
        (not model_runner.is_generation, "a model that does not decode"),
        (
            ranks > 1,
            "several ranks, whose halves would need communicators of their own",
        ),
        (not on_gpu and model_runner.device != "cpu", f"a {model_runner.device}"),
        (on_gpu and torch.version.hip is not None, "ROCm, where nobody has tried it"),
        (not model_runner.spec_algorithm.is_none(), "drafts"),
        (model_runner.use_mla_backend, "latent attention"),
        (model.is_encoder_decoder, "an encoder-decoder model"),
        # A step that is run again after a fault would advance them twice.
        (keeps_states(model), "recurrent states"),
        (
            _is_unquantised_mixture(model_runner),
            "a mixture of experts in 16 or 32 bits",
        ),
        (model_runner.lora_manager is not None, "adapters"),
        (is_deterministic(arguments), "deterministic inference"),
        (arguments.enable_torch_compile, "--enable-torch-compile"),
        (arguments.enable_two_batch_overlap, "--enable-two-batch-overlap"),
        (arguments.enable_pdmux, "--enable-pdmux"),
        (
            arguments.enable_return_routed_experts
            or arguments.enable_return_indexer_topk,
            "data that is returned for each token",
        ),
        (model_runner.canary_manager is not None, "--kv-canary"),
        (model_runner.hisparse_coordinator is not None, "sparse attention"),
        (
            hasattr(model_runner.model, "prepare_forward_batch")
            or hasattr(model_runner.model, "prepare_for_forward"),
            "a model that prepares its batches",
        ),
        (on_gpu and _has_workspaces(model_runner.model), "kernels with one workspace"),
    )
    return next((reason for applies, reason in found if applies), None)


def _is_unquantised_mixture(model_runner: Any) -> bool:
    """Whether a second read of the weights, of most experts, costs more than it saves."""
    if model_runner.model_config.quantization:
        return False
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    config = model_runner.model_config.hf_text_config
    modules = model_runner.model.modules()
    return any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS) or any(
        isinstance(module, FusedMoE) for module in modules
    )


def _has_workspaces(model: Any) -> bool:
    """Whether layers keep scratch memory, which two forwards would share (Marlin)."""
    return any(
        isinstance(getattr(module, "workspace", None), torch.Tensor)
        for module in model.modules()
    )
