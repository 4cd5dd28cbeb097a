"""Planning on the host: from a batch and its prefix forest to a task table.

The device buffer of a plan is one int32 tensor that one copy fills:

    header [64] | part_indptr [max_tokens + 1] | gather, rows [max_tokens] | tasks

Each part starts at a multiple of 64 values. With an accelerator there are two host
buffers, so that a plan can be written while the previous one is still being copied.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch

from sgl_kernel_ext.shared_prefix_attention import forest, tasks
from sgl_kernel_ext.shared_prefix_attention.checks import (
    check_batch,
    check_limit,
    check_planner_sizes,
)
from sgl_kernel_ext.shared_prefix_attention.configs import (
    DeviceConfig,
    block_size,
    pick_config,
)
from sgl_kernel_ext.shared_prefix_attention.tasks import NUM_FIELDS, NUM_RESULTS

ALIGN = 64
NUM_HOST_BUFFERS = 2

# Indices into the header.
HEADER_TASKS = 0  # four: the first task of each of the three tiles, and their number
HEADER_TOKENS = 4

# Programs of a fixed grid per program that is resident. A second round starts where one ends
# early, and costs little where the items are few.
ROUNDS = 2


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class Workspace:
    """Partial results. Planners whose runs follow each other may share one."""

    o_parts: torch.Tensor  # float32 [max_parts, num_q_heads, v_head_dim]
    lse_parts: torch.Tensor  # float32 [max_parts, num_q_heads], natural log

    @classmethod
    def make(
        cls, max_parts: int, num_q_heads: int, v_head_dim: int, device: torch.device
    ) -> Workspace:
        """Allocate memory for ``max_parts`` partial results of one token each."""
        shape = (max_parts, num_q_heads, v_head_dim)
        return cls(
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape[:2], dtype=torch.float32, device=device),
        )


class HostPlan:
    """A host buffer with the packed layout, and numpy views of its parts."""

    def __init__(self, max_tokens: int, max_tasks: int, pinned: bool) -> None:
        gather = ALIGN + _aligned(max_tokens + 1)
        rows = gather + _aligned(max_tokens)
        self.tasks_at = rows + _aligned(max_tokens)
        size = self.tasks_at + max_tasks * NUM_FIELDS
        self.tensor = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self.parts = (
            slice(ALIGN),
            slice(ALIGN, ALIGN + max_tokens + 1),
            slice(gather, gather + max_tokens),
            slice(rows, rows + max_tokens),
            slice(self.tasks_at, size),
        )
        values = self.tensor.numpy()
        parts = (values[part] for part in self.parts)
        self.header, self.part_indptr, self.gather, self.rows, tasks = parts
        self.tasks = tasks.reshape(max_tasks, NUM_FIELDS)
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
        parts = (self._device[part] for part in first.parts)
        self.header, self.part_indptr, self.gather, self.rows, self.tasks = parts
        self.num_tokens = self.header[HEADER_TOKENS : HEADER_TOKENS + 1]

        sizes = [max_nodes] * 4 + [max_requests] * 2
        self.layout = forest.Layout(
            np.zeros(max_nodes, np.bool_), *(np.zeros(size, np.int32) for size in sizes)
        )
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


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The tasks of one batch. Valid until the planner makes its next plan."""

    planner: AttentionPlanner
    num_requests: int
    num_tokens: int
    num_tasks: int
    tile_tasks: tuple[int, ...]  # of each tile, in the order of the table
    num_parts: int
    num_kept_nodes: int
    max_table_row: int
    max_kv_len: int
    kv_len: np.ndarray  # int32 [num_requests], as planned
    task_table: np.ndarray  # int32 [num_tasks, tasks.NUM_FIELDS], on the host
    gather: np.ndarray  # int32 [num_tokens]: flat query token, on the host
    rows: np.ndarray  # int32 [num_tokens]: table row in gather order, on the host
    part_indptr: np.ndarray  # int32 [num_tokens + 1] in gather order, on the host
    kv_bytes: int  # read per layer, a shared span counted once
    kv_bytes_unshared: int  # if every request read all of its own KV
    predicted_gain: float  # modelled cost without sharing / with this plan
    reusable: bool  # only decodes: requests may grow without a new plan

    def still_valid(self, kv_len: np.ndarray) -> bool:
        """Whether the plan can run the same batch with these lengths.

        Only decodes may have grown, and none by more than ``planner.growth_tokens``: beyond
        that, the tasks would be out of balance.

        Args:
            kv_len: int32 ``[num_requests]``, of the same requests in the same order with
                the same table rows and nodes, each with one query.
        """
        if not self.reusable or len(kv_len) != self.num_requests:
            return False
        grown = kv_len - self.kv_len
        most = self.planner.growth_tokens
        return bool(grown.min() >= 0) and bool(grown.max() <= most)


