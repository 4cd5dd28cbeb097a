"""KV buffers by their addresses, as SGLang hands them to a transfer backend.

Each buffer has one row per page. A layer of an MHA pool has two buffers, keys and values,
one of an MLA pool has one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Indices = npt.NDArray[np.integer]


class _DeviceMemory:
    """Memory of a CUDA device, for ``torch.as_tensor``, which does not copy it."""

    def __init__(self, address: int, shape: tuple[int, int]) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": "|u1",
            "version": 3,
        }


class PageBuffers:
    """Buffers of equally many rows, which are read and written row by row.

    Args:
        addresses: of each buffer. Its memory must outlive this object.
        lengths: bytes of each buffer.
        row_lengths: bytes of a row of each buffer.
        device: where the memory is, such as ``cpu`` or ``cuda:0``.
    """

    def __init__(
        self,
        addresses: Sequence[int],
        lengths: Sequence[int],
        row_lengths: Sequence[int],
        device: str = "cpu",
    ) -> None:
        self._device = torch.device(device)
        sizes = zip(addresses, lengths, row_lengths, strict=True)
        self._set_buffers([self._view(*each) for each in sizes])

    @classmethod
    def of_views(cls, views: Sequence[torch.Tensor]) -> PageBuffers:
        """Buffers that are views uint8 ``[rows, ...]`` of host memory."""
        buffers = cls((), (), ())
        buffers._set_buffers(views)
        return buffers

    def _set_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = buffers
        self.row_lengths = tuple(each.shape[1:].numel() for each in buffers)
        self.row_bytes = sum(self.row_lengths)
        self.num_rows = min((len(buffer) for buffer in self._buffers), default=0)
        self._on_host = self._device.type == "cpu"
        # Copies wait for none of the model's work, and the model for no copy.
        self._stream = None if self._on_host else torch.cuda.Stream(self._device)

    def _view(self, address: int, length: int, row_length: int) -> torch.Tensor:
        shape = (length // row_length, row_length)
        if self._device.type == "cpu":
            memory = (ctypes.c_uint8 * (shape[0] * row_length)).from_address(address)
            return torch.from_numpy(np.ctypeslib.as_array(memory)).view(shape)
        return torch.as_tensor(_DeviceMemory(address, shape), device=self._device)

    def read(self, rows: Indices) -> list[memoryview]:
        """Copies of rows, one block of bytes for each buffer.

        Raises:
            IndexError: a row is outside the buffers.
        """
        self._check(rows)
        index = torch.from_numpy(np.ascontiguousarray(rows, np.int64))
        if self._stream is None:
            parts = [buffer.index_select(0, index) for buffer in self._buffers]
        else:
            with torch.cuda.stream(self._stream):
                index = index.to(self._device)
                taken = [buffer.index_select(0, index) for buffer in self._buffers]
                parts = [
                    torch.empty(each.shape, dtype=torch.uint8, pin_memory=True)
                    for each in taken
                ]
                for part, each in zip(parts, taken, strict=True):
                    part.copy_(each, non_blocking=True)
            self._stream.synchronize()
        return [memoryview(part.numpy()).cast("B") for part in parts]

    def write(self, rows: Indices, payload: memoryview) -> None:
        """Write what :meth:`read` returned, one block after the other.

        It is in place when the call returns.

        Raises:
            IndexError: a row is outside the buffers.
            ValueError: the payload has another size.
        """
        self._check(rows)
        if len(payload) != len(rows) * self.row_bytes:
            raise ValueError(
                f"{len(payload)} bytes for {len(rows)} rows of {self.row_bytes} bytes"
            )
        if not len(rows):
            return
        index = torch.from_numpy(np.ascontiguousarray(rows, np.int64))
        data = torch.from_numpy(np.frombuffer(payload, np.uint8))
        if self._stream is None:
            self._write(index, data)
            return
        with torch.cuda.stream(self._stream):
            self._write(index.to(self._device), data.to(self._device))
        self._stream.synchronize()

    def _write(self, index: torch.Tensor, data: torch.Tensor) -> None:
        start = 0
        for buffer, length in zip(self._buffers, self.row_lengths, strict=True):
            end = start + len(index) * length
            rows = data[start:end].view(len(index), *buffer.shape[1:])
            buffer.index_copy_(0, index, rows)
            start = end

    def _check(self, rows: Indices) -> None:
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.num_rows:
            raise IndexError(
                f"rows {rows.min()} to {rows.max()}, and there are {self.num_rows}"
            )
