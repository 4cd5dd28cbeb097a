"""Our ids on SGLang's requests, also on those that SGLang splits.

The scheduler knows the lines of a job by their ids; what comes under another id is an
online request, and goes before all lines.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput

from ..request import part_request_id


def set_rid(adapted: Any, rid: str) -> None:
    """Give a request our id, so that no client's choice collides with another's.

    The sequences of one that SGLang splits get ids of their own, by which they are
    known for ours too.
    """
    prompts = adapted.input_ids if adapted.input_ids is not None else adapted.text
    several = isinstance(prompts, list) and prompts and not isinstance(prompts[0], int)
    if isinstance(adapted, GenerateReqInput) and _num_samples(adapted) > 1:
        adapted.__class__ = Samples
        adapted.part_ids = (part_request_id(rid, part) for part in itertools.count())
        # These stand for the prompts until SGLang has made the samples.
        adapted.rid = [
            f"{rid}.prompt{i:06d}" for i in range(len(prompts) if several else 1)
        ]
    elif several:
        adapted.rid = [part_request_id(rid, part) for part in range(len(prompts))]
    else:
        adapted.rid = rid


def _num_samples(adapted: GenerateReqInput) -> int:
    params = adapted.sampling_params or {}
    if isinstance(params, list):
        params = params[0] if params else {}
    if (params.get("beam_width") or 1) > 1:
        return 1  # one search finds all n
    return int(params.get("n") or 1)


class Samples(GenerateReqInput):  # type: ignore[misc]
    """A request for several answers to each prompt.

    SGLang makes a copy for each and gives it a random id. Here the ids are ours.

    Attributes:
        part_ids: yields the ids; shared by all copies.
    """

    part_ids: Iterator[str]

    def __getitem__(self, i: int) -> GenerateReqInput:
        item = super().__getitem__(i)
        item.__class__ = Samples
        item.part_ids = self.part_ids
        return item

    def regenerate_rid(self) -> str:
        self.rid = next(self.part_ids)
        return self.rid
