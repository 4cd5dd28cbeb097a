"""SGLang's code without an accelerator: its layers, drafts, memory and ranks on a CPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import torch
from sglang.srt.configs import hybrid_arch
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import dp_attention
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.moe import fused_moe_native
from sglang.srt.layers.moe.token_dispatcher import standard
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.runtime_context import get_exec

from sgl_kernel_ext import draft_verification as drafts
from sgl_kernel_ext import recurrent_layers as kernels

from . import plain_decoder
from .cpu_attention import BatchInvariantAttention, CpuAttention, FastAttention

# Backends that SGLang chooses for some models whatever the device is.
NAMES = ("torch_native", "triton")


def make_backend(model_runner: Any) -> TorchNativeAttnBackend:
    """SGLang's backend where it is right, and ours where it is not."""
    model = model_runner.model_config
    if model_runner.use_mla_backend:
        # Latent attention reads the latents of a prompt, as that of decodes does: SGLang's
        # ``torch_native`` attention takes the latents in the pool for expanded KV.
        from sglang.srt.models.deepseek_common import (
            attention_backend_handler as handlers,
        )

        for name in NAMES:
            handlers.AttentionBackendRegistry.register(
                name, lambda *_: handlers.AttnForwardMethod.MLA
            )
    for layers, functions in (
        (hybrid_arch.hybrid_gdn_config(model), _DELTA_NETS),
        (hybrid_arch.hybrid_kda_config(model), _KIMI_LAYERS),
        (hybrid_arch.mamba2_config(model), _MAMBA_LAYERS),
    ):
        if layers is not None:
            _replace(functions)
    if get_exec().deterministic.enable_deterministic_inference:
        return BatchInvariantAttention(model_runner)
    speculates = not model_runner.spec_algorithm.is_none()
    more = model.has_attention_sinks or speculates or model_runner.is_hybrid_swa
    if more or getattr(model.hf_text_config, "attn_logit_softcapping", None):
        return CpuAttention(model_runner)
    backend = FastAttention(model_runner)
    plain_decoder.use(model_runner, backend)
    return backend


def register() -> None:
    """Make the backend under the names that SGLang chooses."""
    for name in NAMES:
        register_attention_backend(name)(make_backend)


# Recurrent layers ---------------------------------------------------------------------


def _replace(functions: Mapping[str, Mapping[str, Any]]) -> None:
    """Put our kernels in the place of those that SGLang's modules name."""
    for module, ours in functions.items():
        vars(importlib.import_module(module)).update(ours)


_LINEAR = "sglang.srt.layers.attention.linear"
_NORMS = "sglang.kernels.ops.attention.fla"
_CONVOLUTIONS = {
    "causal_conv1d_fn": kernels.causal_conv1d_fn,
    "causal_conv1d_update": kernels.causal_conv1d_update,
}
_MODELS = "sglang.srt.models"
_DELTA_NETS: dict[str, dict[str, Any]] = {
    f"{_LINEAR}.gdn_backend": {
        **_CONVOLUTIONS,
        "fused_gdn_gating": kernels.fused_gdn_gating,
    },
    f"{_LINEAR}.kernels.gdn_triton": {
        "chunk_gated_delta_rule": kernels.chunk_gated_delta_rule,
        "fused_recurrent_gated_delta_rule_packed_decode": kernels.packed_decode,
    },
    f"{_MODELS}.qwen3_next": {"fused_qkvzba_split_reshape_cat": kernels.split_grouped},
    f"{_MODELS}.qwen3_5": {
        "fused_qkvzba_split_reshape_cat_contiguous": kernels.split_contiguous,
        "fused_sigmoid_mul": kernels.sigmoid_mul,
    },
    f"{_MODELS}.qwen2_moe": {"fused_gate_sigmoid_mul_add": kernels.add_gated},
    f"{_NORMS}.fused_norm_gate": {"rms_norm_gated": kernels.rms_norm_gated},
    f"{_NORMS}.layernorm_gated": {"rms_norm_gated": kernels.rms_norm_then_gate},
}
_KIMI_LAYERS: dict[str, dict[str, Any]] = {
    f"{_LINEAR}.kda_backend": _CONVOLUTIONS,
    f"{_LINEAR}.kernels.kda_triton": {
        "chunk_kda": kernels.chunk_kda,
        "fused_recurrent_kda_packed_decode": kernels.packed_kda_decode,
    },
    f"{_NORMS}.fused_norm_gate": {"rms_norm_gated": kernels.rms_norm_gated},
}
_MAMBA_LAYERS: dict[str, dict[str, Any]] = {
    "sglang.srt.layers.attention.mamba.mamba": {
        **_CONVOLUTIONS,
        "causal_conv1d_fn_triton": kernels.causal_conv1d_fn,
        "causal_conv1d_update_triton": kernels.causal_conv1d_update,
        "mamba_chunk_scan_combined": kernels.mamba_chunk_scan_combined,
        "selective_state_update": kernels.selective_state_update,
    }
}


# Drafts -------------------------------------------------------------------------------

# SGLang's module of this name loads compiled operators when it is imported.
_TREE_MODULE = "sglang.kernels.ops.speculative.reconstruct_tree"


