"""The prefill side of SGLang's interface for transfer backends."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import (
    AbortNotification,
    CommonKVSender,
)

from .control_messages import Registration, RoomOpened, decode
from .frames import Hello
from .link import Chunk, Link
from .page_buffers import Indices
from .tcp_manager import TcpManager

logger = logging.getLogger(__name__)

# Rooms that the decode side gave up before their request came, which are remembered.
MOST_GIVEN_UP = 10_000


@dataclass(frozen=True, slots=True)
class _Peer:
    """A decode rank. refusal: why it gets no KV, None if it does."""

    registration: Registration
    link: Link | None
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class RoomTarget:
    """Where a room's KV goes. SGLang's base class reads its first three fields."""

    endpoint: str
    dst_port: int
    link: Link
    is_dummy: bool = False


class TcpPrefillManager(TcpManager):
    """Sends the KV of one prefill rank to all decode ranks that registered with it."""

    def __init__(
        self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool = False
    ) -> None:
        super().__init__(args, mode, server_args, is_mla_backend)
        self._peers: dict[str, _Peer] = {}
        self._given_up: OrderedDict[int, str] = OrderedDict()
        # Rooms whose request is here.
        self.open_rooms: set[int] = set()
        # Counts failures, so that requests in a plan are looked at only after one.
        self.num_failed = 0
        self.listen("kv-control", self._handle)

    # Requests -------------------------------------------------------------------------

    def is_live(self, room: int) -> bool:
        return self.request_status.get(room) not in (None, KVPoll.Failed)

    def sent(self, room: int) -> None:
        self.update_status(room, KVPoll.Success)

    def failed(self, room: int, reason: str) -> None:
        self.fail(room, reason)

    def update_status(self, bootstrap_room: int, status: int) -> None:
        super().update_status(bootstrap_room, status)
        self.num_failed += status == KVPoll.Failed

    def given_up(self, room: int) -> str | None:
        """Why the decode side does not want a room, if it does not."""
        return self._given_up.pop(room, None)

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Indices,
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: object = None,
        num_kv_tokens: int | None = None,
        **events: Any,
    ) -> None:
        """Send pages of a request. SGLang's base class of the sender calls this."""
        targets = self.transfer_infos.get(bootstrap_room)
        if not targets or not self.is_live(bootstrap_room):
            return
        after = [events.get(name) for name in ("wait_event", "indices_event")]
        for target in targets.values():
            target.link.send(
                Chunk(
                    bootstrap_room,
                    int(index_slice.start),
                    kv_indices,
                    aux_index if is_last_chunk else None,
                    tuple(event for event in after if event is not None),
                )
            )

    # Decode ranks ---------------------------------------------------------------------

    def _handle(self, parts: list[bytes]) -> None:
        try:
            message = decode(parts)
            if isinstance(message, Registration):
                self._register(message)
            elif message is not None:
                self._open(message)
            elif (abort := AbortNotification.from_zmq(parts)) is not None:
                self._give_up(abort.room, "The decode server gave the request up.")
        except msgspec.MsgspecError as error:
            logger.warning("A control message cannot be read: %s", error)
        except Exception:  # the thread must see the next message
            logger.exception("A control message was not handled")

    def _register(self, new: Registration) -> None:
        old = self._peers.pop(new.session, None)
        if old is not None and old.link is not None:
            old.link.close()
        refusal = self.layout.difference(new.layout)
        link = None
        if refusal is not None:
            logger.error("No KV is sent to %s:%d: %s", new.host, new.port, refusal)
        else:
            link = Link(
                (new.host, new.port),
                Hello(new.secret, new.bootstrap_addr),
                int(self._prefill_unique_rank()),
                self.kv,
                self.aux,
                self,
                self._lost,
            )
        self._peers[new.session] = _Peer(new, link, refusal)

    def _open(self, message: RoomOpened) -> None:
        peer = self._peers.get(message.session)
        if peer is None:
            return  # the connection was lost, which the decode rank knows as well
        to = peer.registration
        link = peer.link
        if link is None or link.is_lost:
            reason = peer.refusal or "The connection to the decode server was lost."
            self.send_kv_status_message(
                targets=[(to.host, to.control_port)],
                bootstrap_room=message.room,
                status=KVPoll.Failed,
                failure_reason=reason,
            )
            self._give_up(message.room, reason)
            return
        target = RoomTarget(to.host, to.control_port, link)
        self.transfer_infos[message.room] = {message.session: target}
        self.req_to_decode_prefix_len[message.room] = message.prefix_len
        self.update_status(message.room, KVPoll.WaitingForInput)

    def _give_up(self, room: int, reason: str) -> None:
        if room in self.open_rooms:
            if self.request_status.get(room) != KVPoll.Success:
                self.fail(room, reason)
            return
        # Its request may still come, and should not wait for a decode server then.
        for table in (
            self.transfer_infos,
            self.req_to_decode_prefix_len,
            self.request_status,
        ):
            table.pop(room, None)
        self._given_up[room] = reason
        while len(self._given_up) > MOST_GIVEN_UP:
            self._given_up.popitem(last=False)

    def _lost(self, link: Link, reason: str) -> None:
        for session, peer in list(self._peers.items()):
            if peer.link is link:
                to = peer.registration
                logger.warning(
                    "Lost the connection for KV to %s:%d: %s", to.host, to.port, reason
                )
                self._peers.pop(session, None)
        for room, targets in list(self.transfer_infos.items()):
            if any(target.link is link for target in targets.values()):
                self._give_up(room, f"The connection to the decode server: {reason}")


class TcpSender(CommonKVSender):  # type: ignore[misc]
    """The KV of one request, on the prefill side."""

    kv_mgr: TcpPrefillManager

    def __init__(
        self,
        mgr: TcpPrefillManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        mgr.open_rooms.add(bootstrap_room)
        super().__init__(
            mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank
        )
        reason = mgr.given_up(bootstrap_room)
        if reason is not None:
            mgr.fail(bootstrap_room, reason)

    def clear(self) -> None:
        self.kv_mgr.open_rooms.discard(self.bootstrap_room)
        super().clear()

    def abort(self) -> None:
        """Give the request up, and tell the decode side so."""
        if self.conclude_state != KVPoll.Success:
            self.kv_mgr.conclude_failure(
                bootstrap_room=self.bootstrap_room,
                failure_reason="The prefill server gave the request up.",
            )
        super().abort()
