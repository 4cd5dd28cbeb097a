"""Hooks that leave an engine without ``--offline-batch`` alone.

SGLang hooks a function for good, and for every engine of the process: a notebook may have an
offline engine and, before, after or beside it, a stock one. So each hook of a process that
can have several engines is registered here, with the way to the arguments of the engine that
a call is for. Unless these are an offline engine's, SGLang's function runs as if there were
no hook.

A child process of SGLang belongs to one engine and needs no such question.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_server_args

ArgumentsOf: TypeAlias = Callable[..., object]
"""From the arguments of a hooked function, SGLang's server arguments of the engine that the
call is for. None if it is for none."""


def is_offline(server_args: object) -> bool:
    """Whether server arguments are those of an offline engine."""
    return bool(getattr(server_args, "offline_batch", False))


def register_offline(
    target: str, hook: Callable[..., Any], hook_type: HookType, arguments: ArgumentsOf
) -> None:
    """Register a function as a hook for the calls of offline engines.

    Args:
        target: path of SGLang's function.
        arguments: one of the functions below.
    """
    HookRegistry.register(target, OfflineHook(hook, hook_type, arguments), hook_type)


def apply() -> None:
    """Have SGLang apply the hooks that are registered."""
    HookRegistry.apply_hooks()


class OfflineHook:
    """A hook as SGLang calls it, which passes calls of other engines on."""

    def __init__(
        self, hook: Callable[..., Any], hook_type: HookType, arguments: ArgumentsOf
    ) -> None:
        self.hook = hook
        self.hook_type = hook_type
        self.arguments = arguments
        self.__qualname__ = getattr(hook, "__qualname__", repr(hook))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # SGLang gives an AROUND hook the original first, and an AFTER hook the result.
        own = args if self.hook_type is HookType.BEFORE else args[1:]
        if is_offline(self.arguments(*own, **kwargs)):
            return self.hook(*args, **kwargs)
        if self.hook_type is HookType.AROUND:
            return args[0](*own, **kwargs)
        return None  # arguments or result stay as they are


# Where the arguments are ----------------------------------------------------------------


def first(server_args: object, *_args: object, **_kwargs: object) -> object:
    """Of a function that gets them first."""
    return server_args


def second(_cls: object, server_args: object, *_args: object, **_kw: object) -> object:
    """Of a class method that gets them first."""
    return server_args


def own(it: Any, *_args: object, **_kwargs: object) -> object:
    """Of a method of an object that has them: a tokenizer manager, an engine."""
    return it.server_args


def managers(it: Any, *_args: object, **_kwargs: object) -> object:
    """Of a method of an object that has a tokenizer manager."""
    return it.tokenizer_manager.server_args


# An attribute of a request on its way into an engine: the arguments of that engine.
_ENGINE = "_offline_batch_engine"


def requested(request: object, *_args: object, **_kwargs: object) -> object:
    """Of a method of a request, which :func:`enter` has named an engine for."""
    return vars(request).get(_ENGINE)


def enter(manager: Any, request: object, *_args: object, **_kwargs: object) -> None:
    """BEFORE hook on ``TokenizerManager.generate_request``: the request is for its engine."""
    vars(request)[_ENGINE] = manager.server_args


def leave(request: object) -> None:
    """Forget the engine again: a request may be copied, kept and sent to another one."""
    vars(request).pop(_ENGINE, None)


def served(*_args: object, **_kwargs: object) -> object:
    """Of a function that is called for the HTTP server of this process."""
    from sglang.srt.entrypoints import http_server

    state = http_server.get_global_state()
    return None if state is None else state.tokenizer_manager.server_args


def published(*_args: object, **_kwargs: object) -> object:
    """Of a function that is called while an engine of this process is being made."""
    return get_server_args()
