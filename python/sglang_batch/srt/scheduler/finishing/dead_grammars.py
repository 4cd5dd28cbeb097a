"""Grammars that allow no token: only their request fails, not the engine.

With ``root ::= root``, for example, no token may follow. SGLang's sampler then finds no
token with a probability above 0, and its scheduler dies with the requests of everyone.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

_MARK = "_sglang_batch_allows_no_token"


def allow_one(
    _result: object,
    grammar: object,
    vocab_mask: torch.Tensor,
    idx: int,
    *_args: object,
    **_kwargs: object,
) -> None:
    """AFTER hook on ``XGrammarGrammar.fill_vocab_mask``: if no token may follow, allow
    all, and mark the grammar. ``abort_marked`` then ends its request.

    Args:
        vocab_mask: int32 ``[rows, vocab / 32]``, a bit for each token that may follow.
        idx: the row of the request.
    """
    if not vocab_mask[idx].any():
        vocab_mask[idx].fill_(-1)
        setattr(grammar, _MARK, True)


def abort_marked(_processor: object, batch: ScheduleBatch, *_args: object) -> None:
    """BEFORE hook on the processing of a step's results: abort what ``allow_one`` marked.

    The grammar rejects the sampled token, but SGLang looks for ends first: a token of
    its end, or the last of ``max_tokens``, would pass for an answer.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    for req in batch.reqs:
        if req.grammar is None or req.finished() or not _is_marked(req.grammar):
            continue
        if req.inflight_middle_chunks <= 0:
            req.to_finish = FINISH_ABORT(
                "Grammar accept_token failed: no token may follow.",
                HTTPStatus.INTERNAL_SERVER_ERROR,
                "InternalServerError",
            )


def _is_marked(grammar: Any) -> bool:
    # Behind a reasoning parser, the grammar is inside another.
    return hasattr(getattr(grammar, "grammar", grammar), _MARK)
