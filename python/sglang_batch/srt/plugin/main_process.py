"""The hooks of the main process of an offline server or engine, and of its workers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import platformdirs
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.utils.network import try_bind_socket

from ...errors import ExitStatus, SGLangBatchError, refuse
from ...store.files import check_directory
from ..compat import offline_hooks as hooks
from ..compat.private_api import check_version
from ..engine import in_process

# Whether the hooks are in place.
_entered = False
# Whether the engine was ready, and its server began.
_is_started = False


def enter_offline_main() -> None:
    """Make this process the main process of an offline server or engine.

    Raises:
        UnsupportedSGLang: another SGLang release is installed.
        EngineError: a hook did not take effect.
    """
    global _entered
    check_version()
    if not _entered:
        with _same_event_loop():
            _hook_main()
        _entered = True
    hooks.check_hooks_took()


def _hook_main() -> None:
    from ..disaggregation import backend
    from ..engine import cpu_defaults, pooling, processes
    from . import defaults

    defaults.register()
    backend.register()
    register, around, after = hooks.register_offline, HookType.AROUND, HookType.AFTER
    for hook in pooling.after_model_config, cpu_defaults.choose_dtype:
        register(hooks.MODEL_CONFIG_HOOK, hook, after, hooks.first)
    register(hooks.START_HOOK, _launch, around, hooks.first)
    register(hooks.SERVER_HOOK, _run_server, around, hooks.first)
    register(hooks.LAUNCH_HOOK, processes.tell_of_schedulers, after, hooks.second)
    register(hooks.SHUTDOWN_HOOK, defaults.undo, after, hooks.own)
    _register_http_hooks()
    HookRegistry.apply_hooks()


def _launch(original: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND hook on ``http_server.launch_server``, which starts the engine first."""
    try:
        if server_args.node_rank == 0:  # others have no port
            usual = platformdirs.user_data_path("sglang-batch")
            check_directory(Path(server_args.offline_batch_dir or usual))
            try_bind_socket(server_args.host, server_args.port).close()
    except SGLangBatchError as error:
        refuse(error, ExitStatus.FAILED)
    except OSError:
        place = f"port {server_args.port} of {server_args.host}"
        refuse(f"{place} is in use, or none; choose another --port.", ExitStatus.FAILED)
    # The engine's processes inherit it, so that Ctrl-C at a terminal is for this one.
    resource_tracker.ensure_running()  # whose start would unblock it again
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        original(server_args, *args, **kwargs)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        if _is_started:
            raise SystemExit(ExitStatus.INTERRUPTED) from None
        # Python's exit handlers may wait for ever for sockets of SGLang, whose messages are
        # for processes that have not begun to read.
        in_process.kill_children()
        os._exit(ExitStatus.INTERRUPTED)


def _run_server(*args: Any, **kwargs: Any) -> None:
    """:func:`.server_routes.run_server`, whose imports no engine in a program needs."""
    global _is_started
    from .server_routes import run_server

    _is_started = True
    run_server(*args, **kwargs)


@contextmanager
def _same_event_loop() -> Iterator[None]:
    """Keep the event loop of this thread, with which a stock engine may be running.

    SGLang's HTTP server sets another policy when it is imported.
    """
    policy = asyncio.get_event_loop_policy()
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(policy)


def enter_tokenizer_worker() -> None:
    """Apply the hooks of a tokenizer worker.

    Raises:
        EngineError: a hook did not take effect.
    """
    _register_http_hooks()
    HookRegistry.apply_hooks()
    hooks.check_hooks_took()


def _register_http_hooks() -> None:
    from ...server.http import calls
    from ..calls import call_items, gathered_calls, list_calls
    from ..disaggregation import pairing
    from ..engine.checks import request_checks
    from ..engine.sglang_engine import SGLangEngine
    from . import engine_death, quiet_log

    quiet_log.quiet_arguments()
    SGLangEngine.find_pairing = staticmethod(pairing.pairing_of)
    register, before, around = hooks.register_offline, HookType.BEFORE, HookType.AROUND
    register(hooks.ENGINE_DEATH_HOOK, engine_death.tell, before, hooks.managers)
    register(hooks.ROUTE_LABEL_HOOK, calls.label_by_template, around, hooks.served)
    register(hooks.ENTER_HOOK, hooks.enter, before, hooks.own)
    for target in hooks.REQUEST_HOOKS:
        register(target, request_checks.normalize, around, hooks.requested)
    register(hooks.MESSAGE_HOOK, request_checks.create_message, around, hooks.own)
    register(hooks.LIST_HOOK, list_calls.plan_list, around, hooks.own)
    register(hooks.SEND_HOOK, gathered_calls.gather, around, hooks.own)
    register(hooks.SEND_HOOK, pairing.pair_message, before, hooks.own)
    register(hooks.BATCH_SEND_HOOK, gathered_calls.gather_one, around, hooks.own)
    register(hooks.BATCH_SEND_HOOK, pairing.pair_messages, before, hooks.own)
    register(hooks.ABORT_HOOK, call_items.abort_unsent, before, hooks.own)
