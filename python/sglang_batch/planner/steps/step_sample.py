"""A step that an engine measured."""

from __future__ import annotations

from typing import NamedTuple


class StepSample(NamedTuple):
    """A step that an engine measured.

    prompt_tokens, prompts: tokens of prompts that it computed, and the number of requests
        that they are of.
    decodes: requests that decoded, a token each.
    attended: sum of ``(before + new)^2 - before^2`` over the prompts, twice the pairs of
        tokens that attention computed.
    squares: sum of ``(before + new)^2``. Some engines compute a prompt's attention anew, with
        the tokens that are in the cache.
    kv_tokens: tokens of KV that the decodes read.
    """

    seconds: float
    prompt_tokens: float
    prompts: float
    decodes: float
    attended: float
    squares: float
    kv_tokens: float
