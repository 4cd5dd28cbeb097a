"""Whether rows of a model can share a batch, tried when it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ...errors import ConfigError
from ..encoded_rows import EncodedRows
from ..model import LoadedModel
from ..row_request import DenseRequest, Stopping
from ..rows import Rows, SeparateRows, SlabRows
from ..settings import DenseSettings
from .packed_linear import packed_if_possible

logger = logging.getLogger(__name__)

# Prompts of two lengths, which share a prefix of more tokens than this.
_LENGTHS, _SHARED = (11, 4), 3
# Tokens that the first row decodes alone, and then both: so the lengths of the answers
# differ too.
_ALONE, _BOTH = 3, 4
# How far logits may differ, as a share of the largest.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_LOW_PRECISION = 5e-2


def rows_for(model: LoadedModel, settings: DenseSettings) -> tuple[Rows, str]:
    """The rows that a model can have.

    Its linear layers are packed, unless it computes with their weights itself. Two rows of
    different lengths in one slab must have the logits of rows that run alone with the
    model's own cache.

    Returns:
        The rows, and why they are separate, which is empty if they are not.

    Raises:
        ConfigError: the model cannot run at all.
    """
    try:
        alone = packed_if_possible(model.model, lambda: _alone(model))
    except Exception as error:
        raise ConfigError(
            f"{type(model.model).__name__} cannot run with the transformers backend: "
            f"{type(error).__name__}: {error}"
        ) from error
    reason = _difference(model, settings, alone)
    if not reason:
        shortest = settings.shortest_shared
        return _shared_rows(model, settings.prefill_tokens, shortest), ""
    logger.warning("Rows run one at a time: %s.", reason)
    return SeparateRows(model), reason


def _alone(model: LoadedModel) -> list[torch.Tensor]:
    with torch.inference_mode():
        return _logits(SeparateRows(model), model)


def _shared_rows(model: LoadedModel, max_tokens: int, shortest: int) -> Rows:
    if model.is_encoder_decoder:
        return EncodedRows(model, max_tokens)
    return SlabRows(model, max_tokens, shortest)


def _difference(
    model: LoadedModel, settings: DenseSettings, alone: Sequence[torch.Tensor]
) -> str:
    """Why rows cannot share a slab, empty if they can."""
    if "past_key_values" not in model.parameters:
        return "it has no KV cache of transformers"
    shortest = min(_SHARED, settings.shortest_shared)
    shared = _shared_rows(model, settings.prefill_tokens, shortest)
    try:
        with torch.inference_mode():
            together = _logits(shared, model)
    except Exception as error:
        return f"its cache has another form ({type(error).__name__}: {error})"
    allowed = _TOLERANCE.get(model.model.dtype, _LOW_PRECISION)
    for one, other in zip(alone, together, strict=True):
        scale = max(1e-6, float(one.abs().max()))
        if not float((one - other).abs().max()) <= allowed * scale:
            return "its logits depend on the row's place in a batch"
    return ""


def _logits(rows: Rows, model: LoadedModel) -> list[torch.Tensor]:
    """The logits of each step, ``[rows, vocab]``. The second row joins later."""
    ids = [3 + 7 * place % (model.vocab_size - 3) for place in range(max(_LENGTHS))]
    requests = [
        DenseRequest(f"probe-{length}", ids[:length], Stopping(_ALONE + _BOTH))
        for length in _LENGTHS
    ]
    first, second = rows.prefill(requests, None)
    logits = [torch.stack([first.logits, second.logits])]
    rows.join([first.kv])
    logits += [rows.decode([ids[step]]) for step in range(_ALONE)]
    rows.join([second.kv])
    logits += [rows.decode([ids[_ALONE + step], ids[step]]) for step in range(_BOTH)]
    for row in reversed(range(len(requests))):
        rows.leave(row)
    return logits
