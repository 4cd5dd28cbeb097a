"""Refuses, at startup, attention that would go wrong."""

from __future__ import annotations

from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from ...errors import ConfigError
from ..compat.scheduler_types import AttentionLayer, Model, ModelRunner
from ..compat.support import ATTENTION_BACKEND


def check_model(model_runner: ModelRunner) -> None:
    """Raise a ConfigError for attention that the kernels do not support."""
    found = model_obstacle(model_runner)
    if found is not None:
        raise ConfigError(
            f"--attention-backend {ATTENTION_BACKEND} does not work with {found}; "
            "drop the option to let SGLang choose."
        )


def model_obstacle(model_runner: ModelRunner) -> str | None:
    """The feature of the model's attention that the kernels lack, or None if none."""
    model = model_runner.model
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        return "attention sinks"
    config, tp_size = model_runner.model_config, get_parallel().attn_tp_size
    found = _pool_obstacle(model_runner)
    if found is not None:
        return found
    heads = (
        config.get_num_attention_heads(tp_size),
        config.get_num_kv_heads(tp_size),
        config.head_dim,
    )
    for layer in attention_layers(model):
        own = layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim
        found = _layer_obstacle(layer)
        if found is None and own != heads:
            found = f"layers with heads of their own ({own}, the model has {heads})"
        if found is not None:
            return found
    return None


def check_attention_ranks(model_runner: ModelRunner) -> None:
    """Refuse a model whose attention SGLang splits over ranks that have other tokens.

    Raises:
        ConfigError: names the model and the way out.
    """
    parallel = get_parallel()
    layers = attention_layers(model_runner.model)
    if not parallel.attn_dp_enabled or not layers:
        return
    config = model_runner.model_config
    heads = config.get_num_attention_heads(parallel.attn_tp_size)
    if max(layer.tp_q_head_num for layer in layers) < heads:
        architecture = (config.hf_config.architectures or ["this model"])[0]
        raise ConfigError(
            f"{architecture} does not work with --attn-dp-size {parallel.attn_dp_size}: "
            f"SGLang splits its attention over all {parallel.tp_size} ranks, and each "
            "would have other requests; drop the flag, or take --dp-size for replicas."
        )


def attention_layers(model: Model) -> list[AttentionLayer]:
    """The model's attention layers."""
    return [each for each in model.modules() if isinstance(each, RadixAttention)]


def _pool_obstacle(model_runner: ModelRunner) -> str | None:
    pool = model_runner.token_to_kv_pool
    if model_runner.model_config.attention_arch != AttentionArch.MHA:
        return "latent attention (MLA)"
    if type(pool) is not MHATokenToKVPool:
        return f"a {type(pool).__name__}"
    if pool.dtype != model_runner.dtype:
        return f"a KV cache of {pool.dtype} with a model of {model_runner.dtype}"
    return None


def _layer_obstacle(layer: AttentionLayer) -> str | None:
    if layer.sliding_window_size > 0:
        return f"a sliding window of {layer.sliding_window_size} tokens"
    if layer.logit_cap > 0:
        return f"logits capped at {layer.logit_cap}"
    if layer.qk_head_dim != layer.v_head_dim:
        return f"heads of {layer.qk_head_dim} values for K, {layer.v_head_dim} for V"
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        return f"attention of type {layer.attn_type}"
    if layer.xai_temperature_len > 0:
        return "a temperature that changes with the position"
    if layer.use_irope:
        return "layers that attend to one chunk of the context only"
    if layer.pos_encoding_mode != "NONE":
        return f"positions of the kind {layer.pos_encoding_mode} in attention itself"
    return None
