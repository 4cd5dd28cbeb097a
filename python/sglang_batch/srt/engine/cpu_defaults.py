"""Defaults of an engine on a CPU: its memory, a dtype that it multiplies, and idle threads.

SGLang gives the KV cache a share of the device's memory. A GPU's memory is the
engine's alone, but on a CPU that share is most of the machine's, and is written to at
the start. It also rounds float32 checkpoints to float16, which few CPUs multiply.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import torch
from sglang.srt.arg_groups import overrides
from sglang.srt.mem_cache.host_memory import available_host_memory_bytes

from ...dense.model import is_multiplied
from .environment import set_default
from .machine import model_spec

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# Bytes of KV, unless MIN_TOKENS need more or fewer hold MAX_REQUESTS of full length.
KV_BYTES = 1 << 30
# Most of the available memory for KV that holds one request of full length. The weights
# are not loaded yet.
CONTEXT_SHARE = 0.25
MIN_TOKENS = 4096
MAX_REQUESTS = 256
# SGLang's table of running requests has a row as long as the context for each.
TABLE_BYTES = 128 << 20
TABLE_ENTRY_BYTES = 4
MIN_RUNNING = 16
# Attribute of the arguments with the sentence about this default.
NOTE = "_offline_memory_note"
ENVIRONMENT = {
    # By default OpenMP's threads spin, also on cores that other programs want.
    "OMP_WAIT_POLICY": "PASSIVE",
    # They spin for as long as it takes from one operator to the next: in steps of few tokens
    # it takes longer to wake them than to multiply.
    "GOMP_SPINCOUNT": "3000",
    # By default glibc gives the memory of a layer's results back to the system, which
    # clears it for the next layer: two thirds of all page faults.
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    # Large pages: results above 32 MiB are given back after each layer all the same, and a
    # weight has fewer addresses to look up.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def choose_dtype(
    config: ModelConfig, server_args: ServerArgs, *_args: object, **_kwargs: object
) -> None:
    """AFTER hook: float32, not a dtype that the CPU emulates, unless the user chose one."""
    view = overrides.resolving_view(server_args)
    chosen = view.dtype != "auto" or config.quantization is not None
    if view.device == "cpu" and not chosen and not is_multiplied(config.dtype):
        config.dtype = torch.float32


def set_cpu_defaults(server_args: ServerArgs) -> None:
    """On a CPU, set the environment and limit the KV cache, unless the user chose."""
    view = overrides.resolving_view(server_args)
    if view.device != "cpu":
        return
    waits = os.environ.get("OMP_WAIT_POLICY", "PASSIVE").upper()
    for name, value in ENVIRONMENT.items():
        if name != "GOMP_SPINCOUNT" or waits == "PASSIVE":
            set_default(name, value)
    if (view.max_total_tokens, server_args.mem_fraction_static) != (None, None):
        return
    model = overrides.model_config_of(server_args)
    kv_dtype = view.kv_cache_dtype
    if kv_dtype == "auto":
        kv_dtype = str(model.dtype).removeprefix("torch.")
    spec = model_spec(model.hf_config, kv_dtype=kv_dtype)
    # Each attention rank has KV of its own.
    bytes_per_token = spec.kv_bytes_per_token * spec.kv_replicas(view.tp_size)
    bytes_per_token *= view.attn_dp_size
    available = available_host_memory_bytes(allow_cgroup_fallback=True)
    values = default_limits(bytes_per_token, model.context_len, available)
    if view.max_running_requests is not None:
        values.pop("max_running_requests", None)
    overrides.declare_resolution(server_args, "offline_batch", **values)
    tokens = values["max_total_tokens"]
    refusing = ""
    if tokens < model.context_len:
        most = f"{model.context_len:,}"
        refusing = f" (longer requests are refused, though the model takes {most})"
    note = (
        f"KV cache of {tokens:,} tokens ({tokens * bytes_per_token / 1e9:.1f} GB), the "
        f"default on a CPU{refusing}; change it with --max-total-tokens"
    )
    setattr(server_args, NOTE, note)
    logger.info("%s.", note)


def default_limits(
    kv_bytes_per_token: float, context_len: int, available_bytes: int
) -> dict[str, int]:
    """Server arguments that keep an engine small.

    Args:
        kv_bytes_per_token: in all layers.
        available_bytes: memory that is free before the model is loaded.

    Returns:
        ``max_total_tokens``, and ``max_running_requests`` if SGLang's own choice would
        take more memory than the KV cache is worth.
    """
    tokens = min(int(KV_BYTES / kv_bytes_per_token), MAX_REQUESTS * context_len)
    tokens = max(MIN_TOKENS, tokens)
    if context_len * kv_bytes_per_token <= CONTEXT_SHARE * available_bytes:
        tokens = max(tokens, context_len)  # else long requests are refused
    limits = {"max_total_tokens": tokens}
    rows = max(MIN_RUNNING, TABLE_BYTES // (TABLE_ENTRY_BYTES * context_len))
    if rows < 4096:  # SGLang's own most
        limits["max_running_requests"] = rows
    return limits
