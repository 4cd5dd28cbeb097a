"""Which samples of a rollout run, which are aborted, and when a group is complete.

Samples are numbered over all groups, group by group. A group is complete once ``k`` of its
samples have finished: its others are no longer wanted. Once enough groups are complete,
nothing else is. A sample that is no longer wanted is aborted, keeps its tokens, and may also
finish meanwhile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from ..request import RequestOutput
from .rollout_call import RolloutCall, RolloutSample, SampleResult, VersionSpan


class SampleEnd(StrEnum):
    """How a sample ended."""

    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


class GroupEnd(StrEnum):
    """How a group ended: ``k`` samples finished, it was aborted before, or too many failed."""

    COMPLETE = "complete"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(slots=True)
class _Group:
    k: int
    running: set[int]  # samples without an end, those not sent yet included
    ends: dict[SampleEnd, int] = field(
        default_factory=lambda: dict.fromkeys(SampleEnd, 0)
    )

    @property
    def is_complete(self) -> bool:
        return self.ends[SampleEnd.FINISHED] >= self.k


class GroupBoard:
    """The groups of one call.

    Args:
        sizes: the number of samples of each group, ``n``.
        finished: how many of them must finish, ``k``, each at most its ``n``.
        enough: complete groups at which everything else is aborted.
    """

    def __init__(
        self, sizes: Sequence[int], finished: Sequence[int], enough: int
    ) -> None:
        self._begin = [0]
        self._groups = []
        for n, k in zip(sizes, finished, strict=True):
            first = self._begin[-1]
            self._groups.append(_Group(k, set(range(first, first + n))))
            self._begin.append(first + n)
        self._enough = enough
        self._num_complete = 0
        self._over = deque[int]()
        self.is_stopped = False

    def place(self, number: int) -> tuple[int, int]:
        """The group of a sample, and its index in the group."""
        group = bisect_right(self._begin, number) - 1
        return group, number - self._begin[group]

    def is_wanted(self, number: int) -> bool:
        """Whether a sample is to run, or to continue."""
        group = self._groups[self.place(number)[0]]
        return not self.is_stopped and not group.is_complete

    def ended(self, number: int, how: SampleEnd) -> list[int]:
        """A sample has ended. Returns those without an end that were wanted until now, to be
        aborted.

        An abort of a wanted sample was somebody else's, such as that of a trainer who wants
        to load new weights. It stops the whole call.
        """
        was_wanted = self.is_wanted(number)
        place, _ = self.place(number)
        group = self._groups[place]
        group.running.remove(number)
        group.ends[how] += 1
        if not group.running:
            self._over.append(place)
        if not was_wanted:
            return []
        if how is SampleEnd.ABORTED:
            return self.stop()
        if not group.is_complete:
            return []
        unwanted = sorted(group.running)
        self._num_complete += 1
        if self._num_complete >= self._enough:
            unwanted += self.stop()
        return unwanted

    def stop(self) -> list[int]:
        """Nothing is wanted any more. Returns as :meth:`ended`."""
        if self.is_stopped:
            return []
        wanted = [group for group in self._groups if not group.is_complete]
        self.is_stopped = True
        return sorted(number for group in wanted for number in group.running)

    def pop_over(self) -> list[int]:
        """Groups whose last sample has ended since the last call, in that order."""
        over = list(self._over)
        self._over.clear()
        return over

    def end_of(self, group: int) -> GroupEnd:
        """How a group ended, once it is over."""
        found = self._groups[group]
        if found.is_complete:
            return GroupEnd.COMPLETE
        return GroupEnd.ABORTED if found.ends[SampleEnd.ABORTED] else GroupEnd.FAILED


# Tokens still to come of a sample that is longer than expected, as a share of those it has,
# as in planner.output_lengths.estimates.
_OVERRUN = 0.5


def body_of(call: RolloutCall, place: int, nth: int) -> bytes:
    """The body of a ``/generate`` request for sample ``nth`` of a group. The tokens of an
    earlier call become part of the prompt, and count against ``max_new_tokens`` and
    ``min_new_tokens``.
    """
    group, sample = call.groups[place], call.sample_of(place, nth)
    params = call.sampling_of(place, nth)
    so_far = len(sample.output_ids)
    if so_far:
        for name in ("max_new_tokens", "min_new_tokens"):
            if isinstance(params.get(name), int):
                params[name] = max(0, params[name] - so_far)
    body: dict[str, Any] = {
        "sampling_params": params,
        "return_logprob": call.return_logprob,
    }
    if group.input_ids is None:
        body |= {"text": group.text, "return_prompt_token_ids": True}
    else:
        body["input_ids"] = [*group.input_ids, *sample.output_ids]
    if group.lora_path is not None:
        body["lora_path"] = group.lora_path
    return msgspec.json.encode(body)


def expected_len(call: RolloutCall, place: int, nth: int) -> int | None:
    """Tokens that a sample is expected to generate in this call. None: not known."""
    expected = call.groups[place].expected_tokens
    if expected is None:
        return None
    so_far = len(call.sample_of(place, nth).output_ids)
    return max(1, round(max(expected - so_far, _OVERRUN * so_far)))


def result_of(
    nth: int, sample: RolloutSample, output: RequestOutput
) -> tuple[SampleResult, list[int] | None]:
    """A sample's result from SGLang's answer, and the tokens of the prompt if SGLang tells
    them. ``sample``: its part of the call.
    """
    body = msgspec.json.decode(output.body)
    if not output.ok:
        failed = SampleResult(
            index=nth,
            status=SampleEnd.FAILED,
            output_ids=sample.output_ids,
            output_logprobs=sample.output_logprobs,
            text=sample.text,
            weight_versions=sample.weight_versions,
            error=body.get("error"),
        )
        return failed, None
    meta = body["meta_info"]
    reason = meta.get("finish_reason") or {}
    new_ids = body.get("output_ids") or []
    found = SampleResult(
        index=nth,
        status=SampleEnd.ABORTED
        if reason.get("type") == "abort"
        else SampleEnd.FINISHED,
        output_ids=[*sample.output_ids, *new_ids],
        output_logprobs=_logprobs(sample, meta, len(new_ids)),
        text=sample.text + (body.get("text") or ""),
        finish_reason=reason,
        weight_versions=_all_spans(sample, meta, len(new_ids)),
        prompt_tokens=meta.get("prompt_tokens") or 0,
        cached_tokens=meta.get("cached_tokens") or 0,
    )
    return found, meta.get("prompt_token_ids") or body.get("prompt_token_ids")


def _logprobs(
    sample: RolloutSample, meta: dict[str, Any], num_new: int
) -> list[float] | None:
    earlier = sample.output_logprobs
    if earlier is None:
        if sample.output_ids:
            return None
        earlier = []
    new = meta.get("output_token_logprobs")
    if new is None and num_new:
        return None
    return [*earlier, *(each[0] for each in (new or ())[:num_new])]


def _all_spans(
    sample: RolloutSample, meta: dict[str, Any], num_new: int
) -> list[VersionSpan]:
    """The spans of the earlier tokens and those of the new ones, behind each other."""
    spans = list(sample.weight_versions)
    so_far = len(sample.output_ids)
    version = str(meta.get("weight_version", ""))
    whole: VersionSpan = {"version": version, "start": 0, "end": num_new}
    for new in meta.get("weight_versions") or [whole]:
        span: VersionSpan = {
            "version": new["version"],
            "start": so_far + new["start"],
            "end": so_far + min(new["end"], num_new),
        }
        if span["start"] >= span["end"]:
            continue
        last = spans[-1] if spans else None
        if last and (last["version"], last["end"]) == (span["version"], span["start"]):
            spans[-1] = {**last, "end": span["end"]}
        else:
            spans.append(span)
    return spans
