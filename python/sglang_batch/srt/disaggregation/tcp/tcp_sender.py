"""The prefill side of a transfer over TCP: SGLang's interface, and a connection to each
decode rank, with a thread that sends."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import AbortNotification, CommonKVSender

from . import frames
from .frames import Done, Hello, Pages, Registration, RoomOpened
from .tcp_manager import Indices, TcpManager

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
# Bytes of KV that are copied and sent at a time.
FRAME_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pages of a request that are computed: the first one's position, and all rows.

    aux_row: with the last pages of the request, the row of its metadata. Otherwise None.
    after: events of the device that must be over before the pages are read.
    """

    room: int
    first: int
    rows: Indices
    aux_row: int | None
    after: tuple[Any, ...] = ()


@dataclass(eq=False)
class Link:
    """Sends KV to one decode rank, in the order in which it is given.

    address: host and port of the decode rank's listener.
    manager: has the buffers and the requests, and is told once when the connection ends.
    """

    address: tuple[str, int]
    hello: Hello
    manager: TcpPrefillManager

    def __post_init__(self) -> None:
        self._kv = self.manager.kv
        self._chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self.is_lost = False
        self.sent_bytes = 0
        threading.Thread(target=self._run, name="kv-sender", daemon=True).start()

    def send(self, chunk: Chunk) -> None:
        """Send a chunk after all that were given before."""
        self._chunks.put(chunk)

    def close(self) -> None:
        """End the connection. What was not sent fails."""
        self._lose("it was closed")

    def _run(self) -> None:
        try:
            connection = socket.create_connection(self.address, timeout=CONNECT_S)
            frames.prepare_socket(connection)
            self._connection = connection
            if self.is_lost:  # closed meanwhile
                connection.close()
                return
            frames.send_frame(connection, self.hello)
            threading.Thread(target=self._watch, name="kv-watch", daemon=True).start()
            while (chunk := self._chunks.get()) is not None:
                self._send(connection, chunk)
        except OSError as error:
            self._lose(str(error))
        except Exception as error:
            logger.exception("KV could not be sent to %s:%d", *self.address)
            self._lose(repr(error))

    def _send(self, connection: socket.socket, chunk: Chunk) -> None:
        for event in chunk.after:
            event.synchronize()
        most_bytes = min(FRAME_BYTES, frames.MAX_PAYLOAD)
        most = max(1, most_bytes // max(1, self._kv.row_bytes))
        for start in range(0, len(chunk.rows), most):
            if not self.manager.is_live(chunk.room):
                return
            rows = chunk.rows[start : start + most]
            pages = Pages(chunk.room, chunk.first + start, len(rows))
            self.sent_bytes += frames.send_frame(connection, pages, self._kv.read(rows))
        # The pages of a request that was given up may belong to another one by now, so
        # it must not end as if they were right.
        if chunk.aux_row is None or not self.manager.is_live(chunk.room):
            return
        done = Done(chunk.room, chunk.first + len(chunk.rows), self.manager.rank)
        aux = self.manager.aux.read(np.array([chunk.aux_row]))
        frames.send_frame(connection, done, aux)
        self.manager.sent(chunk.room)

    def _watch(self) -> None:
        """Notice the end of the connection while there is nothing to send."""
        connection = self._connection
        assert connection is not None
        while not self.is_lost:
            try:
                if not connection.recv(1):
                    self._lose("the decode rank closed the connection")
            except BlockingIOError:  # the time limit of the socket
                continue
            except OSError as error:
                self._lose(str(error))

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self.is_lost:
                return
            self.is_lost = True
        self._chunks.put(None)
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
        self.manager.lost(self, reason)


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

    def __init__(self, args: Any, *rest: Any) -> None:
        super().__init__(args, *rest)
        self.rank = int(self._prefill_unique_rank())
        self._peers: dict[str, _Peer] = {}
        self._given_up: OrderedDict[int, str] = OrderedDict()
        # Rooms whose request is here.
        self.open_rooms: set[int] = set()
        # Counts failures, so that requests in a plan are looked at only after one.
        self.num_failed = 0
        self.listen("kv-control", self._handle)

    # Requests -------------------------------------------------------------------------

    def is_live(self, room: int) -> bool:
        """Whether a request still wants its KV to be sent."""
        return self.request_status.get(room) not in (None, KVPoll.Failed)

    def sent(self, room: int) -> None:
        """All KV of a request is on its way."""
        self.update_status(room, KVPoll.Success)

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
        first, aux_row = int(index_slice.start), aux_index if is_last_chunk else None
        events_before = tuple(event for event in after if event is not None)
        chunk = Chunk(bootstrap_room, first, kv_indices, aux_row, events_before)
        for target in targets.values():
            target.link.send(chunk)

    # Decode ranks ---------------------------------------------------------------------

    def _handle(self, parts: list[bytes]) -> None:
        message = frames.decode(parts)
        if isinstance(message, Registration):
            self._register(message)
        elif message is not None:
            self._open(message)
        elif (abort := AbortNotification.from_zmq(parts)) is not None:
            self._give_up(abort.room, "The decode server gave the request up.")

    def _register(self, new: Registration) -> None:
        old = self._peers.pop(new.session, None)
        if old is not None and old.link is not None:
            old.link.close()
        refusal = self.layout.difference(new.layout)
        if refusal is not None:
            logger.error("No KV is sent to %s:%d: %s", new.host, new.port, refusal)
            self._peers[new.session] = _Peer(new, None, refusal)
            return
        hello = Hello(new.secret, new.bootstrap_addr)
        link = Link((new.host, new.port), hello, self)
        self._peers[new.session] = _Peer(new, link)

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

    def lost(self, link: Link, reason: str) -> None:
        """The connection of a link has ended."""
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
        **rest: Any,
    ) -> None:
        mgr.open_rooms.add(bootstrap_room)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, **rest)
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
