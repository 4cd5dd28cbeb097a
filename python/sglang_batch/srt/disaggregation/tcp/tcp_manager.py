"""What the two sides of a transfer over TCP have in common in each rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.runtime_context import get_device, get_parallel

from ....errors import EngineError
from .control_messages import Layout
from .page_buffers import PageBuffers


class TcpManager(CommonKVManager):  # type: ignore[misc]
    """SGLang's registry of requests and prefill servers, with our buffers.

    SGLang's base class has the control socket, the states of requests and the
    registration with the bootstrap server.

    Raises:
        EngineError: the model keeps more than KV, or its KV is spread in a way that
            cannot be sent.
    """

    supports_host_destination = True
    # Frames of SGLang's message about the end of a transfer.
    kv_status_msg_tag = b"KV_STATUS"
    kv_status_msg_carries_reason = True
    reports_transfer_latency = True

    def __init__(
        self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool = False
    ) -> None:
        _check_supported(args)
        super().__init__(args, mode, server_args, is_mla_backend)
        self._kv_replica_factor = 1
        device = _device(args)
        self.kv = PageBuffers(
            args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, device
        )
        self.aux = PageBuffers(
            args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens
        )
        self.layout = Layout(
            tp_size=int(self.attn_tp_size),
            page_size=int(args.page_size),
            kv_dtype=str(args.kv_cache_dtype_str),
            kv_rows=tuple(args.kv_item_lens),
            aux_rows=tuple(args.aux_item_lens),
        )

    def fail(self, room: int, reason: str) -> None:
        """Fail a request that is still known."""
        if room in self.request_status:
            self.record_failure(room, reason)
            self.update_status(room, 0)  # KVPoll.Failed

    def listen(self, name: str, handle: Callable[[list[bytes]], None]) -> None:
        """Handle the messages on the control socket in a thread."""
        receive = self._make_worker_recv(self.server_socket)

        def run() -> None:
            while True:
                if (parts := receive()) is not None:
                    handle(parts)

        threading.Thread(target=run, name=name, daemon=True).start()


def _device(args: Any) -> str:
    device = str(get_device().device)
    if device == "cpu":
        return device
    if device.startswith("cuda"):
        return f"cuda:{args.gpu_id}"
    raise EngineError(
        f"--disaggregation-transfer-backend tcp does not copy KV from {device}; use it "
        "on CUDA devices or a CPU, or name another backend."
    )


def _check_supported(args: Any) -> None:
    parallel = get_parallel()
    kinds = ", ".join(str(kind.value) for kind in args.state_types)
    for given, what in (
        (args.state_types, f"a model that keeps {kinds} besides KV"),
        (parallel.pp_size > 1, f"--pp-size {parallel.pp_size}"),
        (parallel.attn_cp_size > 1, "attention context parallelism"),
        (parallel.attn_dcp_size > 1, "decode context parallelism"),
        (parallel.enable_kv_cache_sharding, "--enable-kv-cache-sharding"),
    ):
        if given:
            raise EngineError(
                f"--disaggregation-transfer-backend tcp does not work with {what}; "
                "name another backend."
            )