class AttentionPlanner:
    """Plans batches of one attention shape on one device, in its own buffers.

    A captured CUDA graph replays with the newest plan of its planner, because every
    plan is at the same addresses.

    Args:
        num_q_heads, num_kv_heads, head_dim: of this rank's attention layers.
            ``head_dim`` is that of q and K, at most 512.
        v_head_dim: of V, if it has another one.
        latent: V is the first ``v_head_dim`` values of K, at most 512, and K has at most
            512 more. The cache of a query's latents can be passed as that of several KV
            heads by ``expand``.
        dtype: of q: float32, float16 or bfloat16.
        kv_dtype: of the KV cache: that of q, which is the default, or float8_e4m3fn,
            whose values are converted when they have been read.
        page_size: KV tokens per page of the table.
        device: of the kernels and their buffers. "cpu" for ``run_reference`` and
            Triton's interpreter.
        max_requests, max_tokens, max_nodes: of one batch.
        max_tile: rows of the largest tile. By default 128, and where wider ones exceed the
            registers or the shared memory of smaller GPUs, 64 (in float32, and for V of
            more than 256 values) or 16 (for such values in float32).
        max_tasks, max_parts: sizes of the task table and the workspace, derived from
            the arguments above by default. A part takes
            ``4 * num_q_heads * (v_head_dim + 1)`` bytes.
        config: planning constants and tiles, those of the device by default.
        workspace: partial results, newly allocated by default. Planners whose runs
            follow each other may share one.

    Raises:
        ValueError: for sizes that the kernels do not support.
    """

    def __init__(
        self,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        page_size: int,
        device: torch.device | str,
        max_requests: int,
        max_tokens: int,
        max_nodes: int,
        v_head_dim: int | None = None,
        latent: bool = False,
        kv_dtype: torch.dtype | None = None,
        max_tile: int | None = None,
        max_tasks: int | None = None,
        max_parts: int | None = None,
        config: DeviceConfig | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        self.kv_dtype = kv_dtype or dtype
        self.quantised = self.kv_dtype != dtype
        v_head_dim = v_head_dim or head_dim
        if max_tile is None:
            wide = (dtype.itemsize > 2) + (v_head_dim > 256)
            max_tile = (128, 64, 16)[wide]
        check_planner_sizes(
            num_q_heads,
            num_kv_heads,
            head_dim,
            v_head_dim,
            latent,
            dtype,
            self.kv_dtype,
            page_size,
            max_tile,
        )
        self.num_q_heads = num_q_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.v_head_dim = v_head_dim
        self.latent = latent
        # Values of the kernel's blocks of K, without those that are V too, and of V.
        self.blocks = (
            block_size(head_dim - v_head_dim if latent else head_dim),
            block_size(v_head_dim),
        )
        self.dtype = dtype
        self.page_size = page_size
        self.device = torch.device(device)
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.max_nodes = max_nodes
        self.max_tile = max_tile
        self.group = num_q_heads // num_kv_heads  # query heads per KV head
        self.config = config or pick_config(
            self.device, max(self.blocks), dtype.itemsize
        )
        self.growth_tokens = self.config.min_split_tokens
        # Per KV head: bytes of a KV token, and of a row's part, written and read.
        self._kv_bytes = self.kv_dtype.itemsize * (
            head_dim if latent else head_dim + v_head_dim
        )
        # Of a KV token in one layer. All heads of latents are one.
        self.token_bytes = self._kv_bytes * (1 if latent else num_kv_heads)
        self._part_bytes = 2 * 4 * (v_head_dim + 1)
        self._costs = forest.Costs(
            self.group,
            max_tile,
            self._kv_bytes,
            self._part_bytes,
            self.config.task_bytes,
        )
        self._settings = self._make_settings()
        places = self._settings[tasks.PLACES : tasks.PLACES + 3]
        splits = -(-tasks.MAX_ROUNDS * places // num_kv_heads)
        tile_tokens = np.minimum(tasks.TILE_ROWS, max_tile) // self.group
        tiles = max_requests + -(-max_tokens // int(tile_tokens[2])) * 2
        self.max_tasks = max_tasks or 2 * (tiles + max_nodes) + int(splits.sum())
        check_limit("tasks", self.max_tasks, tasks.MAX_TASKS)
        max_parts = max_parts or 2 * max_tokens + int(splits @ tile_tokens)
        self.workspace = workspace or Workspace.make(
            max_parts, num_q_heads, v_head_dim, self.device
        )
        self.max_parts = self.workspace.o_parts.shape[0]
        # Of the wide tiles in a graph. Their programs start before those of small ones.
        self.side_streams = [
            torch.cuda.Stream(self.device, priority=-1)
            for _ in range(2 if self.device.type == "cuda" else 0)
        ]
        self.buffers = PlanBuffers(
            max_requests, max_tokens, max_nodes, self.max_tasks, self.device
        )

    def _make_settings(self) -> np.ndarray:
        config = self.config
        settings = np.zeros(tasks.NUM_SETTINGS, np.int64)
        settings[tasks.GROUP] = self.group
        settings[tasks.MAX_TILE] = self.max_tile
        settings[tasks.MIN_SPLIT] = config.min_split_tokens
        settings[tasks.PART_BYTES] = self._part_bytes
        settings[tasks.TASK_BYTES] = config.task_bytes
        settings[tasks.KV_HEADS] = self.num_kv_heads
        settings[tasks.QUANTUM] = math.lcm(self.page_size, *config.tiles.block_n)
        for i, rows in enumerate(tasks.TILE_ROWS):
            # A product with K and one with V per KV token, two FLOPs each step.
            flops = 2 * rows * (self.head_dim + self.v_head_dim)
            token_bytes = max(self._kv_bytes, flops // config.flops_per_byte[i])
            settings[tasks.TOKEN_BYTES + i] = token_bytes
            settings[tasks.PLACES + i] = config.tiles.programs[i] * config.num_sms
        return settings

    @property
    def fixed_grid(self) -> tuple[int, ...]:
        """Programs of each tile that fit every plan, for launches in a CUDA graph."""
        most = self.max_tasks * self.num_kv_heads
        smallest = tasks.tile_of(self.group)
        return tuple(
            min(most, ROUNDS * self.config.num_sms * programs)
            if i >= smallest and rows <= self.max_tile
            else 0
            for i, (rows, programs) in enumerate(
                zip(tasks.TILE_ROWS, self.config.tiles.programs, strict=True)
            )
        )

    def plan(
        self,
        q_len: np.ndarray,
        kv_len: np.ndarray,
        table_row: np.ndarray,
        node_parent: np.ndarray,
        node_end: np.ndarray,
        request_node: np.ndarray,
    ) -> AttentionPlan:
        """Plan one batch and start its copy to the device on the current stream.

        All arrays are int32, contiguous and on the host. None is kept or changed. Query
        ``j`` of request ``i`` has position ``kv_len[i] - q_len[i] + j`` and attends to
        the positions up to its own.

        Args:
            q_len: ``[n]``, query tokens, in the order of the requests in q. 1 for a
                decode.
            kv_len: ``[n]``, all KV tokens, including those of the queries.
            table_row: ``[n]``, row of the page table.
            node_parent: ``[m]``, parent of each node of the forest, -1 for a root.
                Parents come before children.
            node_end: ``[m]``, tokens from the start of the sequence to the node's end.
            request_node: ``[n]``, deepest node of each request, -1 for none.

        Raises:
            ValueError: for arrays that do not fit together, a node that reaches into
                the queries of a request below it, or buffers that are too small.
        """
        batch = forest.Batch(
            q_len, kv_len, table_row, node_parent, node_end, request_node
        )
        check_batch(batch)
        num_tokens = int(q_len.sum())
        check_limit("requests", len(q_len), self.max_requests)
        check_limit("nodes", len(node_parent), self.max_nodes)
        check_limit("tokens", num_tokens, self.max_tokens)
        host = self.buffers.next_host()
        num_kept = self._fill(host, num_tokens, batch)
        results = self.buffers.results.tolist()
        num_tasks, num_parts = results[tasks.NUM_TASKS], results[tasks.NUM_PARTS]
        check_limit("tasks", num_tasks, self.max_tasks)
        check_limit("parts", num_parts, self.max_parts)
        tile_tasks = results[tasks.TILE_TASKS : tasks.TILE_TASKS + 3]
        host.header[1:HEADER_TOKENS] = list(itertools.accumulate(tile_tasks))
        host.header[HEADER_TOKENS] = num_tokens
        self.buffers.send(host, num_tasks)
        return AttentionPlan(
            planner=self,
            num_requests=len(q_len),
            num_tokens=num_tokens,
            num_tasks=num_tasks,
            tile_tasks=tuple(tile_tasks),
            num_parts=num_parts,
            num_kept_nodes=num_kept,
            max_table_row=int(table_row.max()),
            max_kv_len=int(kv_len.max()),
            kv_len=kv_len.copy(),
            task_table=host.tasks[:num_tasks],
            gather=host.gather[:num_tokens],
            rows=host.rows[:num_tokens],
            part_indptr=host.part_indptr[: num_tokens + 1],
            kv_bytes=results[tasks.KV_TOKENS] * self.token_bytes,
            kv_bytes_unshared=results[tasks.KV_TOKENS_UNSHARED] * self.token_bytes,
            predicted_gain=results[tasks.COST_UNSHARED] / results[tasks.COST],
            reusable=results[tasks.NUM_TAILS] == len(q_len),
        )

    def _fill(self, host: HostPlan, num_tokens: int, batch: forest.Batch) -> int:
        """Write the plan into a host buffer. Returns the number of kept nodes."""
        own = self.buffers
        num_kept = forest.keep_nodes(batch, self._costs, own.layout.keep)
        gather = host.gather[:num_tokens]
        forest.lay_out(batch, own.layout, gather, host.rows)
        table = tasks.Table(own.scratch, own.keys, host.tasks, own.results)
        indptr = host.part_indptr[: num_tokens + 1]
        tasks.emit_tasks(batch, own.layout, gather, self._settings, table, indptr)
        return int(num_kept)
