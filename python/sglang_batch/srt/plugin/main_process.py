"""The hooks of the main process of an offline server or engine, and of its workers."""

from __future__ import annotations

import os

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ..compat import sglang_version
from ..compat.hook_targets import (
    ABORT_HOOK,
    BATCH_SEND_HOOK,
    ENGINE_DEATH_HOOK,
    HTTP_HOOKS,
    LIST_HOOK,
    MAIN_PROCESS_HOOKS,
    MESSAGE_HOOK,
    REQUEST_HOOKS,
    ROUTE_LABEL_HOOK,
    SEND_HOOK,
    SERVER_HOOK,
    WAIT_HOOK,
    check_hooks_took,
)

# Seconds after which SGLang kills a tokenizer worker that does not answer.
_WORKER_PATIENCE = "SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT"
_WORKER_PATIENCE_S = "60"

# Whether the hooks are in place.
_entered = False


def enter_offline_main() -> None:
    """Make this process the main process of an offline server or engine.

    Raises:
        UnsupportedSGLang: another SGLang release is installed.
        EngineError: a hook did not take effect.
    """
    global _entered
    sglang_version.check_version()
    if not _entered:
        from ..disaggregation import backend
        from ..engine import engine_start, pooling
        from . import defaults, server_routes

        defaults.register()
        backend.register()
        pooling.register_config_hook()
        HookRegistry.register(
            SERVER_HOOK, server_routes.attach_to_server, HookType.BEFORE
        )
        HookRegistry.register(
            WAIT_HOOK, engine_start.tell_while_waiting, HookType.AROUND
        )
        _register_http_hooks()
        HookRegistry.apply_hooks()
        # Tokenizer workers import the app by this path, in processes of their own.
        os.environ["SGLANG_HTTP_SERVER_APP_PATH"] = "sglang_batch.srt.plugin.app:app"
        # Their imports take longer than SGLang's 10 s on a busy machine, where it would
        # kill and start them for ever.
        os.environ.setdefault(_WORKER_PATIENCE, _WORKER_PATIENCE_S)
        _entered = True
    check_hooks_took(MAIN_PROCESS_HOOKS)


def enter_tokenizer_worker() -> None:
    """Apply the hooks of a tokenizer worker.

    Raises:
        EngineError: a hook did not take effect.
    """
    _register_http_hooks()
    HookRegistry.apply_hooks()
    check_hooks_took(HTTP_HOOKS)


def _register_http_hooks() -> None:
    from ...http_api.middleware import route_labels
    from ..calls import connection, gathered_calls, list_calls
    from ..disaggregation import pairing
    from ..engine.checks import request_checks
    from ..engine.sglang_engine import SGLangEngine
    from . import engine_death, quiet_log

    quiet_log.quiet_server()
    HookRegistry.register(ENGINE_DEATH_HOOK, engine_death.tell, HookType.BEFORE)
    HookRegistry.register(
        ROUTE_LABEL_HOOK, route_labels.label_by_template, HookType.AROUND
    )
    for target in REQUEST_HOOKS:
        HookRegistry.register(target, request_checks.normalize, HookType.AROUND)
    HookRegistry.register(MESSAGE_HOOK, request_checks.create_message, HookType.AROUND)
    SGLangEngine.find_pairing = staticmethod(pairing.pairing_of)
    HookRegistry.register(LIST_HOOK, list_calls.plan_list, HookType.AROUND)
    HookRegistry.register(SEND_HOOK, gathered_calls.gather, HookType.AROUND)
    HookRegistry.register(SEND_HOOK, pairing.pair_message, HookType.BEFORE)
    HookRegistry.register(BATCH_SEND_HOOK, pairing.pair_messages, HookType.BEFORE)
    HookRegistry.register(ABORT_HOOK, connection.abort_unsent, HookType.BEFORE)
