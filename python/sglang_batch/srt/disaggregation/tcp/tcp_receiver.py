"""The decode side of a transfer over TCP: SGLang's interface, one listener per decode rank,
and the places where the KV of each request goes.

The reader of a connection writes to a place (:class:`Destinations`), and the scheduler opens
and closes it. Both hold the lock, so a request that is closed is never written again: its pages
can be given to another request at once.
"""

from __future__ import annotations

import logging
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, PrefillServerInfo

from ..prefill_calls import CALL_PATH, PrefillCall, authorization
from . import frames
from .frames import BrokenFrame, Done, FrameReader, Hello, Pages
from .tcp_manager import Indices, PageBuffers, TcpManager


@dataclass(slots=True)
class _Destination:
    """rows: of each page, in the order of the prompt. received: pages that have come."""

    rows: Indices
    aux_row: int
    buffers: PageBuffers
    received: int = 0


@contextmanager
def _fitting(payload: str) -> Iterator[None]:
    """Rows or sizes that do not fit are those of a broken frame."""
    try:
        yield
    except (IndexError, ValueError) as error:
        raise BrokenFrame(f"{payload}: {error}") from None


class Destinations:
    """The requests whose KV is expected, by room.

    device: the KV pool.
    host: host memory of the same rows, if there is any.
    aux: the metadata that comes with the last page.
    """

    def __init__(
        self, device: PageBuffers, aux: PageBuffers, host: PageBuffers | None = None
    ) -> None:
        self._device = device
        self._aux = aux
        self.host = host
        self._lock = threading.Lock()
        self._of_room: dict[int, _Destination] = {}

    def __contains__(self, room: int) -> bool:
        return room in self._of_room

    def open(self, room: int, rows: Indices, aux_row: int, *, host: bool) -> None:
        """Expect the pages of a room in these rows of the KV pool, or of host memory."""
        buffers = self.host if host else self._device
        if buffers is None:
            raise ValueError("there is no host memory to receive KV into")
        with self._lock:
            self._of_room[room] = _Destination(np.asarray(rows), aux_row, buffers)

    def close(self, room: int) -> None:
        """Write nothing more for a room. What still comes for it is dropped."""
        with self._lock:
            self._of_room.pop(room, None)

    def write(self, pages: Pages, payload: memoryview) -> None:
        """Write pages of a room, which come in order. BrokenFrame if they do not fit."""
        with self._lock:
            to = self._of_room.get(pages.room)
            if to is None:
                return
            end = pages.first + pages.count
            if pages.first != to.received or pages.count < 0 or end > len(to.rows):
                raise BrokenFrame(
                    f"pages {pages.first} to {end} of room {pages.room} came after "
                    f"{to.received} of {len(to.rows)}"
                )
            with _fitting(f"pages of room {pages.room}"):
                to.buffers.write(to.rows[pages.first : end], payload)
            to.received = end

    def finish(self, done: Done, payload: memoryview) -> bool:
        """Write the metadata of a room whose pages have all come, and close it, if it is open.

        Raises:
            BrokenFrame: pages are missing, or the metadata has another size.
        """
        with self._lock:
            to = self._of_room.get(done.room)
            if to is None:
                return False
            if not to.received == done.num_pages == len(to.rows):
                raise BrokenFrame(
                    f"room {done.room} ended after {to.received} of {len(to.rows)} "
                    f"pages, and {done.num_pages} were sent"
                )
            with _fitting(f"metadata of room {done.room}"):
                self._aux.write(np.array([to.aux_row]), payload)
            del self._of_room[done.room]
            return True


logger = logging.getLogger(__name__)


