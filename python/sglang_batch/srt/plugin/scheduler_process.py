"""The hooks of a scheduler process of an offline server."""

from __future__ import annotations

import sys

from ..compat import offline_hooks as hooks

# The setting ``scheduler`` in a child process of an offline server, otherwise None.
offline_scheduler: str | None = None
# SGLang's ``--disaggregation-mode`` there.
_mode = "null"


def enter_offline_child(scheduler: str, mode: str) -> None:
    """Mark this process as a child of an offline server with this scheduler and mode."""
    global offline_scheduler, _mode
    offline_scheduler, _mode = scheduler, mode


def hook_scheduler() -> None:
    """Replace the scheduler in a process that runs one. Elsewhere do nothing."""
    # Importing the scheduler where none runs (detokenizer, tokenizer worker) would
    # cost seconds and memory. Where one runs, its module is already imported.
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.layers.attention.attention_registry import (
        register_attention_backend,
    )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from ..attention import attention_backend, attention_choice
    from ..compat import support
    from ..disaggregation import backend
    from ..engine import cpu_defaults, pooling
    from ..overlap import overlapped_steps
    from ..scheduler import answer_ends
    from ..scheduler.kv import planned_cache
    from . import quiet_log

    register, around, after = HookRegistry.register, HookType.AROUND, HookType.AFTER
    quiet_log.quiet_scheduler()
    for hook in pooling.after_model_config, cpu_defaults.choose_dtype:
        hooks.register_offline(hooks.MODEL_CONFIG_HOOK, hook, after, hooks.first)
    register(hooks.LOAD_MODEL_HOOK, pooling.after_load_model, after)
    planned_cache.register()
    register_attention_backend(support.ATTENTION_BACKEND)(attention_choice.make_backend)
    backend.register()
    if (offline_scheduler, _mode) == ("offline", "decode"):
        from ..disaggregation.reception import HostPreallocQueue, HostTransferQueue

        register(hooks.PREALLOC_QUEUE_HOOK, HostPreallocQueue, HookType.REPLACE)
        register(hooks.TRANSFER_QUEUE_HOOK, HostTransferQueue, HookType.REPLACE)
    if offline_scheduler == "offline":
        from ..scheduler.kv import token_counts

        register(hooks.PENALTY_HOOK, token_counts.count_by_place, around)
    register(hooks.GRAMMAR_HOOK, answer_ends.allow_one, after)
    register(hooks.GRAMMAR_COMPILER_HOOK, answer_ends.keep_to_json, after)
    for target in hooks.RESULT_HOOKS:
        register(target, answer_ends.abort_marked, HookType.BEFORE)
    register(hooks.GRAPH_VARIANTS_HOOK, attention_backend.variants_for, around)
    register(hooks.FORWARD_HOOK, overlapped_steps.overlap_forward, around)
    # Imported only in the process that spreads requests over replicas.
    if "sglang.srt.managers.data_parallel_controller" in sys.modules:
        from ..engine import processes

        register(hooks.DP_CONTROLLER_HOOK, processes.wait_for_messages, around)
    # Last: SGLang continues where a plugin fails, and a scheduler of ours has all hooks.
    register(hooks.SCHEDULER_HOOK, _scheduler_class(), HookType.REPLACE)


def hook_detokenizer() -> None:
    """Have texts end where a stop rule says, in a process that makes them. Elsewhere do nothing."""
    if "sglang.srt.managers.detokenizer_manager" not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from ..scheduler import answer_ends

    HookRegistry.register(
        hooks.TRIM_HOOK, answer_ends.trim_matched_stop, HookType.AROUND
    )


def _scheduler_class() -> type:
    from ..scheduler.marked_scheduler import MarkedScheduler
    from ..scheduler.scheduler import OfflineScheduler

    planned = offline_scheduler == "offline"
    if _mode == "null":
        return OfflineScheduler if planned else MarkedScheduler
    from ..disaggregation.apart_schedulers import PrefillScheduler, StockApartScheduler
    from ..disaggregation.decode_scheduler import DecodeScheduler

    if not planned:
        return StockApartScheduler
    return PrefillScheduler if _mode == "prefill" else DecodeScheduler
