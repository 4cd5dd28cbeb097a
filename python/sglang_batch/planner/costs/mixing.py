"""Whether a step should compute prompts and decode together, or first one and then the other.

Together they pass the matrices once and share what a step costs besides. Engines compute the
attention of such a step with the kernels of prompts, which may take longer for rows that decode.
By a machine's timed steps, the seconds that mixing loses are ::

    decodes * a + KV * b + KV^2 / decodes * c - step
        - (m(prompt tokens) + m(decodes) - m(both))

with ``m`` the seconds of the matrices. Datasheets have no ``a``, ``b`` and ``c``: without timed
steps, prompts and decodes are always mixed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..compiled import jit_in_place
from .cost_model import CostModel
from .step_table import COMPUTE, MEMORY, OTHER, TOKENS

# ``m`` is known at 0 tokens and at powers of 2 below this exponent.
_POWERS = 16


class MixingCost(NamedTuple):
    """What mixing costs and saves on a machine, in seconds.

    decode_s, kv_token_s, kv_square_s: a, b and c, of a row that decodes, a token of KV that it
        reads, and the square of these.
    step_s: of a step besides its tokens, and of the change from prompts to decodes.
    matrices_s: m at 0, 1, 2, 4, ... tokens.
    """

    decode_s: float
    kv_token_s: float
    kv_square_s: float
    step_s: float
    matrices_s: tuple[float, ...]

    @classmethod
    def of(cls, cost: CostModel) -> MixingCost | None:
        """None where mixing loses nothing."""
        extras = cost.extras
        decode_s = extras.mixed_decode_s - extras.decode_s
        if max(decode_s, extras.mixed_kv_token_s, extras.mixed_square_s) <= 0:
            return None
        table = cost.step_table
        tokens = [0.0, *(2.0**power for power in range(_POWERS))]
        seconds = np.interp(tokens, table[TOKENS], table[COMPUTE] + table[MEMORY])
        return cls(
            float(decode_s),
            float(extras.mixed_kv_token_s),
            float(extras.mixed_square_s),
            float(np.interp(1.0, table[TOKENS], table[OTHER])) + extras.after_prompts_s,
            tuple(seconds.tolist()),
        )


# For compiled code, which needs one of the same type.
ALWAYS_MIXED = MixingCost(0.0, 0.0, 0.0, 0.0, (0.0,) * (_POWERS + 1))


@jit_in_place
def mixing_loss_s(
    cost: MixingCost, prompt_tokens: float, decodes: float, kv_tokens: float
) -> float:
    """Seconds by which a mixed step takes longer than two, below 0 if it takes less.

    Args:
        prompt_tokens: tokens of prompts.
        decodes: rows that decode.
        kv_tokens: tokens of KV that they read.
    """
    loss = decodes * cost.decode_s + kv_tokens * cost.kv_token_s - cost.step_s
    loss += cost.kv_square_s * kv_tokens * kv_tokens / max(decodes, 1.0)
    apart = _matrices(cost, prompt_tokens) + _matrices(cost, decodes)
    return float(loss - (apart - _matrices(cost, prompt_tokens + decodes)))


@jit_in_place
def _matrices(cost: MixingCost, tokens: float) -> float:
    """m, on lines between powers of 2."""
    if tokens <= 1.0:
        low = cost.matrices_s[0]
        return float(low + (cost.matrices_s[1] - low) * tokens)
    power = 0
    while power < len(cost.matrices_s) - 3 and 2.0 ** (power + 1) <= tokens:
        power += 1
    low, high = cost.matrices_s[power + 1], cost.matrices_s[power + 2]
    return float(low + (high - low) * (tokens / 2.0**power - 1.0))
