"""The decode side of SGLang's interface for transfer backends."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import (
    CommonKVReceiver,
    PrefillServerInfo,
)

from ..prefill_calls import CALL_PATH, PrefillCall, authorization
from .control_messages import Registration, RoomOpened, encode
from .destinations import Destinations
from .frames import Done
from .listener import Listener
from .page_buffers import Indices, PageBuffers
from .tcp_manager import TcpManager

logger = logging.getLogger(__name__)

# A prefill server that cannot work with this decode server, until its requests failed.
_REFUSED = PrefillServerInfo(
    attn_tp_size=1,
    attn_cp_size=1,
    dp_size=1,
    pp_size=1,
    page_size=None,
    kv_cache_dtype=None,
    follow_bootstrap_room=True,
)


class TcpDecodeManager(TcpManager):
    """Receives the KV of one decode rank from all prefill servers."""

    def __init__(
        self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool = False
    ) -> None:
        super().__init__(args, mode, server_args, is_mla_backend)
        self.destinations = Destinations(self.kv, self.aux, _host_buffers(args))
        self.listener = Listener(
            self.local_ip, self.destinations, self._done, self._lost
        )
        # Why requests of a prefill server fail, by its bootstrap address.
        self._refusals: dict[str, str] = {}
        self.listen("kv-control", self._handle)
        self._start_heartbeat_checker_thread()

    def _handle(self, parts: list[bytes]) -> None:
        try:
            status = self.parse_kv_status_message(parts)
            if status is not None:
                room, poll, rank, reason = status
                self.apply_prefill_status(
                    bootstrap_room=room,
                    status=poll,
                    prefill_rank=rank,
                    failure_reason=reason,
                )
        except Exception:  # the thread must see the next message
            logger.exception("A control message was not handled")

    def _done(self, done: Done) -> None:
        self.apply_prefill_status(
            bootstrap_room=done.room, status=KVPoll.Success, prefill_rank=done.rank
        )

    def _lost(self, bootstrap_addr: str, reason: str) -> None:
        logger.warning("Lost a connection for KV from %s: %s", bootstrap_addr, reason)
        # Fails its requests that are not done, and has the next one look it up again.
        self._handle_node_failure(bootstrap_addr)

    # Prefill servers ------------------------------------------------------------------

    def _run_prefill_recompute(
        self, kv_receiver: CommonKVReceiver, prefill_url: str, payload: dict[str, Any]
    ) -> None:
        """Have a prompt and its answer so far computed again, in a thread.

        SGLang calls ``/generate``, which takes no id of a job's line.
        """
        try:
            answer = self._get_prefill_recompute_session().post(
                prefill_url.rstrip("/") + CALL_PATH,
                data=msgspec.msgpack.encode(PrefillCall.again(payload)),
                headers=authorization(),
                timeout=self.waiting_timeout,
            )
            reason = answer.text[:500] if answer.status_code >= 400 else None
        except Exception as error:  # whatever it is, the request must not wait for ever
            reason = repr(error)
        if reason is not None:
            logger.error("%s did not compute a request again: %s", prefill_url, reason)
            self._fail_prefill_recompute(kv_receiver, reason)

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Ask a bootstrap server once how its prefill server is laid out.

        SGLang would end this process where the two do not fit. Here only the requests
        for that prefill server fail.
        """
        try:
            if not super().try_ensure_parallel_info(bootstrap_addr):
                return False
            info = self.prefill_info_table[bootstrap_addr]
            refusal = self._refusal(info)
        except (RuntimeError, AssertionError) as error:
            refusal = str(error)
        if refusal is not None:
            self._refusals[bootstrap_addr] = refusal
            self.prefill_info_table[bootstrap_addr] = _REFUSED
        return True

    def _refusal(self, info: PrefillServerInfo) -> str | None:
        if info.attn_tp_size != self.attn_tp_size:
            return (
                f"--tp-size is {info.attn_tp_size} on the prefill server and "
                f"{self.attn_tp_size} on the decode server; the tcp backend needs the "
                "same on both"
            )
        if max(info.attn_cp_size, info.pp_size) > 1:
            return "the prefill server spreads KV over ranks, which tcp cannot collect"
        return None

    def refusal_of(self, bootstrap_addr: str) -> str | None:
        """Why a prefill server cannot be used. The next request asks it again."""
        refusal = self._refusals.get(bootstrap_addr)
        if refusal is not None:
            self._refusals.pop(bootstrap_addr, None)
            self.prefill_info_table.pop(bootstrap_addr, None)
        elif self.prefill_info_table.get(bootstrap_addr) is _REFUSED:
            refusal = "the prefill server does not fit this decode server"
        return refusal

    def session(self, bootstrap_addr: str) -> str:
        return f"{self.listener.secret}@{bootstrap_addr}"

    def registration(self, bootstrap_addr: str) -> Registration:
        """This rank, as a prefill server gets to know it."""
        return Registration(
            session=self.session(bootstrap_addr),
            host=str(self.local_ip),
            port=self.listener.port,
            control_port=int(self.rank_port),
            secret=self.listener.secret,
            bootstrap_addr=bootstrap_addr,
            layout=self.layout,
        )


