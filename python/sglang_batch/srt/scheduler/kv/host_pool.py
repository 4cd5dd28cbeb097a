"""A pool of host memory for the KV of offloaded requests, allocated once.

A row of the pool is one token's KV in all layers. On an accelerator the pool is pinned,
and a request moves through a buffer on the device: its layers are gathered there, and the
transfer to the host is one copy for each run of pages, usually one in all. On the way back
it is one copy into the buffer, and the layers are filled from there. Copies run on a
stream of their own:

- Saving: the next forward pass waits until the layers are gathered, since it may write to
  the freed slots. The transfer to the host runs at the same time.
- Loading: the transfer to the device runs during the forward pass in flight, and the next
  one waits until the layers are filled.

The streams wait for each other once per step (:meth:`HostPool.end_step`). The host waits
for neither. On a CPU all of these are plain copies.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

from ...compat.scheduler_types import KvPool
from .host_room import Run

logger = logging.getLogger(__name__)

# Memory on the device that KV passes through. A step that moves more waits for copies.
BUFFER_BYTES = 128 << 20
# The widest type that all rows consist of is copied fastest.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def kv_buffers(pool: KvPool) -> list[torch.Tensor]:
    """The KV of each layer, ``[slots, ...]``. The pool is of a type that is supported."""
    if isinstance(pool, MLATokenToKVPool):
        return list(pool.kv_buffer)
    return [*pool.k_buffer, *pool.v_buffer]  # type: ignore[attr-defined]


def kv_rows(buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views ``[slots, words]`` of KV buffers ``[slots, ...]``, in the widest integer type
    that divides all their rows.

    Raises:
        RuntimeError: a buffer is not contiguous.
    """
    flat = [each.view(each.shape[0], -1).view(torch.uint8) for each in buffers]
    for word in _WORDS:
        if all(not each.shape[1] % word.itemsize for each in flat):
            try:
                return [each.view(word) for each in flat]
            except RuntimeError:  # a buffer begins at an odd address
                continue
    raise AssertionError("every tensor is a view of bytes")


