"""Whether an engine reads shared prefixes once, and in front of which backend.

It does if ``--attention-backend`` names our backend or the setting ``attention`` an
implementation, and with "auto" wherever model and device are supported and a trial succeeds.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel

from sgl_kernel_ext.shared_prefix_attention import configs

from ...errors import ConfigError, EngineError
from ..compat import support
from ..compat.support import ATTENTION_BACKEND
from . import attention_backend
from .attention_backend import Layers, heads_of

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# Classes of SGLang's backends that can share. They prepare a step in
# ``init_forward_metadata`` or ``..._out_graph``, never in both.
CLASSES = (
    "FlashAttentionBackend", "FlashInferAttnBackend", "TritonAttnBackend",
    "TorchNativeAttnBackend",
)  # fmt: skip


def make_backend(model_runner: ModelRunner) -> AttentionBackend:
    """SGLang's factory for ``--attention-backend shared_prefix``.

    The result is the backend that SGLang itself would choose, made to share, or SGLang's
    Triton backend where that one cannot share. A draft model's is as it is. Errors are those
    of :func:`share_by_default`.
    """
    from sglang.srt.arg_groups.model_override_base import get_default_attn_backend
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    drafts = model_runner.is_draft_worker
    found = None if drafts else model_obstacle(model_runner)
    if found is not None:
        raise ConfigError(
            f"--attention-backend {ATTENTION_BACKEND} does not work with {found}; "
            "drop the option to let SGLang choose."
        )
    name = get_default_attn_backend(
        model_runner.server_args, False, model_runner.model_config
    )
    layers = find_layers(model_runner)
    # The model calls a backend of a name that it does not know as it calls Triton's.
    names = (
        ("torch_native",) if layers.latent else ("fa3", "flashinfer", "torch_native")
    )
    make = ATTENTION_BACKENDS[name if name in names else "triton"]
    backend: AttentionBackend = make(model_runner)
    if not drafts:
        attention_backend.share(backend, model_runner, layers)
    return backend


def share_by_default(model_runner: ModelRunner) -> None:
    """Make the backend that SGLang has chosen share, if the settings allow it.

    Raises:
        ConfigError: the implementation that the setting names does not support the model,
            the backend or the machine.
        EngineError: its kernels fail here.
    """
    server_args = model_runner.server_args
    wanted = server_args.offline_config.attention
    given = [getattr(server_args, name) for name in support.ATTENTION_ARGUMENTS]
    named = list(filter(None, given))
    if wanted == "stock" or ATTENTION_BACKEND in named:
        return
    # SGLang has put the backend of recurrent layers beside it.
    backend = getattr(model_runner.attn_backend, "full_attn_backend", None)
    backend = backend or model_runner.attn_backend
    automatic = wanted == "auto"
    layers = find_layers(model_runner)
    found = _why_not(model_runner, named) if automatic else None
    found = found or _obstacle(model_runner, type(backend).__name__)
    if automatic and type(backend).__name__ == "FlashInferAttnBackend":
        # The trial does not see how its plans and ours go together in a CUDA graph.
        found = found or next(iter(layers.why_not), None)
    if automatic and layers.latent:
        found = found or "latents, with which no device was measured"
    if found is not None and not automatic:
        raise ConfigError(
            f'attention="{wanted}" does not work with {found}; choose "stock".'
        )
    if found is not None:
        logger.info("Shared prefixes are not read once, because of %s.", found)
        return
    kind = type(backend)
    why = "another rank cannot read shared prefixes once"
    done = True
    try:
        attention_backend.share(backend, model_runner, layers)
    except EngineError as error:
        if not automatic:
            raise
        done, why = False, str(error)
    # Ranks that capture different graphs would wait for one another forever.
    if automatic and not _by_all_ranks(done):
        backend.__class__ = kind
        logger.warning("Shared prefixes are not read once: %s", why)


def _by_all_ranks(done: bool) -> bool:
    parallel = get_parallel()
    if parallel.tp_size == 1:
        return done
    flag = torch.tensor(int(done))
    group = parallel.tp_group.cpu_group
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group)
    return bool(flag)


def _why_not(model_runner: ModelRunner, named: list[str]) -> str | None:
    """The reason why "auto" leaves attention to SGLang, apart from the model's layers."""
    if named:
        return f"the choice of {' and '.join(named)}"
    if support.is_deterministic(model_runner.server_args):
        return "deterministic inference"
    if model_runner.device != "cuda":
        return f"a {model_runner.device}, where attention is not bound by memory"
    if not model_runner.is_generation:
        return "a model that does not decode"
    if model_runner.server_args.enable_torch_compile:
        return "--enable-torch-compile"
    device = model_runner.req_to_token_pool.req_to_token.device
    if configs.device_family(device) == "default":
        return "a device that the kernel has no settings for"
    return None


