"""A sample of a call as a native request, and the answer as a result."""

from __future__ import annotations

from typing import Any

import msgspec

from ..request import RequestOutput
from .group_board import SampleEnd
from .rollout_call import RolloutCall, RolloutSample, VersionSpan
from .rollout_results import SampleResult

# Tokens still to come of a sample that is longer than expected, as a share of those it has,
# as in planner.output_lengths.estimates.
_OVERRUN = 0.5


def body_of(call: RolloutCall, place: int, nth: int) -> bytes:
    """The body of a ``/generate`` request for sample ``nth`` of a group.

    The tokens of an earlier call become part of the prompt, and count against
    ``max_new_tokens`` and ``min_new_tokens``.
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
    """A sample's result from SGLang's answer.

    Args:
        sample: what the call said about it.

    Returns:
        The result, and the tokens of the prompt if SGLang tells them.
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
