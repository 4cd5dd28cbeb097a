"""KV through the host pool and back, slot by slot, on the CPU and with a device's buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch

from sglang_batch.errors import EngineError
from sglang_batch.srt.scheduler.aligned.prefetch import KvPrefetch, PrefetchRoom
from sglang_batch.srt.scheduler.kv import host_pool
from sglang_batch.srt.scheduler.kv.host_pool import (
    HostKv,
    HostPool,
    HostRoom,
    Run,
    kv_rows,
)

PAGE, SLOTS = 4, 64


def layers() -> list[torch.Tensor]:
    """Keys and values of two layers, of different widths and types."""
    rng = torch.Generator().manual_seed(0)
    return [
        torch.randn(SLOTS, 2, width, generator=rng).to(dtype)
        for width, dtype in (
            (8, torch.float32),
            (8, torch.float32),
            (6, torch.bfloat16),
            (6, torch.bfloat16),
        )
    ]


def test_rows_are_views_in_the_widest_type_that_fits_all() -> None:
    rows = kv_rows(layers())
    assert [each.dtype for each in rows] == [torch.int64] * 4
    assert [each.shape[1] for each in rows] == [8, 8, 3, 3]
    odd = [torch.zeros(SLOTS, 3, dtype=torch.uint8), *layers()]
    assert kv_rows(odd)[0].dtype == torch.uint8
    with pytest.raises(RuntimeError):
        kv_rows([torch.zeros(4, 6).T])


class LateStream:
    """A stream of a device whose work is done when somebody waits for it, not before."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def run(self) -> None:
        while self.work:
            self.work.pop(0)()

    def wait_stream(self, other: LateStream) -> None:
        self.work.append(other.record_event())

    def record_event(self) -> Callable[[], None]:
        before = list(self.work)

        def reached() -> None:
            for each in before:
                if each in self.work:
                    self.work.remove(each)
                    each()

        return reached

    def wait_event(self, event: Callable[[], None]) -> None:
        self.work.append(event)


class LateDevice:
    """In place of ``torch.cuda``: each stream is late, and the current one is ours."""

    @staticmethod
    def Stream(device: object = None) -> LateStream:
        return LateStream()

    def __init__(self) -> None:
        self.current = self.main = LateStream()

    def current_stream(self) -> LateStream:
        return self.current

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        self.current, before = stream, self.current
        try:
            yield
        finally:
            self.current = before


