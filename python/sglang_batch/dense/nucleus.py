"""Top-p of whole vocabularies: their probabilities are sorted, and not their tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def keep_nucleus(probs: Any, top_ps: Any) -> None:
    """Set the probabilities of tokens outside top-p to 0, in place.

    A token is in top-p if those before it in descending order sum to at most ``top_p``.
    Of equal probabilities, that of the smaller id comes first.

    Args:
        probs: float32 ``[rows, vocab]``, not negative.
        top_ps: float64 ``[rows, 1]``, from 0 to less than 1.
    """
    ordered = _descending(probs)
    num_kept = (~outside(ordered, top_ps)).sum(dim=-1, keepdim=True)
    least = ordered.gather(-1, num_kept - 1)
    following = ordered.gather(-1, num_kept.clamp(max=probs.shape[-1] - 1))
    probs.masked_fill_(probs < least, 0.0)
    split = ((following == least) & (num_kept < probs.shape[-1])).squeeze(-1)
    if bool(split.any()):  # some of those that equal the least are outside
        num_equal = num_kept - (ordered > least).sum(dim=-1, keepdim=True)
        part = probs[split]
        equal = part == least[split]
        late = equal & (equal.cumsum(dim=-1) > num_equal[split])
        probs[split] = part.masked_fill_(late, 0.0)


def outside(ordered: Any, top_ps: Any) -> Any:
    """Which of the most probable tokens are outside top-p, bool like ``ordered``.

    Args:
        ordered: probabilities in descending order, float32 ``[rows, tokens]``.
        top_ps: float64 ``[rows, 1]``.
    """
    before = ordered.double().cumsum(dim=-1) - ordered
    return before > top_ps


def _descending(probs: Any) -> Any:
    if probs.device.type != "cpu":
        return probs.sort(dim=-1, descending=True).values
    # On a CPU, numpy sorts numbers by vector instructions, in a thirtieth of the time.
    return torch.from_numpy(np.sort(probs.numpy(), axis=-1)).flip(-1)
