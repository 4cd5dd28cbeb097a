"""Grammars that allow nothing more: the request fails, and not the engine.

With ``root ::= root``, say, no token may follow. SGLang's sampler then has no token with
a chance above 0, and its scheduler dies of that, with all that others have in it.
"""

from __future__ import annotations

from typing import Any


def allow_one(
    _result: Any, _grammar: Any, vocab_mask: Any, idx: int, *_args: Any, **_kwargs: Any
) -> None:
    """AFTER hook on ``XGrammarGrammar.fill_vocab_mask``: any token where none may follow.

    The grammar refuses the token that is drawn, and SGLang ends the request for it.

    vocab_mask: int32 ``[rows, vocab / 32]``, a bit for each token that may follow.
    """
    if not vocab_mask[idx].any():
        vocab_mask[idx].fill_(-1)
