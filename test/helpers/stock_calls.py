"""The hooks of a main process, each called as a stock engine calls it; prints what they do.

Runs as a program of ``preloaded``, in a process that no test shares.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
from types import SimpleNamespace
from typing import Any


def main() -> None:
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs
    from uvicorn.supervisors import multiprocess

    load_plugins()
    before = of_process(http_server, multiprocess)
    from sglang_batch.srt.compat import offline_hooks as of
    from sglang_batch.srt.plugin.main_process import enter_offline_main

    enter_offline_main()
    changed = [
        name
        for name, value in of_process(http_server, multiprocess).items()
        if value != before[name]
    ]
    stock: Any = ServerArgs(model_path="none")
    publish(stock, role="tokenizer")
    manager = SimpleNamespace(server_args=stock)
    http_server.set_global_state(SimpleNamespace(tokenizer_manager=manager))  # type: ignore[arg-type]
    request = GenerateReqInput(text=["a", "b"])
    # What SGLang gives the hooked functions, by the place of the arguments.
    calls = {
        of.first: (stock, "more"),
        of.second: (object, stock, "more"),
        of.own: (manager, request),
        of.managers: (SimpleNamespace(tokenizer_manager=manager),),
        of.requested: (request,),
        of.served: (SimpleNamespace(app=http_server.app),),
        of.published: ("backend", "class"),
    }
    found = {}
    for target, hooks in HookRegistry._hooks.items():
        for kind, hook, _ in hooks:
            if not hook.__module__.startswith("sglang_batch"):
                continue
            if not isinstance(hook, of.OfflineHook):
                found[target] = "asks nothing"
                continue
            arguments = calls[hook.arguments]
            kept = repr(arguments), repr(vars(manager)), repr(vars(request))
            got: list[Any] = []

            def original(*args: Any, got: list[Any] = got, **kwargs: Any) -> str:
                got.append((args, kwargs))
                return "answer"

            if kind is HookType.AROUND:
                answer = hook(original, *arguments, named=1)
                right = answer == "answer" and got == [(arguments, {"named": 1})]
            elif kind is HookType.AFTER:
                right = hook("answer", *arguments, named=1) is None
            else:
                right = hook(*arguments, named=1) is None
            same = (repr(arguments), repr(vars(manager)), repr(vars(request))) == kept
            found[target] = "leaves it alone" if right and same else "does something"
    print(json.dumps({"hooks": found, "changed": changed, "steps": steps(stock)}))


def of_process(http_server: Any, multiprocess: Any) -> dict[str, Any]:
    """What of a process is no engine's own."""
    loggers = [logging.getLogger(), *logging.root.manager.loggerDict.values()]
    return {
        "environment": dict(os.environ),
        "garbage": gc.get_threshold(),
        "event loops": id(asyncio.get_event_loop_policy()),
        "signals": [signal.getsignal(n) for n in signal.valid_signals()],
        "uvicorn": dict(multiprocess.SIGNALS),
        "routes": len(http_server.app.router.routes),
        "middleware": list(http_server.app.user_middleware),
        "levels": [each.level for each in loggers[:1]],
    }


def steps(server_args: Any) -> list[str]:
    """Our steps of SGLang's resolution that do more to stock arguments than SGLang's."""
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS

    found = []
    for name, functions in _HOOKS.items():
        for function in functions:
            if function.__module__.startswith("sglang_batch"):
                called: list[Any] = []
                kept = repr(server_args), repr(vars(server_args))
                function(server_args, called.append)
                same = (repr(server_args), repr(vars(server_args))) == kept
                if len(called) != 1 or not same:
                    found.append(name)
    return found


def unpickle(data: bytes) -> None:
    """Arguments that no engine has resolved make no child process of SGLang."""
    import pickle

    before = signal.getsignal(signal.SIGINT)  # a background shell's programs ignore it
    pickle.loads(data)
    from sglang.srt.managers import scheduler
    from sglang.srt.plugins import load_plugins

    from sglang_batch.srt.compat.offline_hooks import check_hooks_took

    load_plugins()
    check_hooks_took()
    assert scheduler.Scheduler.__module__ == "sglang.srt.managers.scheduler"
    assert signal.getsignal(signal.SIGINT) is before
