"""Seconds of a step by its number of tokens, as a table that compiled code reads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..compiled import jit_in_place
from ..requests import Floats

# Rows of a table.
TOKENS, COMPUTE, MEMORY, OTHER, HEAD_COMPUTE, HEAD_MEMORY = range(6)


class StepExtras(NamedTuple):
    """Seconds that an engine spends in a step besides its operators, where they were measured.

    prompt_step_s: of a step with prompts.
    prompt_s: for each request of which a part of the prompt is computed.
    decode_s: for each request that decodes.
    mixed_decode_s: the same in a step with prompts.
    mixed_kv_token_s: for each token of KV that these read, besides its time in other steps.
    prompt_context_s: for each token of a prompt up to here, those in the cache included.
    prompt_square_s: for each square of a prompt's tokens, those in the cache included.
    mixed_square_s: for each square of the KV of a row that decodes in a step with prompts.
    request_s: for the arrival and the end of each request.
    after_prompts_s: of a step that only decodes, after one with prompts.
    """

    prompt_step_s: float = 0.0
    prompt_s: float = 0.0
    decode_s: float = 0.0
    mixed_decode_s: float = 0.0
    mixed_kv_token_s: float = 0.0
    prompt_context_s: float = 0.0
    prompt_square_s: float = 0.0
    mixed_square_s: float = 0.0
    request_s: float = 0.0
    after_prompts_s: float = 0.0


NO_EXTRAS = StepExtras()


def linear_table(token_time_s: float, weight_read_time_s: float) -> Floats:
    """The table of a machine whose steps read all weights and compute at one rate.

    Returns:
        float64 ``[6, 2]``: tokens, then seconds of operators limited by arithmetic, of those
        limited by reads, and of neither; then the first two of these for the output matrix,
        by the number of rows.
    """
    table = np.zeros((6, 2))
    table[TOKENS] = 0.0, 1.0
    table[COMPUTE, 1] = token_time_s
    table[MEMORY] = weight_read_time_s
    return table


@jit_in_place
def matrix_seconds(
    table: Floats, tokens: float, rows: float
) -> tuple[float, float, float]:
    """Seconds of a step without attention: of arithmetic, of reads, and of neither.

    Args:
        table: as :func:`linear_table` has it.
        tokens: of prompts and answers.
        rows: those whose logits are needed.
    """
    column = _segment(table, tokens)
    compute = _at(table, COMPUTE, column, tokens)
    memory = _at(table, MEMORY, column, tokens)
    other = _at(table, OTHER, column, tokens)
    column = _segment(table, rows)
    compute += _at(table, HEAD_COMPUTE, column, rows)
    memory += _at(table, HEAD_MEMORY, column, rows)
    return compute, memory, other


@jit_in_place
def _segment(table: Floats, tokens: float) -> int:
    """The column of a table that begins the interval of this number of tokens."""
    low, high = 0, table.shape[1] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if table[TOKENS, middle] <= tokens:
            low = middle
        else:
            high = middle
    return low


@jit_in_place
def _at(table: Floats, row: int, column: int, tokens: float) -> float:
    """A row's value at this number of tokens, on the line through two columns."""
    begin, end = table[TOKENS, column], table[TOKENS, column + 1]
    low, high = table[row, column], table[row, column + 1]
    return float(low + (high - low) * ((tokens - begin) / (end - begin)))