@pytest.fixture(params=["cpu", "device"])
def pool(request: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any]:
    """A pool of 12 pages, its layers, and what lets the next forward pass begin."""
    kv = layers()
    pool = HostPool(kv, 12, PAGE)
    if request.param == "cpu":
        return pool, kv, lambda: None
    device = LateDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    # Ten tokens pass through at a time.
    monkeypatch.setattr(host_pool, "BUFFER_BYTES", 10 * pool.token_bytes)
    pool._device = buffer = host_pool._DeviceBuffer(pool._host, torch.device("cpu"))
    assert buffer.num_tokens == 10

    def late(copy: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: device.current.work.append(lambda: copy(*args))

    for name in ("gather", "fill"):
        monkeypatch.setattr(pool, name, late(getattr(pool, name)))
    stock = torch.Tensor.copy_

    def copy_(to: Any, source: Any, non_blocking: bool = False) -> Any:
        if non_blocking:
            device.current.work.append(lambda: stock(to, source))
            return to
        return stock(to, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    return pool, kv, device.main.run


def test_kv_comes_back_as_it_was(pool: Any) -> None:
    host, kv, forward = pool
    before = [each.clone() for each in kv]
    room = HostRoom(12)
    slots = {"a": torch.randperm(SLOTS)[:19], "b": torch.arange(30, 35)}
    slots["b"] = torch.tensor([x for x in range(SLOTS) if x not in slots["a"]])[:5]
    runs = {}
    for rid in slots:
        runs[rid] = room.take(rid, -(-len(slots[rid]) // PAGE), 1.0)
        host.save(slots[rid], runs[rid])
    host.end_step()
    forward()
    for each in kv:
        each.zero_()  # the next forward pass writes to the slots
    new = {"b": torch.arange(5), "a": torch.arange(10, 29)}
    for rid, at in new.items():
        host.load(at, runs[rid], 0)
    host.end_step()
    forward()
    for layer, was in zip(kv, before, strict=True):
        for rid, at in new.items():
            assert torch.equal(layer[at], was[slots[rid]])
        assert not layer[29:].any()


def test_a_run_is_one_copy_and_skipped_tokens_are_not_copied(pool: Any) -> None:
    host, kv, forward = pool
    before = [each.clone() for each in kv]
    slots = torch.arange(9, 18)  # in pages 2, 3 and 7
    host.save(slots, [(2, 2), (7, 1)])
    host.end_step()
    forward()
    assert host.num_saves == 2
    kept = [each.clone() for each in kv]
    host.load(torch.arange(40, 43), [(2, 2), (7, 1)], 6)
    host.end_step()
    forward()
    assert host.num_loads == 2
    for layer, was, other in zip(kv, before, kept, strict=True):
        assert torch.equal(layer[40:43], was[15:18])
        assert torch.equal(layer[:40], other[:40])
    host.load(torch.arange(50, 51), [(2, 2), (7, 1)], 8)
    assert host.num_loads == 3


def test_a_request_loaded_and_saved_in_one_step(pool: Any) -> None:
    host, kv, forward = pool
    before = [each.clone() for each in kv]
    host.save(torch.arange(0, 8), [(0, 2)])
    host.end_step()
    forward()
    host.load(torch.arange(20, 28), [(0, 2)], 0)
    host.save(torch.arange(20, 28), [(5, 2)])  # an online request came
    host.end_step()
    forward()
    host.load(torch.arange(40, 48), [(5, 2)], 0)
    host.end_step()
    forward()
    for layer, was in zip(kv, before, strict=True):
        assert torch.equal(layer[40:48], was[0:8])


# Prefetching


def test_pages_of_the_buffer_go_to_what_is_loaded_next() -> None:
    rng = Random(3)
    parts = 0
    for _ in range(200):
        most, room = rng.choice([2, 3, 20]), PrefetchRoom(12)
        held: dict[str, list[int]] = {}
        for _ in range(40):
            names = rng.sample("abcdefghij", rng.randint(1, 8))
            sizes = {name: 1 + ord(name) % 5 for name in names}
            found = room.fetch([*sizes.items()], most)
            assert sum(part.end - part.begin for part in found) <= most
            held = {name: pages for name, pages in held.items() if name in room._runs}
            new = {part.name: part.end - part.begin for part in found}
            for name in held:
                before = room._copied[name] - new.get(name, 0)
                assert before in (0, len(held[name]))
                held[name] = held[name][:before]
            for part in found:
                assert part.name in sizes
                held.setdefault(part.name, [])
                assert part.begin == len(held[part.name])
                pages = range(part.first + part.begin, part.first + part.end)
                held[part.name] += pages
                parts += 1
            taken = [page for pages in held.values() for page in pages]
            assert len({*taken}) == len(taken)
            assert {*taken} <= {*range(12)}
            for name, pages in held.items():
                assert (name in room) == (len(pages) == 1 + ord(name) % 5)
            # What is loaded first comes, wherever the free pages lie.
            assert names[0] in held
            gone = rng.choice(names)
            whole = gone in room
            run = room.give_back(gone)
            assert (run is not None) == whole
            if run is not None:
                assert [*range(run[0], run[0] + run[1])] == held[gone]
            held.pop(gone, None)
            assert gone not in room
    assert parts > 5000


def test_what_is_not_loaded_next_leaves_only_where_its_pages_are_needed() -> None:
    room = PrefetchRoom(4)
    assert room.fetch([("a", 2), ("b", 1), ("c", 3)], 8) == [
        ("a", 0, 0, 2), ("b", 2, 0, 1)
    ]  # fmt: skip
    assert room.fetch([("d", 1)], 8) == [("d", 3, 0, 1)]
    assert "a" in room
    assert room.fetch([("b", 1), ("e", 2)], 8) == [("e", 0, 0, 2)]
    assert "a" not in room
    assert "b" in room
    assert room.take("f", 2) is None


def test_what_takes_several_steps_is_there_after_the_last() -> None:
    room = PrefetchRoom(9)
    wanted = [("a", 6), ("b", 3), ("too large", 10)]
    assert room.fetch(wanted, 4) == [("a", 0, 0, 4)]
    assert "a" not in room
    assert room.fetch(wanted, 4) == [("a", 0, 4, 6), ("b", 6, 0, 2)]
    assert "a" in room
    assert room.give_back("a") == (0, 6)
    assert room.give_back("b") is None


def test_prefetched_kv_is_what_the_host_has(pool: Any) -> None:
    """Save, fetch and load at random, with forward passes that overwrite freed slots."""
    host, kv, forward = pool
    rng, draw = Random(5), torch.Generator().manual_seed(1)
    room, prefetch = HostRoom(12), KvPrefetch(host, 5, torch.device("cpu"))
    prefetch._pages_per_s = 1.0
    if host._device is not None:
        device = torch.get_device_module("late")
        prefetch._module, prefetch._stream = device, device.Stream()
    saved: dict[str, tuple[list[Run], list[torch.Tensor]]] = {}
    hits = misses = 0
    for step in range(1000):
        for each in kv:  # what the forward pass computed
            each[:40] = torch.randn(each[:40].shape, generator=draw).to(each.dtype)
        expected = []
        for name in rng.sample(sorted(saved), min(len(saved), rng.randint(0, 2))):
            runs, was = saved.pop(name)
            skip, tokens = rng.randint(0, 3), len(was[0])
            slots = 40 + torch.randperm(SLOTS - 40, generator=draw)[: tokens - skip]
            if rng.random() < 0.2:  # aborted
                prefetch.drop(name)
            elif all(not {*slots.tolist()} & {*at.tolist()} for at, _ in expected):
                expected.append((slots, [layer[skip:] for layer in was]))
                if prefetch.load(name, slots, skip):
                    hits += 1
                else:
                    misses += 1
                    host.load(slots, runs, skip)
            room.give_back(name)
        tokens = rng.randint(4, 9)
        if room.num_free >= -(-tokens // PAGE):
            slots = torch.randperm(40, generator=draw)[:tokens]
            name = f"r{step}"
            runs = room.take(name, -(-tokens // PAGE), 1.0)
            saved[name] = runs, [layer[slots].clone() for layer in kv]
            host.save(slots, runs)
            if rng.random() < 0.7:
                prefetch.keep(name, slots)
        host.end_step()
        wanted = rng.sample(sorted(saved), min(len(saved), 3))
        next_kv = [HostKv(n, len(saved[n][1][0]), saved[n][0]) for n in wanted]
        prefetch.fetch(next_kv, 2.0)
        forward()
        for slots, was in expected:
            assert all(
                torch.equal(layer[slots], each)
                for layer, each in zip(kv, was, strict=True)
            )
    assert hits > 100
    assert misses > 100


def test_a_device_that_cannot_be_read_directly_is_refused() -> None:
    pool = HostPool(layers(), 4, PAGE)
    with pytest.raises(EngineError, match="prefetch_device=cuda:1: cpu cannot read"):
        KvPrefetch(pool, 2, torch.device("cuda", 1))
