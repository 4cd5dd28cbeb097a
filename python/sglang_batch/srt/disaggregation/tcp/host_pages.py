"""Pages of the pool of host memory, as a connection writes them."""

from __future__ import annotations

import numpy as np
import torch

from ...scheduler.kv.host_pool import HostPool
from .page_buffers import Indices


class HostPages:
    """The pool behind the interface of :class:`.page_buffers.PageBuffers`.

    A page of the pool has all layers of its tokens side by side. What is sent has one
    block for each layer.

    Raises:
        ValueError: the pool's layers have other sizes than what is sent.
    """

    def __init__(self, pool: HostPool, row_lengths: tuple[int, ...]) -> None:
        self._layers = pool.host_layers()
        self.num_rows = len(self._layers[0]) if self._layers else 0
        own = tuple(each[0].numel() for each in self._layers) if self.num_rows else ()
        if self.num_rows and own != row_lengths:
            raise ValueError(f"pages of {own} bytes, and {row_lengths} are sent")
        self.row_lengths = row_lengths
        self.row_bytes = sum(row_lengths)

    def write(self, rows: Indices, payload: memoryview) -> None:
        """Write pages ``rows`` ``[n]``.

        Raises:
            IndexError: a page is outside the pool.
            ValueError: the payload has another size.
        """
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.num_rows:
            raise IndexError(
                f"pages {rows.min()} to {rows.max()}, and there are {self.num_rows}"
            )
        if len(payload) != len(rows) * self.row_bytes:
            raise ValueError(
                f"{len(payload)} bytes for {len(rows)} pages of {self.row_bytes} bytes"
            )
        if not len(rows):
            return
        index = torch.from_numpy(np.ascontiguousarray(rows, np.int64))
        data = torch.from_numpy(np.frombuffer(payload, np.uint8))
        start = 0
        for layer, length in zip(self._layers, self.row_lengths, strict=True):
            end = start + len(index) * length
            layer[index] = data[start:end].view(len(index), *layer.shape[1:])
            start = end
