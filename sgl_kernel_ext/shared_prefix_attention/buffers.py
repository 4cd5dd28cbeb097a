"""The memory of plans: scratch on the host and one packed buffer on the device.

The device buffer is one int32 tensor that one copy fills:

    header [64] | part_indptr [max_tokens + 1] | gather [max_tokens] | tasks

Each part starts at a multiple of 64 values. With an accelerator there are two host
buffers, so that a plan can be written while the previous one is still being copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sgl_kernel_ext.shared_prefix_attention.tasks import NUM_FIELDS, NUM_RESULTS

ALIGN = 64
NUM_HOST_BUFFERS = 2

# Indices into the header.
HEADER_TASKS = 0
HEADER_NODE_TASKS = 1
HEADER_TOKENS = 2


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class Workspace:
    """Partial results. Planners whose runs follow each other may share one."""

    o_parts: torch.Tensor  # float32 [max_parts, num_q_heads, head_dim]
    lse_parts: torch.Tensor  # float32 [max_parts, num_q_heads], natural log

    @classmethod
    def make(
        cls, max_parts: int, num_q_heads: int, head_dim: int, device: torch.device
    ) -> Workspace:
        """Allocate memory for ``max_parts`` partial results of one token each."""
        shape = (max_parts, num_q_heads, head_dim)
        return cls(
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape[:2], dtype=torch.float32, device=device),
        )


class HostPlan:
    """A host buffer with the packed layout, and numpy views of its parts."""

    def __init__(self, max_tokens: int, max_tasks: int, pinned: bool) -> None:
        indptr = ALIGN
        gather = indptr + _aligned(max_tokens + 1)
        self.tasks_at = gather + _aligned(max_tokens)
        size = self.tasks_at + max_tasks * NUM_FIELDS
        self.tensor = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        values = self.tensor.numpy()
        self.header = values[:ALIGN]
        self.part_indptr = values[indptr : indptr + max_tokens + 1]
        self.gather = values[gather : gather + max_tokens]
        self.tasks = values[self.tasks_at :].reshape(max_tasks, NUM_FIELDS)
        event = torch.cuda.Event() if pinned else None
        self.sent: torch.cuda.Event | None = event


class PlanBuffers:
    """All buffers of one planner. No plan allocates any."""

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        max_nodes: int,
        max_tasks: int,
        device: torch.device,
    ) -> None:
        pinned = device.type == "cuda"
        count = NUM_HOST_BUFFERS if pinned else 1
        self._host = [HostPlan(max_tokens, max_tasks, pinned) for _ in range(count)]
        self._next = 0
        first = self._host[0]
        # On the CPU the kernels read the host buffer itself.
        self._device = (
            torch.zeros_like(first.tensor, device=device) if pinned else first.tensor
        )
        gather = ALIGN + _aligned(max_tokens + 1)
        self.header = self._device[:ALIGN]
        self.num_tokens = self.header[HEADER_TOKENS : HEADER_TOKENS + 1]
        self.part_indptr = self._device[ALIGN : ALIGN + max_tokens + 1]
        self.gather = self._device[gather : gather + max_tokens]
        self.tasks = self._device[first.tasks_at :]

        def ints(size: int) -> np.ndarray:
            return np.zeros(size, np.int32)

        self.keep = np.zeros(max_nodes, np.bool_)
        self.node_start = ints(max_nodes)
        self.node_tokens = ints(max_nodes)
        self.node_above = ints(max_nodes)
        self.node_row = ints(max_nodes)
        self.request_start = ints(max_requests)
        self.request_above = ints(max_requests)
        self.scratch = np.zeros((max_tasks, NUM_FIELDS), np.int32)
        self.keys = np.zeros(max_tasks, np.int64)
        self.results = np.zeros(NUM_RESULTS, np.int64)

    def next_host(self) -> HostPlan:
        """A host buffer to overwrite. Waits until its last copy is done."""
        self._next = (self._next + 1) % len(self._host)
        host = self._host[self._next]
        if host.sent is not None:
            host.sent.synchronize()
        return host

    def send(self, host: HostPlan, num_tasks: int) -> None:
        """Copy the used part of the buffer to the device, on the current stream."""
        if host.sent is not None:
            used = host.tasks_at + num_tasks * NUM_FIELDS
            self._device[:used].copy_(host.tensor[:used], non_blocking=True)
            host.sent.record()
