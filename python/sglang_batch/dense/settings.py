"""The size of the dense engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DenseSettings:
    """Limits of the batch.

    max_rows: most rows that decode together.
    max_cells: most KV cells, which are rows times columns, of the batch. None: no limit
        but that of the memory.
    host_cells: most KV cells of rows that wait: those that ran are in host memory, and
        prompts that were computed ahead on the device. What does not fit is computed
        again.
    prefill_tokens: most tokens of a prefill, padding included. A longer prompt is
        prefilled alone.
    shortest_shared: a shared prefix of fewer tokens is computed for each prompt.
    seed: of rows that name none.
    step_cells: KV cells that are read in the time of a decode step without rows. Rows that
        join by length are compared with it. By default that of a model with 24 times as
        many parameters as numbers in a token's keys and values.
    """

    max_rows: int = 32
    max_cells: int | None = None
    host_cells: int = 1 << 20
    prefill_tokens: int = 4096
    shortest_shared: int = 16
    seed: int = 0
    step_cells: float = 8000.0
