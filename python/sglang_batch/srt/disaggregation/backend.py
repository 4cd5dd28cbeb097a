"""The transfer backend ``tcp`` among SGLang's.

SGLang has a list of names that plugins extend. The enumeration of its backends and the
function that finds their classes are hooked.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from sglang.srt.disaggregation.utils import TransferBackend as _Stock
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ..compat.offline_hooks import (
    KV_CLASS_HOOK,
    TRANSFER_BACKENDS_HOOK,
    published,
    register_offline,
)
from ..compat.support import TRANSFER_BACKEND

_members = {backend.name: backend.value for backend in _Stock}
# SGLang compares members of the class that its modules import, which is this one.
TransferBackends = Enum("TransferBackends", _members | {"TCP": TRANSFER_BACKEND})  # type: ignore[misc]


def register() -> None:
    """Register the hooks, in each process of an offline server."""
    HookRegistry.register(TRANSFER_BACKENDS_HOOK, TransferBackends, HookType.REPLACE)
    register_offline(KV_CLASS_HOOK, kv_class, HookType.AROUND, published)


def kv_class(
    original: Callable[[Any, Any], Any], transfer_backend: Any, class_type: Any
) -> Any:
    """AROUND hook on ``get_kv_class``: the classes of our backend."""
    ours = getattr(transfer_backend, "value", None) == TRANSFER_BACKEND
    if not ours or class_type.value == "kvargs":
        return original(transfer_backend, class_type)
    # Only a scheduler process loads torch and the rest for them.
    if class_type.value == "bootstrap_server":
        from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

        return CommonKVBootstrapServer
    from .tcp import tcp_receiver, tcp_sender

    def make_manager(args: Any, mode: Any, *rest: Any) -> Any:
        # SGLang asks for one class for both roles.
        prefills = mode.value == "prefill"
        module = (
            tcp_sender.TcpPrefillManager if prefills else tcp_receiver.TcpDecodeManager
        )
        return module(args, mode, *rest)

    return {
        "manager": make_manager,
        "sender": tcp_sender.TcpSender,
        "receiver": tcp_receiver.TcpReceiver,
    }[class_type.value]
