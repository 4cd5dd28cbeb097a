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
    """AROUND hook on ``get_kv_class``: the classes of our backend.

    Managers differ between the two roles. SGLang asks for one class for both.
    """
    if (
        getattr(transfer_backend, "value", None) != TRANSFER_BACKEND
        or class_type.value == "kvargs"
    ):
        return original(transfer_backend, class_type)
    # Only a scheduler process loads torch and the rest for them.
    if class_type.value == "bootstrap_server":
        from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

        return CommonKVBootstrapServer
    from .tcp import tcp_receiver, tcp_sender

    return {
        "manager": _make_manager,
        "sender": tcp_sender.TcpSender,
        "receiver": tcp_receiver.TcpReceiver,
    }[class_type.value]


def _make_manager(args: Any, mode: Any, *rest: Any) -> Any:
    from .tcp.tcp_receiver import TcpDecodeManager
    from .tcp.tcp_sender import TcpPrefillManager

    manager = TcpPrefillManager if mode.value == "prefill" else TcpDecodeManager
    return manager(args, mode, *rest)
