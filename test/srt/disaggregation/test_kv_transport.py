"""KV over TCP: frames, pages in and out of SGLang's pools, and peers that break."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from sglang_batch.srt.disaggregation.tcp import frames
from sglang_batch.srt.disaggregation.tcp.frames import (
    BrokenFrame,
    Done,
    FrameReader,
    Hello,
    Layout,
    Pages,
    Registration,
    RoomOpened,
    decode,
    encode,
    prepare_socket,
    send_frame,
)
from sglang_batch.srt.disaggregation.tcp.tcp_manager import PageBuffers
from sglang_batch.srt.disaggregation.tcp.tcp_receiver import Destinations, Listener
from sglang_batch.srt.disaggregation.tcp.tcp_sender import Chunk, Link

ROOM, ADDRESS = 77, "10.0.0.1:8998"
NUM_TOKENS = 128


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# Frames -------------------------------------------------------------------------------


@pytest.fixture
def wires() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with closing(one), closing(other):
        yield one, other


def test_a_frame_arrives_as_it_was_sent(wires: Any) -> None:
    one, other = wires
    payload = np.arange(100_000, dtype=np.uint8)
    thread = threading.Thread(
        target=send_frame,
        args=(one, Pages(ROOM, 3, 2), [payload.data, b"end"]),
    )
    thread.start()
    reader = FrameReader(other)
    frame = reader.read()
    thread.join()
    assert frame is not None
    assert frame[0] == Pages(ROOM, 3, 2)
    assert bytes(frame[1]) == payload.tobytes() + b"end"
    one.shutdown(socket.SHUT_WR)
    assert reader.read() is None


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "begins with b'GET '"),
        (
            struct.pack("!4sIQ", b"SBKV", 5, 0) + b"\xa4Nope",
            "the description of a frame",
        ),
        (struct.pack("!4sIQ", b"SBKV", 1 << 20, 0), "at most"),
        (struct.pack("!4sIQ", b"SBKV", 0, 1 << 40), "at most"),
        (struct.pack("!4sIQ", b"SBKV", 0, 10) + b"abc", "ended within a frame"),
        (b"SB", "ended within a frame"),
    ],
)
def test_what_is_no_frame_is_refused(wires: Any, sent: bytes, reason: str) -> None:
    one, other = wires
    one.sendall(sent)
    one.shutdown(socket.SHUT_WR)
    with pytest.raises(BrokenFrame, match=reason):
        FrameReader(other).read()


def test_a_peer_that_stalls_within_a_frame_is_noticed_and_one_between_two_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "STALL_S", 1)
    server = socket.create_server(("127.0.0.1", 0))
    with (
        closing(server),
        closing(socket.create_connection(server.getsockname())) as one,
    ):
        other, _ = server.accept()
        with closing(other):
            prepare_socket(other)
            found: list[Any] = []
            reader = FrameReader(other)

            def read() -> None:
                try:
                    found.append(reader.read())
                    reader.read()
                except BrokenFrame as error:
                    found.append(str(error))

            thread = threading.Thread(target=read)
            thread.start()
            time.sleep(1.5)
            send_frame(one, Done(1, 2, 3))
            one.sendall(b"SBK")
            thread.join(timeout=10)
            assert [type(each).__name__ for each in found] == ["tuple", "str"]
            assert "nothing came for 1 seconds" in found[1]


def test_control_messages_survive_the_socket_and_others_pass() -> None:
    layout = Layout(1, 16, "bfloat16", (64, 64), (8,))
    registration = Registration("s", "host", 1, 2, "secret", ADDRESS, layout)
    opened = RoomOpened(ROOM, "s", 32)
    assert decode(encode(registration)) == registration
    assert decode(encode(opened)) == opened
    assert decode([b"ABORT", b"77"]) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp_size": 2}, "--tp-size is 1 on the prefill server and 2"),
        ({"page_size": 1}, "give both the same --page-size"),
        (
            {"kv_dtype": "float32"},
            "give both the same --page-size and --kv-cache-dtype",
        ),
        ({"kv_rows": (64,)}, "serve the same model"),
        ({"aux_rows": (4, 4)}, "the same flags"),
    ],
)
def test_sides_that_differ_are_told_how(changes: dict[str, Any], reason: str) -> None:
    values: dict[str, Any] = {
        "tp_size": 1,
        "page_size": 16,
        "kv_dtype": "bf16",
        "kv_rows": (8, 8),
        "aux_rows": (4,),
    }
    mine, other = Layout(**values), Layout(**values | changes)
    assert mine.difference(mine) is None
    assert reason in (mine.difference(other) or "")


# Transfers ----------------------------------------------------------------------------


def mha_pool(page_size: int, seed: int) -> Any:
    pool = MHATokenToKVPool(
        size=NUM_TOKENS,
        page_size=page_size,
        dtype=torch.float32,
        head_num=2,
        head_dim=8,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    return _filled(pool, [*pool.k_buffer, *pool.v_buffer], seed)


def mla_pool(page_size: int, seed: int) -> Any:
    pool = MLATokenToKVPool(
        size=NUM_TOKENS,
        page_size=page_size,
        dtype=torch.float32,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    return _filled(pool, pool.kv_buffer, seed)


def _filled(pool: Any, tensors: list[torch.Tensor], seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    pool.all_tensors = tensors
    return pool


def buffers_of(pool: Any) -> PageBuffers:
    return PageBuffers(*pool.get_contiguous_buf_infos())


def metadata(rows: int, value: int) -> tuple[PageBuffers, torch.Tensor]:
    tensor = torch.full((rows, 16), value, dtype=torch.int32)
    return PageBuffers([tensor.data_ptr()], [tensor.nbytes], [64]), tensor


@dataclass
class _Rooms:
    """The prefill side's buffers and requests."""

    kv: PageBuffers
    aux: PageBuffers
    rank: int = 3
    live: bool = True
    ended: dict[int, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def lost(self, link: Link, reason: str) -> None:
        self.reasons.append(reason)

    def is_live(self, room: int) -> bool:
        return self.live

    def sent(self, room: int) -> None:
        self.ended[room] = "sent"


class Ends:
    """Both ends of a connection, and what they tell."""

    def __init__(self, source: Any, target: Any, secret: str | None = None) -> None:
        self.source_aux, self.source_aux_tensor = metadata(4, 5)
        self.rooms = _Rooms(buffers_of(source), self.source_aux)
        self.done: list[Done] = []
        self.lost: list[tuple[str, str]] = []
        self.link_lost = self.rooms.reasons
        self.aux, self.aux_tensor = metadata(4, 0)
        self.destinations = Destinations(buffers_of(target), self.aux)
        self.listener = Listener(
            "127.0.0.1",
            self.destinations,
            self.done.append,
            lambda address, reason: self.lost.append((address, reason)),
        )
        manager: Any = self.rooms
        self.link = Link(
            ("127.0.0.1", self.listener.port),
            Hello(secret or self.listener.secret, ADDRESS),
            manager,
        )

    def close(self) -> None:
        self.link.close()
        self.listener.close()


@pytest.fixture
def make_ends() -> Iterator[Callable[..., Ends]]:
    made: list[Ends] = []

    def make(*args: Any) -> Ends:
        made.append(Ends(*args))
        return made[-1]

    yield make
    for ends in made:
        ends.close()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("make_pool", [mha_pool, mla_pool])
def test_pages_arrive_at_their_rows_and_nowhere_else(
    make_ends: Callable[..., Ends], make_pool: Any, page_size: int
) -> None:
    source, target = make_pool(page_size, 1), make_pool(page_size, 2)
    before = [tensor.clone() for tensor in target.all_tensors]
    ends = make_ends(source, target)
    from_rows, to_rows = np.array([5, 2, 7, 1]), np.array([3, 6, 1, 4], np.int32)
    ends.destinations.open(ROOM, to_rows, 2, host=False)
    ends.link.send(Chunk(ROOM, 0, from_rows[:3], None))
    ends.link.send(Chunk(ROOM, 3, from_rows[3:], 1))
    wait_until(lambda: ends.done)
    assert ends.done == [Done(ROOM, 4, 3)]
    wait_until(lambda: ends.rooms.ended)
    assert ends.rooms.ended == {ROOM: "sent"}
    assert ROOM not in ends.destinations
    assert ends.aux_tensor[:, 0].tolist() == [0, 0, 5, 0]
    for now, old, sent in zip(
        target.all_tensors, before, source.all_tensors, strict=True
    ):
        wanted = old.clone().view(-1, page_size, *old.shape[1:])
        wanted[to_rows] = sent.view(wanted.shape)[from_rows]
        assert torch.equal(now, wanted.view(now.shape))


def test_host_memory_is_written_instead_of_the_pool() -> None:
    pool = mha_pool(1, 2)
    before = [tensor.clone() for tensor in pool.all_tensors]
    host = [torch.zeros_like(tensor) for tensor in pool.all_tensors]
    _, _, row_lengths = pool.get_contiguous_buf_infos()
    host_buffers = PageBuffers(
        [t.data_ptr() for t in host], [t.nbytes for t in host], row_lengths
    )
    destinations = Destinations(buffers_of(pool), metadata(4, 0)[0], host_buffers)
    destinations.open(ROOM, np.array([4]), 0, host=True)
    payload = bytearray(range(64)) * (host_buffers.row_bytes // 64)
    destinations.write(Pages(ROOM, 0, 1), memoryview(payload))
    assert host[0][4].numpy().tobytes() == payload[: row_lengths[0]]
    assert not host[0][3].any()
    pairs = zip(pool.all_tensors, before, strict=True)
    assert all(torch.equal(now, old) for now, old in pairs)


def test_large_requests_are_cut_into_frames(
    make_ends: Callable[..., Ends], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_batch.srt.disaggregation.tcp import tcp_sender

    monkeypatch.setattr(tcp_sender, "FRAME_BYTES", 1000)
    source, target = mha_pool(1, 1), mha_pool(1, 2)
    ends = make_ends(source, target)
    rows = np.arange(1, 100)
    ends.destinations.open(ROOM, rows[::-1].copy(), 0, host=False)
    ends.link.send(Chunk(ROOM, 0, rows, 0))
    wait_until(lambda: ends.done)
    pairs = zip(source.all_tensors, target.all_tensors, strict=True)
    assert all(torch.equal(a[1:100], b[1:100].flip(0)) for a, b in pairs)


def test_a_request_that_was_given_up_is_never_written(
    make_ends: Callable[..., Ends],
) -> None:
    target = mha_pool(1, 2)
    before = [tensor.clone() for tensor in target.all_tensors]
    ends = make_ends(mha_pool(1, 1), target)
    ends.destinations.open(ROOM, np.array([1, 2]), 0, host=False)
    ends.destinations.close(ROOM)
    ends.link.send(Chunk(ROOM, 0, np.array([1, 2]), 0))
    ends.destinations.open(ROOM + 1, np.array([9]), 1, host=False)
    ends.link.send(Chunk(ROOM + 1, 0, np.array([4]), 0))
    wait_until(lambda: ends.done)
    assert [done.room for done in ends.done] == [ROOM + 1]
    pairs = zip(target.all_tensors, before, strict=True)
    assert all(torch.equal(now[1:9], old[1:9]) for now, old in pairs)


def test_what_the_prefill_side_gave_up_does_not_end_well(
    make_ends: Callable[..., Ends],
) -> None:
    ends = make_ends(mha_pool(1, 1), mha_pool(1, 2))
    ends.destinations.open(ROOM, np.array([1, 2]), 0, host=False)
    ends.link.send(Chunk(ROOM, 0, np.array([1]), None))
    wait_until(lambda: ends.link.sent_bytes)
    ends.rooms.live = False
    ends.link.send(Chunk(ROOM, 1, np.array([2]), 0))
    time.sleep(0.2)
    assert not ends.done and not ends.rooms.ended and ROOM in ends.destinations


@pytest.mark.parametrize(
    "broken",
    [
        Chunk(ROOM, 1, np.array([1]), None),  # not in order
        Chunk(ROOM, 0, np.array([1, 2, 3]), None),  # too many
        Chunk(ROOM, 0, np.array([1]), 0),  # ends too early
    ],
    ids=["order", "many", "early"],
)
def test_pages_that_do_not_fit_end_the_connection(
    make_ends: Callable[..., Ends], broken: Chunk
) -> None:
    ends = make_ends(mha_pool(1, 1), mha_pool(1, 2))
    ends.destinations.open(ROOM, np.array([1, 2]), 0, host=False)
    ends.link.send(broken)
    wait_until(lambda: ends.lost)
    assert ends.lost[0][0] == ADDRESS and str(ROOM) in ends.lost[0][1]
    wait_until(lambda: ends.link_lost)
    assert ends.link.is_lost and not ends.done


def test_a_sender_that_does_not_know_the_secret_is_refused(
    make_ends: Callable[..., Ends],
) -> None:
    ends = make_ends(mha_pool(1, 1), mha_pool(1, 2), "another secret")
    wait_until(lambda: ends.link_lost)
    assert not ends.lost  # it was no prefill server of ours


def test_each_side_notices_that_the_other_is_gone(
    make_ends: Callable[..., Ends],
) -> None:
    ends = make_ends(mha_pool(1, 1), mha_pool(1, 2))
    ends.destinations.open(ROOM, np.array([1]), 0, host=False)
    ends.link.send(Chunk(ROOM, 0, np.array([1]), 0))
    wait_until(lambda: ends.done)
    ends.link.close()
    wait_until(lambda: ends.lost)
    assert ends.lost == [(ADDRESS, "it closed the connection")]


def test_a_link_to_nobody_is_lost_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    manager: Any = _Rooms(buffers_of(mha_pool(1, 1)), metadata(1, 0)[0])
    link = Link(("127.0.0.1", port), Hello("secret", ADDRESS), manager)
    wait_until(lambda: manager.reasons)
    assert link.is_lost and "refused" in manager.reasons[0]


@pytest.mark.parametrize("rows", [[-1], [NUM_TOKENS + 10]])
def test_rows_outside_the_pool_are_refused(rows: list[int]) -> None:
    buffers = buffers_of(mha_pool(1, 1))
    with pytest.raises(IndexError):
        buffers.read(np.array(rows))
    with pytest.raises(ValueError, match="bytes for 1 rows"):
        buffers.write(np.array([1]), memoryview(b"short"))
