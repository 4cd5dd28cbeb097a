"""A prompt with media as tokens for the plan.

SGLang's scheduler has a placeholder for each part of an image, made of a hash of its content.
The plan need not have the same ones: only equal ones for equal images, and as many.
"""

from __future__ import annotations

import copy
from typing import Any

from ...planner.requests import END_OF_PLACEHOLDERS, FIRST_PLACEHOLDER
from ..compat.server_types import TokenizerManager

_MANY = END_OF_PLACEHOLDERS - FIRST_PLACEHOLDER


async def media_token_ids(manager: TokenizerManager, request: Any) -> list[int]:
    """The tokens of a prompt with media, which are loaded and processed for it.

    Only their placeholders are kept.

    Args:
        request: SGLang's request with its media in it, not changed.

    Raises:
        Exception: one that cannot be loaded.
    """
    own = copy.copy(request)
    for name in ("image_data", "video_data", "audio_data"):
        value = getattr(own, name, None)
        if value is not None:
            setattr(own, name, list(value) if isinstance(value, list) else [value])
    processed = await manager.mm_processor.process_mm_data_async(
        image_data=own.image_data,
        audio_data=own.audio_data,
        input_text=own.text or own.input_ids or "",
        request_obj=own,
        max_req_input_len=manager.max_req_input_len,
    )
    ids = processed.input_ids
    ids = list(ids) if isinstance(ids, list) else ids.flatten().tolist()
    for item in processed.mm_items:
        item.set_pad_value()
        for begin, end in item.offsets or ():
            token = FIRST_PLACEHOLDER + int(item.hash) % _MANY
            ids[begin : end + 1] = [token] * (end + 1 - begin)
    return ids


def num_placeholders(req: Any, begin: int, end: int) -> int:
    """Placeholders among the tokens from ``begin`` up to ``end`` of SGLang's request."""
    if req.multimodal_inputs is None:
        return 0
    return sum(
        max(0, min(last + 1, end) - max(first, begin))
        for item in req.multimodal_inputs.mm_items
        for first, last in item.offsets or ()
    )