class HostPool:
    """KV of ``num_pages`` pages on the host.

    Args:
        buffers: the device's KV, a tensor ``[slots, ...]`` for each layer (and for keys
            and values).
        page_size: tokens in a page.

    Attributes:
        page_size: tokens in a page.
        token_bytes: KV of a token in all layers.
        num_saves, num_loads: copies to the host and back so far, one for each run of
            pages.
    """

    def __init__(
        self, buffers: Sequence[torch.Tensor], num_pages: int, page_size: int
    ) -> None:
        self._layers = kv_rows(buffers)
        self.page_size = page_size
        widths = [each.shape[1] for each in self._layers]
        begins = [sum(widths[:i]) for i in range(len(widths))]
        self._columns = [
            slice(begin, begin + width)
            for begin, width in zip(begins, widths, strict=True)
        ]
        word, device = self._layers[0].dtype, self._layers[0].device
        self.token_bytes = sum(widths) * word.itemsize
        self._host = torch.empty((num_pages * page_size, sum(widths)), dtype=word)
        self.num_saves = self.num_loads = 0
        self._device: _DeviceBuffer | None = None
        if device.type != "cpu" and num_pages:
            self._host = _pinned(self._host, device)
            self._device = _DeviceBuffer(self._host, device)

    @property
    def num_bytes(self) -> int:
        return int(self._host.nbytes)

    @property
    def device(self) -> torch.device:
        """That of the KV which comes here."""
        return self._layers[0].device

    def host_layers(self) -> list[torch.Tensor]:
        """Views uint8 ``[pages, tokens, bytes]`` of each layer's part of the memory."""
        width = self._host.itemsize
        rows = self._host.view(torch.uint8).view(-1, self.page_size, self.token_bytes)
        return [
            rows[..., columns.start * width : columns.stop * width]
            for columns in self._columns
        ]

    def empty_rows(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """Memory for the KV of so many tokens, laid out as here."""
        return torch.empty(
            (num_tokens, self._host.shape[1]), dtype=self._host.dtype, device=device
        )

    def host_rows(
        self, runs: Sequence[Run], begin: int, end: int
    ) -> Iterator[torch.Tensor]:
        """The KV of tokens [begin, end) of these pages, in pieces."""
        for first, length in runs:
            tokens = length * self.page_size
            low, high = max(begin, 0), min(end, tokens)
            if low < high:
                at = first * self.page_size
                yield self._host[at + low : at + high]
            begin, end = begin - tokens, end - tokens

    def let_wait(self, stream: Any) -> None:
        """Have a stream wait for all copies so far."""
        if self._device is not None:
            self._device.let_wait(stream)

    def save(self, slots: torch.Tensor, runs: Sequence[Run]) -> None:
        """Copy the KV of ``slots`` ``[n]`` to the host, to these pages.

        The slots may be freed at once.
        """
        for host, part in self._pieces(slots, runs):
            self.num_saves += 1
            if self._device is None:
                self.gather(part, host)
            else:
                self._device.save(host, part, self.gather)

    def load(self, slots: torch.Tensor, runs: Sequence[Run], skip: int) -> None:
        """Copy KV back to ``slots`` ``[n]``: of these pages without the first ``skip``
        tokens.

        The pages may be given away at once. The KV is there in the next forward pass.
        """
        for host, part in self._pieces(slots, runs, skip):
            self.num_loads += 1
            if self._device is None:
                self.fill(host, part)
            else:
                self._device.load(host, part, self.fill)

    def end_step(self) -> None:
        """Let the next forward pass see the copies of this step. Call it before."""
        if self._device is not None:
            self._device.end_step()

    def _pieces(
        self, slots: torch.Tensor, runs: Sequence[Run], skip: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Rows of the host, and the slots that belong to them, that are copied at once."""
        most = len(self._host) if self._device is None else self._device.num_tokens
        at = 0
        for first, length in runs:
            begin, end = first * self.page_size, (first + length) * self.page_size
            begin, skip = min(begin + skip, end), max(0, skip - (end - begin))
            while begin < end and at < len(slots):
                count = min(end - begin, len(slots) - at, most)
                yield self._host[begin : begin + count], slots[at : at + count]
                begin, at = begin + count, at + count
        assert at == len(slots), (at, len(slots))

    def gather(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy the KV of ``slots`` ``[n]`` to ``rows`` ``[n, words]``."""
        for layer, columns in zip(self._layers, self._columns, strict=True):
            rows[:, columns] = layer[slots]

    def fill(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy KV ``[n, words]`` that is on the device to ``slots`` ``[n]``."""
        for layer, columns in zip(self._layers, self._columns, strict=True):
            layer[slots] = rows[:, columns]


class _DeviceBuffer:
    """The buffer on the device, and the stream on which KV passes through it.

    Parts of the buffer wait for the second half of their way until the step ends or the
    buffer is full.
    """

    def __init__(self, host: torch.Tensor, device: torch.device) -> None:
        row_bytes = host.shape[1] * host.itemsize
        self.num_tokens = max(1, min(len(host), BUFFER_BYTES // row_bytes))
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream()
        self._buffer = torch.empty(
            (self.num_tokens, host.shape[1]), dtype=host.dtype, device=device
        )
        self._used = 0
        self._to_host: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._to_slots: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._fill: Any = None
        self._gathered = False

    def save(self, host: torch.Tensor, slots: torch.Tensor, gather: Any) -> None:
        self._fill_slots()
        part = self._part(len(slots))
        # The slots' KV and their numbers were made on the current stream.
        self._stream.wait_stream(self._module.current_stream())
        with self._on_stream():
            gather(slots, part)
        slots.record_stream(self._stream)
        self._to_host.append((host, part))
        self._gathered = True

    def load(self, host: torch.Tensor, slots: torch.Tensor, fill: Any) -> None:
        self._send()
        part = self._part(len(slots))
        with self._on_stream():
            part.copy_(host, non_blocking=True)
        self._to_slots.append((part, slots))
        self._fill = fill

    def let_wait(self, stream: Any) -> None:
        stream.wait_stream(self._stream)

    def end_step(self) -> None:
        self._fill_slots()
        if self._gathered:
            self._current_waits()
            self._gathered = False
        self._send()
        self._used = 0

    def _part(self, num_tokens: int) -> torch.Tensor:
        if self._used + num_tokens > self.num_tokens:
            self._fill_slots()
            self._send()
            self._used = 0
        self._used += num_tokens
        return self._buffer[self._used - num_tokens : self._used]

    def _send(self) -> None:
        with self._on_stream():
            for host, part in self._to_host:
                host.copy_(part, non_blocking=True)
        self._to_host.clear()

    def _fill_slots(self) -> None:
        """Fill the slots, once the forward pass in flight no longer uses them."""
        if not self._to_slots:
            return
        self._stream.wait_stream(self._module.current_stream())
        with self._on_stream():
            for part, slots in self._to_slots:
                self._fill(part, slots)
                slots.record_stream(self._stream)
        self._to_slots.clear()
        self._current_waits()

    def _current_waits(self) -> None:
        self._module.current_stream().wait_event(self._stream.record_event())

    def _on_stream(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self._module.stream(self._stream)
        return context


def _pinned(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same memory, or as much, page-locked. Unpinned with a warning if the system
    does not allow it: copies are then slower and wait for each other."""
    try:
        if device.type != "cuda":
            return host.pin_memory()
        # pin_memory() would take up to twice as much.
        status = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)
        if int(status) == 0:
            return host
        reason = f"error {int(status)}"
    except RuntimeError as error:
        reason = str(error)
    logger.warning(
        "The %.1f GB of host memory for offloaded KV cannot be pinned (%s); a smaller "
        "offload_bytes may help.",
        host.nbytes / 1e9,
        reason,
    )
    return host
