"""The answers to a rollout: groups of samples, as the server writes and the client reads
them."""

from __future__ import annotations

from typing import Any

import msgspec

from .rollout_call import RolloutSample, VersionSpan


class SampleResult(msgspec.Struct, kw_only=True):
    """One sample.

    index: in its group.
    status: ``finished``, ``aborted`` or ``failed``.
    output_ids: all tokens, with those that the call gave.
    output_logprobs: the log probability of each, None if not all are known.
    text: of ``output_ids``.
    finish_reason: SGLang's, None if it failed.
    weight_versions: which weights generated which tokens.
    prompt_tokens, cached_tokens: of this call's prompt, which earlier tokens are part of.
    error: why it failed, in OpenAI's shape.
    """

    index: int
    status: str
    output_ids: list[int] = []
    output_logprobs: list[float] | None = None
    text: str = ""
    finish_reason: dict[str, Any] | None = None
    weight_versions: list[VersionSpan] = []
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: dict[str, Any] | None = None

    def so_far(self) -> RolloutSample:
        """This sample for another call, which continues it."""
        return RolloutSample(
            output_ids=self.output_ids,
            output_logprobs=self.output_logprobs,
            weight_versions=self.weight_versions,
            text=self.text,
        )


class GroupResult(msgspec.Struct, kw_only=True):
    """One group.

    index: in the call. id: the group's own.
    status: ``complete``: ``k`` samples finished. ``aborted``: it was aborted before.
        ``failed``: too many samples failed.
    input_ids: the prompt, where SGLang has told it.
    """

    index: int
    id: str | int | None
    status: str
    input_ids: list[int] | None
    samples: list[SampleResult]

    @property
    def finished(self) -> list[SampleResult]:
        """The samples that finished."""
        return [each for each in self.samples if each.status == "finished"]
