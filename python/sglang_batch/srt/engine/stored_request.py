"""A rendered request on disk: from conversion on, without template and tokenizer.

SGLang's serving classes convert a parsed body into an internal request, and format the
answer from both. Both are pickled, without the prompt's token ids and without fields
that have their defaults.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from sglang.srt.managers.io_struct import GenerateReqInput

from ..compat.server_types import EngineRequest
from .endpoints import Converted


class StoredRequest(NamedTuple):
    """The fields of SGLang's internal request that have no default value.

    has_ids: whether its ``input_ids`` were the prompt's token ids, which are elsewhere.
    """

    kind: Any
    fields: dict[str, Any]
    has_ids: bool
    parsed: object
    max_new_tokens: int | None
    ignore_eos: bool


def store(
    converted: Converted,
    input_ids: object,
    max_new_tokens: int | None,
    ignore_eos: bool,
) -> bytes | None:
    """The bytes for :func:`load`, None for a request that cannot be pickled."""
    adapted, parsed = converted
    # Ids, and the class that makes ids for samples, are set when it is rendered again.
    kind: Any = (
        GenerateReqInput if isinstance(adapted, GenerateReqInput) else type(adapted)
    )
    defaults = _defaults(kind)
    fields = {
        name: value
        for name, value in vars(adapted).items()
        if name in kind.__dataclass_fields__
        and (name not in defaults or value is not defaults[name])
    }
    fields.pop("rid", None)
    has_ids = fields.get("input_ids") is input_ids and input_ids is not None
    if has_ids:
        del fields["input_ids"]
    stored = StoredRequest(kind, fields, has_ids, parsed, max_new_tokens, ignore_eos)
    try:
        return pickle.dumps(tuple(stored), protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError):
        return None


def load(data: bytes, input_ids: Sequence[int]) -> tuple[Converted, StoredRequest]:
    """The converted request that was stored, with its prompt's token ids."""
    stored = StoredRequest(*pickle.loads(data))
    adapted: EngineRequest = object.__new__(stored.kind)
    vars(adapted).update(_defaults(stored.kind))
    vars(adapted).update(stored.fields)
    if stored.has_ids:
        adapted.input_ids = list(input_ids)
    return (adapted, stored.parsed), stored


@cache
def _defaults(kind: Any) -> dict[str, Any]:
    """Defaults that are immutable, by field."""
    return {
        field.name: field.default
        for field in dataclasses.fields(kind)
        if field.default is not dataclasses.MISSING
    }
