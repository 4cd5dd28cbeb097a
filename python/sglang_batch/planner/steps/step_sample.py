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
    context: sum of ``before + new``: the tokens of these prompts up to here.
    squares: sum of ``(before + new)^2``. Some engines compute a prompt's attention anew, with
        the tokens that are in the cache.
    kv_tokens: tokens of KV that the decodes read.
    requests: half of those that arrived or ended while it ran.
    after_prompts: 1 if the step before it computed prompts.
    """

    seconds: float
    prompt_tokens: float
    prompts: float
    decodes: float
    attended: float
    context: float
    squares: float
    kv_tokens: float
    requests: float = 0.0
    after_prompts: float = 0.0
