"""The entry point SGLang calls in each of its processes, and every hook we take.

SGLang calls :func:`register` wherever it loads plugins. Without ``--offline-batch``
only the three hooks that teach SGLang the flag are taken, and only in the process
that parses arguments; nothing else of SGLang is touched. With it, the main process
adds the HTTP routes and the implied defaults, and each scheduler process gets
:class:`~sglang_batch.srt.scheduler.OfflineScheduler`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ..errors import UnsupportedSGLang
from . import compat

FLAG_HOOKS = (
    "sglang.srt.server_args.ServerArgs.add_cli_args",
    "sglang.srt.server_args.ServerArgs.from_cli_args",
)
SERVER_HOOKS = (
    "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
    "sglang.srt.managers.tokenizer_manager.SignalHandler.running_phase_sigquit_handler",
)
POOLING_HOOKS = ("sglang.srt.configs.model_config.ModelConfig.__init__",)
SCHEDULER_HOOKS = (
    "sglang.srt.managers.scheduler.Scheduler",
    "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.fill_vocab_mask",
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
    ".create_dsv41_candidate_graph_variants",
)

# This process un-pickled an OfflineServerArgs: it belongs to an offline server. Which
# scheduler that asks for.
_offline_child: str | None = None
# This process launched an offline server or engine; its hooks are in place.
_offline_main = False


def register() -> None:
    """Entry point ``sglang.srt.plugins``; called once in every SGLang process."""
    if _offline_child:
        _hook_scheduler()
    elif not _is_sglang_child():
        _hook_flag()
        # SGLang swallows what a plugin raises, and a release that lost our seams
        # would call the flag unknown: say the reason while there is a way to.
        if any(arg.startswith("--offline-batch") for arg in sys.argv[1:]):
            try:
                compat.check_version()
            except UnsupportedSGLang as error:
                raise SystemExit(f"error: {error}") from error


def _is_sglang_child() -> bool:
    """Whether SGLang itself started this process (scheduler, detokenizer, ...)."""
    target = getattr(multiprocessing.current_process(), "_target", None)
    return str(getattr(target, "__module__", "")).startswith("sglang.")


def _hook_flag() -> None:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import add_attention_backend_choices

    from . import server_args, support

    add_attention_backend_choices([support.ATTENTION_BACKEND])
    add_cli_args, from_cli_args = FLAG_HOOKS
    HookRegistry.register(add_cli_args, server_args.add_cli_args, HookType.AFTER)
    HookRegistry.register(from_cli_args, server_args.from_cli_args, HookType.AROUND)
    # Set by hand: the registry would put our function in place of ServerArgs in
    # every module that imported the class.
    Engine.server_args_class = staticmethod(server_args.make_server_args)


def enter_offline_main() -> None:
    """Make this process the main process of an offline server or engine.

    Raises:
        UnsupportedSGLang: another SGLang release is installed.
        EngineError: a hook did not take effect.
    """
    global _offline_main
    compat.check_version()
    if not _offline_main:
        from . import defaults, engine_death, pooling, server

        defaults.register()
        pooling.register_config_hook()
        HookRegistry.register(SERVER_HOOKS[0], server.attach_to_server, HookType.BEFORE)
        HookRegistry.register(SERVER_HOOKS[1], engine_death.tell, HookType.BEFORE)
        HookRegistry.apply_hooks()
        # Tokenizer workers import the app by this path, in processes of their own.
        os.environ["SGLANG_HTTP_SERVER_APP_PATH"] = "sglang_batch.srt.app:app"
        _offline_main = True
    compat.check_hooks_took(FLAG_HOOKS + SERVER_HOOKS + POOLING_HOOKS)


def hear_of_engine_death() -> None:
    """Make this process a tokenizer worker that the main process tells of it."""
    from . import engine_death

    HookRegistry.register(SERVER_HOOKS[1], engine_death.tell, HookType.BEFORE)
    HookRegistry.apply_hooks()
    compat.check_hooks_took(SERVER_HOOKS[1:])


def enter_offline_child(scheduler: str) -> None:
    """Remember, in a child process, that its server is an offline one.

    Args:
        scheduler: one of ``config.SCHEDULERS``.
    """
    global _offline_child
    _offline_child = scheduler


def _hook_scheduler() -> None:
    # Importing the scheduler where none runs (detokenizer, tokenizer worker)
    # would cost seconds and memory; the module is there where one does.
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.layers.attention.attention_registry import (
        register_attention_backend,
    )

    from . import dead_grammars, graph_variants, planned_cache, pooling, support
    from .scheduler import MarkedScheduler, OfflineScheduler

    pooling.register_config_hook()
    pooling.register_pooler_hook()
    planned_cache.register()
    register_attention_backend(support.ATTENTION_BACKEND)(_make_attention)
    ours = OfflineScheduler if _offline_child == "offline" else MarkedScheduler
    HookRegistry.register(SCHEDULER_HOOKS[0], ours, HookType.REPLACE)
    HookRegistry.register(SCHEDULER_HOOKS[1], dead_grammars.allow_one, HookType.AFTER)
    HookRegistry.register(
        SCHEDULER_HOOKS[2], graph_variants.variants_for, HookType.AROUND
    )


def _make_attention(model_runner: Any) -> Any:
    # The kernels are loaded only where they are asked for.
    from .attention_choice import make_backend

    return make_backend(model_runner)
