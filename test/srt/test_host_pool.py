"""KV through the host pool and back, slot by slot, on the CPU and with a device's buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from sglang_batch.srt.scheduler.kv import host_pool
from sglang_batch.srt.scheduler.kv.host_pool import (
    HostPool,
    HostRoom,
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
