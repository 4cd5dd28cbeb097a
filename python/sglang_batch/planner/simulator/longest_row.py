"""The longest row that decodes, in the simulator.

Every row grows by one token a step, so that ``length - step`` is constant while a row
decodes. The largest of these is the top of a heap. Rows that have left are removed when they
come to the top.
"""

from __future__ import annotations

from ..compiled import jit_in_place
from .engine_state import NONE, RowHeap, Sim


@jit_in_place
def _decodes(sim: Sim, heap: RowHeap, at: int) -> bool:
    """Whether an entry of the heap is of a row that still decodes."""
    r = sim.requests[heap.rows[at]]
    return bool(r.event != NONE and r.row_base == heap.bases[at])


@jit_in_place
def _push(sim: Sim, heap: RowHeap, base: int, row: int) -> None:
    bases, rows = heap.bases, heap.rows
    at = sim.state[0].heap_rows
    sim.state[0].heap_rows += 1
    while at > 0 and bases[(at - 1) // 2] < base:
        above = (at - 1) // 2
        bases[at], rows[at] = bases[above], rows[above]
        at = above
    bases[at], rows[at] = base, row


@jit_in_place
def _pop(sim: Sim, heap: RowHeap) -> None:
    bases, rows = heap.bases, heap.rows
    sim.state[0].heap_rows -= 1
    number = sim.state[0].heap_rows
    base, row = bases[number], rows[number]
    at = 0
    while 2 * at + 1 < number:
        child = 2 * at + 1
        if child + 1 < number and bases[child + 1] > bases[child]:
            child += 1
        if base >= bases[child]:
            break
        bases[at], rows[at] = bases[child], rows[child]
        at = child
    bases[at], rows[at] = base, row


@jit_in_place
def push_row(sim: Sim, heap: RowHeap, row: int) -> None:
    """Add a row that decodes."""
    state = sim.state[0]
    if state.heap_rows == len(heap.bases):  # full of rows that have left
        entries, state.heap_rows = state.heap_rows, 0
        for at in range(entries):
            if _decodes(sim, heap, at):
                _push(sim, heap, heap.bases[at], heap.rows[at])
    _push(sim, heap, sim.requests[row].row_base, row)


@jit_in_place
def find_longest(sim: Sim, heap: RowHeap) -> None:
    """Set ``longest``: tokens that the longest row reads in this step, 0 without rows."""
    state = sim.state[0]
    while state.heap_rows > 0 and not _decodes(sim, heap, 0):
        _pop(sim, heap)
    state.longest = 0
    if state.heap_rows > 0:
        state.longest = heap.bases[0] + state.step
