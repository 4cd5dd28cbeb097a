"""Notes of what happened to rows, for those who keep them by their lengths.

They are taken in one place, ``batch_admission.take_notes``, before each step: what keeps rows by
length is not given to all functions of the simulator.
"""

from __future__ import annotations

from ..compiled import jit_in_place
from .engine_state import Sim

DECODES, LEAVES, WAITS, COMES_BACK = 0, 1, 2, 3


@jit_in_place
def note(sim: Sim, i: int, kind: int) -> None:
    """Note that a row begins to decode, leaves, waits again, or comes back."""
    sim.lists.notes[sim.state[0].num_notes] = 4 * i + kind
    sim.state[0].num_notes += 1