def verify_drafts() -> None:
    """Have SGLang's workers draft and verify by PyTorch. Later calls do nothing."""
    from .draft_steps import DraftBackends

    links = ModuleType(_TREE_MODULE)
    vars(links)["reconstruct_indices_from_tree_mask_func"] = drafts.tree_links
    sys.modules.setdefault(_TREE_MODULE, links)
    _replace(
        {
            "sglang.srt.mem_cache.allocation": {
                "assign_req_to_token_pool_func": drafts.assign_slots,
            },
            "sglang.srt.speculative.eagle_utils": {
                "build_tree_kernel_efficient_func": drafts.build_tree,
                "verify_tree_greedy_func": drafts.verify_greedy,
                "tree_speculative_sampling_target_only": drafts.verify_sampling,
                "top_k_renorm_prob": drafts.keep_top_k,
                "top_p_renorm_prob": drafts.keep_top_p,
            },
            "sglang.srt.speculative.eagle_worker_common": {
                "assign_draft_cache_locs_contiguous_func": drafts.drafted_slots,
                "fill_bonus_tokens_func": drafts.last_tokens,
            },
            "sglang.srt.speculative.eagle_worker_v2": {
                "DraftBackendFactory": DraftBackends,
            },
            "sglang.srt.speculative.spec_utils": {
                "fill_front_out_cache_loc_func": drafts.first_slots,
                "fill_accept_out_cache_loc_func": drafts.accepted_slots,
            },
        }
    )
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.speculative import spec_utils

    # Compiling takes longer than many answers.
    compiled = spec_utils._select_top_k_tokens_later
    spec_utils._select_top_k_tokens_later = compiled._torchdynamo_orig_callable

    MHATokenToKVPool._init_kv_copy_and_warmup = _move_natively


def _move_natively(pool: Any) -> None:
    pool._kv_copy_config = None
    pool.use_native_move_kv_cache = True


# Memory and devices -------------------------------------------------------------------

# Modules that ask for pinned memory.
_PINNING_MODULES = ("sglang.srt.lora.layers", "sglang.srt.lora.backend.torch_backend")


class _PageableTorch:
    """torch, for one module: requests for pinned memory are such for ordinary memory."""

    def __init__(self) -> None:
        for name in "empty", "zeros", "tensor":
            setattr(self, name, _unpinned(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def do_without() -> None:
    """Have SGLang's code do without pinned memory and CUDA. Later calls change nothing.

    LoRA adapters ask torch for pinned memory, for which torch raises. Host memory is
    registered with CUDA, also where no device copies from it. Some models ask for the
    current device, which would be CUDA's wherever torch is built for CUDA, and some draft
    models wait for CUDA when they get the embeddings of the model.
    """
    for name in _PINNING_MODULES:
        vars(importlib.import_module(name))["torch"] = _PageableTorch()
    from sglang.srt.mem_cache.pool_host import common

    common.ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, **given: (
        common.alloc_with_host_register(dims, **given | {"pin_memory": False})
    )
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor
    torch.get_device_module = get_device_module
    torch.cuda.synchronize = lambda device=None: None


def _unpinned(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, pin_memory=False, **given: function(*args, **given)


@cache  # as torch's, of which torch.compile asks for the function within
def get_device_module(device: torch.device | str | None = None) -> Any:
    """torch's, for which the current device is the CPU."""
    name = "cpu" if device is None else torch.device(device).type
    return getattr(torch, name)


# Ranks --------------------------------------------------------------------------------

_all_experts = fused_moe_native.moe_forward_native


def use_pytorch() -> None:
    """Have the ranks work together without Triton. Later calls do nothing.

    With attention data parallelism, tokens of all ranks are gathered into one buffer
    between attention and the layers that the ranks share, and scattered again. With expert
    parallelism, a rank leaves out the work of other ranks' experts. SGLang's kernels for
    that need Triton, and its forms without are for its own CPU kernels.
    """
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    standard.mask_dp_pad_moe_topk_ids = mask_padding
    fused_moe_native.moe_forward_native = own_experts
    # Without operators that are registered for accelerators only, and pinned memory.
    parallel_state._is_cpu = forward_batch_info._is_cpu = True
    parallel_state.GroupCoordinator.reduce_scatterv = (  # without NCCL
        lambda group, input_, output=None, sizes=None: (
            group._deterministic_reduce_scatterv(input_, output, sizes)
        )
    )
    # The length in tokens of rows that only pad a step, whose KV is never used.
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda backend: 1


def mask_padding(topk_ids: torch.Tensor) -> None:
    """Give rows that only pad a rank's tokens no expert (-1), in place.

    topk_ids: ``[num_ranks * most_tokens_of_a_rank, experts_per_token]``.
    """
    buffer = dp_attention._DpGatheredBufferWrapper
    counts = buffer.get_dp_global_num_tokens_gpu()
    most = buffer.get_local_dp_buffer_len()
    if counts is None or most <= 0 or len(topk_ids) != len(counts) * most:
        return
    padding = torch.arange(most) >= counts.unsqueeze(1)
    topk_ids[padding.flatten()] = -1


def own_experts(layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> Any:
    """SGLang's experts in PyTorch, where an id of -1 is an expert of another rank.

    x: ``[num_tokens, hidden_size]``, as the result, which is the part of this rank's experts.
    topk_output: with ``topk_ids`` and ``topk_weights`` ``[num_tokens, experts_per_token]``.
    """
    ids, weights = topk_output.topk_ids, topk_output.topk_weights
    if (ids >= 0).all():
        return _all_experts(layer, x, topk_output, config)
    output = torch.zeros_like(x)
    for each in range(ids.shape[1]):
        here = ids[:, each] >= 0
        if here.any():
            one = topk_output._replace(
                topk_ids=ids[here, each : each + 1],
                topk_weights=weights[here, each : each + 1],
            )
            output[here] += _all_experts(layer, x[here], one, config)
    return output
