"""Timing on a GPU: the device's peak rates, and graphs replayed in alternation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl

READ_BYTES = 4 << 30
MATRIX = 8192
# A replay reads at least this many times the L2 cache before it reads anything again.
CACHE_TIMES = 8


@triton.jit  # type: ignore[untyped-decorator]
def read_kernel(  # type: ignore[no-untyped-def]
    values_ptr, sums_ptr, size, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """Sum float32 values, block by block. One sum per program keeps the reads alive."""
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    step = tl.num_programs(0) * BLOCK
    first = tl.program_id(0) * BLOCK
    for i_block in tl.range(first, size, step, num_stages=STAGES):
        b_sum += tl.load(values_ptr + i_block + tl.arange(0, BLOCK))
    tl.store(sums_ptr + tl.program_id(0), tl.sum(b_sum))


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates that the device reached in plain kernels."""

    read: float  # bytes per second, reading only
    copy: float  # bytes per second, read and written
    flops: float  # bf16 matrix product, per second


def gpu() -> torch.device:
    """The device that everything is timed on."""
    return torch.device("cuda", torch.cuda.current_device())


def measure_ceilings(device: torch.device) -> Ceilings:
    """Stream several GB, copy them, and multiply two large matrices."""
    free = torch.cuda.mem_get_info(device)[0]
    # A power of two: every program reads whole blocks.
    size = 1 << ((min(READ_BYTES, free // 4) // 4).bit_length() - 1)
    values = torch.randn(size, device=device)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    reads = []
    for per_sm, block, stages in ((4, 4096, 3), (8, 4096, 3), (16, 2048, 2)):
        sums = torch.empty(num_sms * per_sm, device=device)
        grid = (num_sms * per_sm,)

        def read(
            grid: tuple[int] = grid,
            sums: torch.Tensor = sums,
            block: int = block,
            stages: int = stages,
        ) -> None:
            read_kernel[grid](
                values, sums, size, BLOCK=block, STAGES=stages, num_warps=8
            )

        read()
        total = sums.double().sum()
        if not torch.isclose(
            total, values.sum(dtype=torch.float64), rtol=1e-2, atol=100.0
        ):
            raise RuntimeError("the reading kernel did not read all values")
        reads.append(size * 4 / seconds_of(read, 20))
    target = torch.empty_like(values)
    copy = 2 * size * 4 / seconds_of(partial(target.copy_, values), 20)
    del target
    a, b = (torch.randn(MATRIX, MATRIX, device=device).bfloat16() for _ in range(2))
    flops = 2 * MATRIX**3 / seconds_of(lambda: torch.matmul(a, b), 20)
    return Ceilings(max(reads), copy, flops)


def seconds_of(launch: Callable[[], object], repeats: int) -> float:
    """Median seconds of single launches, after three to warm up."""
    for _ in range(3):
        launch()
    pairs = [_events() for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return float(np.median([b.elapsed_time(e) for b, e in pairs])) / 1e3


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    return begin, end


def num_layers(unique_bytes: int, device: torch.device) -> int:
    """KV copies to rotate over, so that the cache holds nothing of the next one."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, -(-CACHE_TIMES * int(cache) // max(unique_bytes, 1)))


def capture(launch: Callable[[int], object], layers: int) -> torch.cuda.CUDAGraph:
    """A graph of ``launch(0)`` to ``launch(layers - 1)``, warmed up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for layer in range(layers):
            launch(layer)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            launch(layer)
    return graph


def replay_by_turns(
    graphs: Sequence[torch.cuda.CUDAGraph], rounds: int
) -> list[np.ndarray]:
    """Milliseconds of each replay, per graph.

    In every round all graphs run once, in an order drawn anew. Nothing waits for the
    host between them. Two rounds at the start do not count.
    """
    random = np.random.default_rng(0)
    pairs = [[_events() for _ in range(rounds + 2)] for _ in graphs]
    for turn in range(rounds + 2):
        for i in random.permutation(len(graphs)):
            begin, end = pairs[i][turn]
            begin.record()
            graphs[i].replay()
            end.record()
        if turn % 8 == 7:  # keeps the queue short
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return [np.array([b.elapsed_time(e) for b, e in each[2:]]) for each in pairs]
