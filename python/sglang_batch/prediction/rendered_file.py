"""The prompts of a batch file, rendered by SGLang for a plan."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ..batch_api.equal_requests import find_equal
from ..batch_api.jsonl import BatchFile
from ..planner.requests import UNKNOWN, PlanRequests
from ..request import BatchRequestInput
from ..store.token_spool import TokenSpool
from .report import LeftOut

if TYPE_CHECKING:
    from ..srt.engine.in_process import RenderedRequest, Renderer

# Requests rendered at the same time, in SGLang's threads.
LOOKAHEAD = 32


@dataclass(frozen=True, slots=True)
class RenderedFile:
    """The prompts of a file. A line can have several.

    custom_ids: the line of each prompt.
    refused: lines that SGLang cannot render.
    num_merged: lines that get the answer of an equal one, and are not rendered.
    model_config: the model's config.json.
    """

    requests: PlanRequests
    custom_ids: list[str]
    refused: list[LeftOut]
    num_merged: int
    model_config: dict[str, Any]


async def render_file(
    file: BatchFile, renderer: Renderer, spool: TokenSpool, dedupe: str
) -> RenderedFile:
    """Render every line that would be computed, and keep its tokens, in ``spool``, and its
    lengths.

    Args:
        dedupe: see :class:`~sglang_batch.config.OfflineBatchConfig`.
    """
    valid = np.setdiff1d(np.arange(len(file)), np.array(list(file.invalid), np.int64))
    equal = find_equal(file, valid, dedupe)
    custom_ids: list[str] = []
    refused: list[LeftOut] = []
    max_new_tokens, known = array("q"), array("q")
    adapters, adapter = {"": 0}, array("i")
    with tqdm(
        total=len(equal.todo),
        desc="Rendering",
        unit="req",
        dynamic_ncols=True,
    ) as bar:
        async for request, found in _rendered_in_order(file, equal.todo, renderer):
            bar.update()
            if isinstance(found, str):
                refused.append(LeftOut(request.custom_id, found))
                continue
            for prompt, limit in zip(found.prompts, found.max_new_tokens, strict=True):
                spool.append(prompt, found.shareable_len, found.namespace)
                adapter.append(adapters.setdefault(found.adapter, len(adapters)))
                custom_ids.append(request.custom_id)
                max_new_tokens.append(limit)
                known.append(limit if found.fixed_length else UNKNOWN)
    tokens, offsets = spool.arrays()
    return RenderedFile(
        PlanRequests(
            tokens,
            offsets,
            np.array(max_new_tokens, dtype=np.int32),
            np.array(known, dtype=np.int32),
            np.array(adapter, dtype=np.int32) if len(adapters) > 1 else None,
        ),
        custom_ids,
        refused,
        equal.num_merged,
        renderer.model_config,
    )


async def _rendered_in_order(
    file: BatchFile, numbers: NDArray[np.int64], renderer: Renderer
) -> AsyncGenerator[tuple[BatchRequestInput, RenderedRequest | str]]:
    ahead: deque[tuple[BatchRequestInput, asyncio.Task[RenderedRequest | str]]]
    ahead = deque()
    for number in numbers.tolist():
        request = file[number]
        ahead.append((request, asyncio.create_task(renderer.render(request))))
        if len(ahead) == LOOKAHEAD:
            first, task = ahead.popleft()
            yield first, await task
    for request, task in ahead:
        yield request, await task