class Listener(socketserver.ThreadingTCPServer):
    """Receives the KV that prefill ranks send to this rank, in a thread for each.

    host: the address to listen on.
    on_done: called with the end of each room's transfer.
    on_lost: called with a prefill server's bootstrap address and the reason when one
        of its connections ends. Its requests that are not done never will be.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        host: str,
        destinations: Destinations,
        on_done: Callable[[Done], None],
        on_lost: Callable[[str, str], None],
    ) -> None:
        self._destinations = destinations
        self._on_done = on_done
        self._on_lost = on_lost
        self.secret = secrets.token_urlsafe(16)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), socketserver.BaseRequestHandler)
        self.port = int(self.server_address[1])
        threading.Thread(
            target=self.serve_forever, name="kv-listener", daemon=True
        ).start()

    def close(self) -> None:
        """Accept no more connections."""
        self.shutdown()
        self.server_close()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Read a connection to its end."""
        connection: socket.socket = request
        peer = str(client_address[0])
        sender, reason = "", "it closed the connection"
        try:
            frames.prepare_socket(connection)
            reader = FrameReader(connection)
            hello, _ = reader.read() or (None, None)
            if not isinstance(hello, Hello):
                raise BrokenFrame("it does not begin with HELLO")
            if not secrets.compare_digest(hello.secret.encode(), self.secret.encode()):
                raise BrokenFrame("it does not know the secret of this decode rank")
            sender = hello.bootstrap_addr
            while (frame := reader.read()) is not None:
                description, payload = frame
                if isinstance(description, Pages):
                    self._destinations.write(description, payload)
                elif isinstance(description, Hello):
                    raise BrokenFrame("HELLO came within a connection")
                elif self._destinations.finish(description, payload):
                    self._on_done(description)
        except (BrokenFrame, OSError) as error:
            reason = str(error)
        except Exception as error:
            logger.exception("KV from %s could not be received", peer)
            reason = repr(error)
        if not sender:
            logger.warning("A connection from %s was refused: %s", peer, reason)
            return
        self._on_lost(sender, reason)


# A prefill server that cannot work with this decode server, until its requests failed.
_REFUSED = PrefillServerInfo(1, 1, 1, 1, None, None, follow_bootstrap_room=True)


class TcpDecodeManager(TcpManager):
    """Receives the KV of one decode rank from all prefill servers."""

    def __init__(self, args: Any, *rest: Any) -> None:
        super().__init__(args, *rest)
        self.destinations = Destinations(self.kv, self.aux, _host_buffers(args))
        self.listener = Listener(
            self.local_ip, self.destinations, self._done, self._lost
        )
        # Why requests of a prefill server fail, by its bootstrap address.
        self._refusals: dict[str, str] = {}
        self.listen("kv-control", self._handle)
        self._start_heartbeat_checker_thread()

    def _handle(self, parts: list[bytes]) -> None:
        status = self.parse_kv_status_message(parts)
        if status is not None:
            room, poll, rank, reason = status
            self.apply_prefill_status(
                bootstrap_room=room,
                status=poll,
                prefill_rank=rank,
                failure_reason=reason,
            )

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
            answer = httpx.post(
                prefill_url.rstrip("/") + CALL_PATH,
                content=msgspec.msgpack.encode(PrefillCall.again(payload)),
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

        Where the two do not fit, its requests fail, and not this process as in SGLang.
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
        refusal = self._refusals.pop(bootstrap_addr, None)
        if refusal is not None:
            self.prefill_info_table.pop(bootstrap_addr, None)
        elif self.prefill_info_table.get(bootstrap_addr) is _REFUSED:
            refusal = "the prefill server does not fit this decode server"
        return refusal

    def session(self, bootstrap_addr: str) -> str:
        return f"{self.listener.secret}@{bootstrap_addr}"

    def registration(self, bootstrap_addr: str) -> frames.Registration:
        """This rank, as a prefill server gets to know it."""
        return frames.Registration(
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
        return self.kv_mgr.destinations.host is not None

    def init(self, prefill_dp_rank: int) -> None:
        refusal = self.kv_mgr.refusal_of(self.bootstrap_addr)
        if refusal is None:
            super().init(prefill_dp_rank)
            return
        self.kv_mgr.fail(self.bootstrap_room, f"{self.bootstrap_addr}: {refusal}")
        self.conclude_state = KVPoll.Failed

    def _register_kv_args(self) -> bool:
        message = frames.encode(self.kv_mgr.registration(self.bootstrap_addr))
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
        message = frames.encode(
            frames.RoomOpened(self.bootstrap_room, session, int(decode_prefix_len or 0))
        )
        for info in self.bootstrap_infos:
            if not self._send_bootstrap_message(
                bootstrap_info=info, message=message, operation="send_metadata"
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