class TcpReceiver(CommonKVReceiver):  # type: ignore[misc]
    """The KV of one request, on the decode side."""

    kv_mgr: TcpDecodeManager

    @property
    def supports_host_destination(self) -> bool:
        return self.kv_mgr.destinations.has_host

    def init(self, prefill_dp_rank: int) -> None:
        refusal = self.kv_mgr.refusal_of(self.bootstrap_addr)
        if refusal is None:
            super().init(prefill_dp_rank)
            return
        self.kv_mgr.fail(self.bootstrap_room, f"{self.bootstrap_addr}: {refusal}")
        self.conclude_state = KVPoll.Failed

    def _register_kv_args(self) -> bool:
        message = encode(self.kv_mgr.registration(self.bootstrap_addr))
        return all(
            self._send_bootstrap_message(
                bootstrap_info=info, message=message, operation="_register_kv_args"
            )
            for info in self.bootstrap_infos or ()
        )

    def send_metadata(
        self,
        kv_indices: Indices,
        aux_index: int | None = None,
        state_indices: object = None,
        decode_prefix_len: int | None = None,
        destination: KVTransferDestination = KVTransferDestination.DEVICE,
        device_kv_indices: object = None,
    ) -> None:
        """Tell the prefill side that there is room, after making it."""
        if self.bootstrap_infos is None or aux_index is None:
            self.kv_mgr.fail(
                self.bootstrap_room, f"{self.bootstrap_addr} is not known yet"
            )
            return
        host = destination == KVTransferDestination.HOST
        self.kv_mgr.destinations.open(
            self.bootstrap_room, kv_indices, aux_index, host=host
        )
        session = self.kv_mgr.session(self.bootstrap_addr)
        opened = RoomOpened(self.bootstrap_room, session, int(decode_prefix_len or 0))
        for info in self.bootstrap_infos:
            if not self._send_bootstrap_message(
                bootstrap_info=info, message=encode(opened), operation="send_metadata"
            ):
                self.invalidate_cached_bootstrap_infos()
                return
        self.init_time = time.time()

    def is_abort_release_safe(self) -> bool:
        # Only this process writes, and not once the room is closed.
        return self.bootstrap_room not in self.kv_mgr.destinations

    def clear(self) -> None:
        self.kv_mgr.destinations.close(self.bootstrap_room)
        super().clear()

    def abort(self) -> None:
        self.kv_mgr.destinations.close(self.bootstrap_room)
        super().abort()


def _host_buffers(args: Any) -> PageBuffers | None:
    """SGLang's host pool, with --disaggregation-decode-host-receive-threshold."""
    addresses = getattr(args, "host_kv_data_ptrs", None)
    if not addresses:
        return None
    lengths, rows = args.host_kv_data_lens, args.host_kv_item_lens
    return PageBuffers(addresses, lengths, rows)
