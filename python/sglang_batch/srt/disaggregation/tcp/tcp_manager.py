"""What the two sides of a transfer over TCP have in common in each rank.

SGLang hands KV buffers to a transfer backend by their addresses. Each buffer has one row per
page. A layer of an MHA pool has two buffers, keys and values, one of an MLA pool has one.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.runtime_context import get_device, get_parallel

from ....errors import EngineError
from .frames import Layout

logger = logging.getLogger(__name__)

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
        """Write what :meth:`read` returned, one block after the other, before returning.

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


class TcpManager(CommonKVManager):  # type: ignore[misc]
    """SGLang's registry of requests and prefill servers, with our buffers.

    Raises:
        EngineError: the model keeps more than KV, or its KV is spread over ranks.
    """

    supports_host_destination = True
    # Frames of SGLang's message about the end of a transfer.
    kv_status_msg_tag = b"KV_STATUS"
    kv_status_msg_carries_reason = True
    reports_transfer_latency = True

    def __init__(self, args: Any, *rest: Any) -> None:
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
        super().__init__(args, *rest)
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
                parts = receive()
                try:
                    if parts is not None:
                        handle(parts)
                except msgspec.MsgspecError as error:
                    logger.warning("A control message cannot be read: %s", error)
                except Exception:  # the thread must see the next message
                    logger.exception("A control message was not handled")

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