def _obstacle(model_runner: ModelRunner, kind: str) -> str | None:
    """The backend or feature of the model that does not support sharing, if any."""
    # Ours on a CPU are kinds of the last one.
    if kind not in (*CLASSES, "FastAttention", "CpuAttention"):
        return f"SGLang's {kind}"
    if envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get():
        return "SGLANG_ENABLE_METADATA_GLUE_GRAPH"
    return model_obstacle(model_runner)


def model_obstacle(model_runner: ModelRunner) -> str | None:
    """Why no layer of the model can share, or None if some can."""
    pool = model_runner.token_to_kv_pool
    kind = type(full_pool(pool))
    if kind not in (MHATokenToKVPool, MLATokenToKVPool):
        return f"a {type(pool).__name__}"
    quantised = () if kind is MLATokenToKVPool else (torch.float8_e4m3fn,)
    if pool.dtype not in (model_runner.dtype, *quantised):
        return f"a KV cache of {pool.dtype} with a model of {model_runner.dtype}"
    for layer in attention_layers(model_runner.model):
        # With an encoder, the rows of ``req_to_token`` begin with its tokens.
        if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
            return f"attention of type {layer.attn_type}"
    found = find_layers(model_runner)
    return None if found.shared else next(iter(found.why_not), "no attention layers")


def full_pool(pool: KVCache) -> KVCache:
    """The pool of the full layers, which have one beside windows or recurrent layers."""
    parted = type(pool) in (SWAKVPool, HybridLinearKVPool)
    return pool.full_kv_pool if parted else pool


def find_layers(model_runner: ModelRunner) -> Layers:
    """Decide for each layer. Those that share have heads like the first of them."""
    pool = model_runner.token_to_kv_pool
    full = full_pool(pool)
    latent = isinstance(full, MLATokenToKVPool)
    found = Layers([], [], latent)
    for layer in attention_layers(model_runner.model):
        # Linear attention of some models is of this class, too, and has no KV.
        ids = getattr(pool, "full_attention_layer_id_mapping", (layer.layer_id,))
        if layer.layer_id not in ids:
            continue
        # Prompts have layers of their own, for which the model expands the latents.
        if latent and layer.v_head_dim != full.kv_lora_rank:
            continue
        why_not = _layer_obstacle(layer)
        if why_not is None and heads_of(layer) != heads_of([*found.shared, layer][0]):
            why_not = f"heads of their own ({heads_of(layer)})"
        found.why_not.append(why_not) if why_not else found.shared.append(layer)
    return found


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


def attention_layers(model: torch.nn.Module) -> list[RadixAttention]:
    return [each for each in model.modules() if isinstance(each, RadixAttention)]


def _layer_obstacle(layer: RadixAttention) -> str | None:
    if layer.sliding_window_size > 0:
        return f"a sliding window of {layer.sliding_window_size} tokens"
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        return f"logits capped by {layer.logit_capping_method}"
    if layer.xai_temperature_len > 0:
        return "a temperature that changes with the position"
    if layer.use_irope:
        return "layers that attend to one chunk of the context only"
    if layer.pos_encoding_mode != "NONE":
        return f"positions of the kind {layer.pos_encoding_mode} in attention itself"
    return None
