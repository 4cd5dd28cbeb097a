"""Grammars that allow no token: only their request fails, not the engine.

With ``root ::= root``, for example, no token may follow. SGLang's sampler then finds no
token with a probability above 0, and its scheduler dies with the requests of everyone.
"""

from __future__ import annotations

import torch


def allow_one(
    _result: object,
    _grammar: object,
    vocab_mask: torch.Tensor,
    idx: int,
    *_args: object,
    **_kwargs: object,
) -> None:
    """AFTER hook on ``XGrammarGrammar.fill_vocab_mask``: if no token may follow, allow all.

    The grammar rejects the sampled token, and SGLang ends the request for it.

    Args:
        vocab_mask: int32 ``[rows, vocab / 32]``, a bit for each token that may follow.
        idx: the row of the request.
    """
    if not vocab_mask[idx].any():
        vocab_mask[idx].fill_(-1)
