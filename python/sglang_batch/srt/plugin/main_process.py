"""The hooks of the main process of an offline server or engine, and of its workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from sglang.srt.plugins.hook_registry import HookType

from ..compat import offline_hooks
from ..compat.offline_hooks import (
    ABORT_HOOK,
    BATCH_SEND_HOOK,
    ENGINE_DEATH_HOOK,
    ENTER_HOOK,
    HTTP_HOOKS,
    LAUNCH_HOOK,
    LIST_HOOK,
    MAIN_PROCESS_HOOKS,
    MESSAGE_HOOK,
    REQUEST_HOOKS,
    ROUTE_LABEL_HOOK,
    SEND_HOOK,
    SERVER_HOOK,
    SHUTDOWN_HOOK,
    check_hooks_took,
    register_offline,
)
from ..compat.private_api import check_version

# Whether the hooks are in place.
_entered = False


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
    check_hooks_took(MAIN_PROCESS_HOOKS)


def _hook_main() -> None:
    from ..disaggregation import backend
    from ..engine import pooling, processes
    from . import defaults, server_routes

    defaults.register()
    backend.register()
    pooling.register_config_hook()
    of = offline_hooks
    around, after = HookType.AROUND, HookType.AFTER
    register_offline(SERVER_HOOK, server_routes.run_server, around, of.first)
    register_offline(LAUNCH_HOOK, processes.tell_of_schedulers, after, of.second)
    register_offline(SHUTDOWN_HOOK, defaults.undo, after, of.own)
    _register_http_hooks()
    of.apply()


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
    offline_hooks.apply()
    check_hooks_took(HTTP_HOOKS)


def _register_http_hooks() -> None:
    from ...server.http import calls
    from ..calls import call_items, gathered_calls, list_calls
    from ..disaggregation import pairing
    from ..engine.checks import request_checks
    from ..engine.sglang_engine import SGLangEngine
    from . import engine_death, quiet_log

    quiet_log.quiet_arguments()
    SGLangEngine.find_pairing = staticmethod(pairing.pairing_of)
    of = offline_hooks
    before, around = HookType.BEFORE, HookType.AROUND
    register_offline(ENGINE_DEATH_HOOK, engine_death.tell, before, of.managers)
    register_offline(ROUTE_LABEL_HOOK, calls.label_by_template, around, of.served)
    register_offline(ENTER_HOOK, of.enter, before, of.own)
    for target in REQUEST_HOOKS:
        register_offline(target, request_checks.normalize, around, of.requested)
    register_offline(MESSAGE_HOOK, request_checks.create_message, around, of.own)
    register_offline(LIST_HOOK, list_calls.plan_list, around, of.own)
    register_offline(SEND_HOOK, gathered_calls.gather, around, of.own)
    register_offline(SEND_HOOK, pairing.pair_message, before, of.own)
    register_offline(BATCH_SEND_HOOK, pairing.pair_messages, before, of.own)
    register_offline(ABORT_HOOK, call_items.abort_unsent, before, of.own)
