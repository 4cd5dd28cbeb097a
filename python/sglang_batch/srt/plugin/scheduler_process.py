"""The hooks of a scheduler process of an offline server."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..compat.offline_hooks import (
    DP_CONTROLLER_HOOK,
    FORWARD_HOOK,
    GRAMMAR_COMPILER_HOOK,
    GRAMMAR_HOOK,
    GRAPH_VARIANTS_HOOK,
    PENALTY_HOOK,
    PREALLOC_QUEUE_HOOK,
    RESULT_HOOKS,
    SCHEDULER_HOOK,
    TRANSFER_QUEUE_HOOK,
    TRIM_HOOK,
)

if TYPE_CHECKING:  # it imports torch
    from ..compat.scheduler_types import AttentionBackend, ModelRunner

# The setting ``scheduler`` in a child process of an offline server, otherwise None.
_offline_scheduler: str | None = None
# SGLang's ``--disaggregation-mode`` there.
_mode = "null"


def offline_scheduler() -> str | None:
    """The scheduler of the offline server that started this process, if one did."""
    return _offline_scheduler


def enter_offline_child(scheduler: str, mode: str) -> None:
    """Mark this process as a child of an offline server.

    Args:
        scheduler: the setting of this name.
        mode: SGLang's ``--disaggregation-mode``.
    """
    global _offline_scheduler, _mode
    _offline_scheduler, _mode = scheduler, mode


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

    from ..attention import attention_backend
    from ..compat import support
    from ..disaggregation import backend
    from ..engine import pooling
    from ..overlap import overlapped_steps
    from ..scheduler import answer_ends
    from ..scheduler.kv import planned_cache
    from . import quiet_log

    quiet_log.quiet_scheduler()
    pooling.register_config_hook()
    pooling.register_pooler_hook()
    planned_cache.register()
    register_attention_backend(support.ATTENTION_BACKEND)(_make_attention)
    backend.register()
    HookRegistry.register(SCHEDULER_HOOK, _scheduler_class(), HookType.REPLACE)
    if (_offline_scheduler, _mode) == ("offline", "decode"):
        from ..disaggregation import reception

        for target, queue in (
            (PREALLOC_QUEUE_HOOK, reception.HostPreallocQueue),
            (TRANSFER_QUEUE_HOOK, reception.HostTransferQueue),
        ):
            HookRegistry.register(target, queue, HookType.REPLACE)
    if _offline_scheduler == "offline":
        from ..scheduler.kv import token_counts

        HookRegistry.register(
            PENALTY_HOOK, token_counts.count_by_place, HookType.AROUND
        )
    HookRegistry.register(GRAMMAR_HOOK, answer_ends.allow_one, HookType.AFTER)
    HookRegistry.register(
        GRAMMAR_COMPILER_HOOK, answer_ends.keep_to_json, HookType.AFTER
    )
    for target in RESULT_HOOKS:
        HookRegistry.register(target, answer_ends.abort_marked, HookType.BEFORE)
    HookRegistry.register(
        GRAPH_VARIANTS_HOOK, attention_backend.variants_for, HookType.AROUND
    )
    HookRegistry.register(
        FORWARD_HOOK, overlapped_steps.overlap_forward, HookType.AROUND
    )
    # Imported only in the process that spreads requests over replicas.
    if "sglang.srt.managers.data_parallel_controller" in sys.modules:
        from ..engine import processes

        HookRegistry.register(
            DP_CONTROLLER_HOOK, processes.wait_for_messages, HookType.AROUND
        )


def hook_detokenizer() -> None:
    """Have texts end where a stop rule says, in a process that makes them. Elsewhere do nothing."""
    if "sglang.srt.managers.detokenizer_manager" not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from ..scheduler import answer_ends

    HookRegistry.register(TRIM_HOOK, answer_ends.trim_matched_stop, HookType.AROUND)


def _scheduler_class() -> type:
    from ..scheduler.marked_scheduler import MarkedScheduler
    from ..scheduler.scheduler import OfflineScheduler

    planned = _offline_scheduler == "offline"
    if _mode == "null":
        return OfflineScheduler if planned else MarkedScheduler
    from ..disaggregation.apart_schedulers import PrefillScheduler, StockApartScheduler
    from ..disaggregation.decode_scheduler import DecodeScheduler

    if not planned:
        return StockApartScheduler
    return PrefillScheduler if _mode == "prefill" else DecodeScheduler


def _make_attention(model_runner: ModelRunner) -> AttentionBackend:
    # The kernels are loaded only where they are asked for.
    from ..attention.attention_choice import make_backend

    return make_backend(model_runner)
