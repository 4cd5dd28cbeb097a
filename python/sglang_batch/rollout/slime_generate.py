"""slime's rollouts on offline servers.

slime (checked with 0.3.1) calls ``--custom-generate-function-path`` for each sample, and
posts it to ``/generate``. Here the samples that are asked for at about the same time become
one call of ``/offline_batch/rollouts``, those of a group with their common prompt::

    # my_rollout.py, for --custom-generate-function-path my_rollout.generate
    from sglang_batch.rollout.slime_generate import SlimeGenerate

    generate = SlimeGenerate()

Nothing of slime is imported until samples come.
"""

from __future__ import annotations

import asyncio
import importlib
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpx

from ..errors import ServerError
from .rollout_call import RolloutGroup, RolloutSample, SampleResult
from .rollout_client import LengthHistory, RolloutClient

SlimeSample: TypeAlias = Any
"""A ``slime.utils.types.Sample``."""


@dataclass(slots=True, eq=False)
class _Asked:
    """A sample that slime waits for."""

    sample: SlimeSample
    prompt_ids: list[int]
    params: dict[str, Any]
    result: asyncio.Future[SampleResult]

    @property
    def for_server(self) -> RolloutSample:
        so_far = self.sample.response_length
        ids = self.sample.tokens[len(self.sample.tokens) - so_far :] if so_far else []
        return RolloutSample(
            output_ids=ids,
            output_logprobs=self.sample.rollout_log_probs if so_far else None,
            sampling_params=self.params,
        )


class SlimeGenerate:
    """slime's function for a sample: ``await generate(args, sample, sampling_params)``.

    A sample that was aborted returns with its tokens and the status ``ABORTED``, and
    continues after them when slime asks for it again (``--partial-rollout``). Samples with
    images, and those of which slime replays routed experts or top-p tokens, go its own way.

    Args:
        urls: offline servers, among which groups are dealt. Empty: the workers of slime's
            router.
        quiet_s: samples are sent once none has been asked for in this time, in seconds.
        tokenizer: empty for that of ``args.hf_checkpoint``.
        history: lengths of the answers, for example one restored from a checkpoint.
    """

    def __init__(
        self,
        urls: Sequence[str] = (),
        *,
        quiet_s: float = 0.02,
        api_key: str | None = None,
        tokenizer: Any = None,
        history: LengthHistory | None = None,
    ) -> None:
        self.history = LengthHistory() if history is None else history
        self._urls = list(urls)
        self._quiet_s = quiet_s
        self._api_key = api_key
        self._tokenizer = tokenizer
        self._asked: list[_Asked] = []
        self._sending: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def __call__(
        self, args: Any, sample: SlimeSample, sampling_params: dict[str, Any]
    ) -> SlimeSample:
        if (
            sample.multimodal_inputs
            or sampling_params.get("custom_params")
            or getattr(args, "use_rollout_routing_replay", False)
        ):
            theirs = importlib.import_module("slime.rollout.sglang_rollout")
            return await theirs.generate(args, sample, sampling_params)
        if sample.response_length >= sampling_params["max_new_tokens"]:
            sample.status = sample.Status.TRUNCATED
            return sample
        if not sample.tokens:
            if self._tokenizer is None:
                processing = importlib.import_module("slime.utils.processing_utils")
                self._tokenizer = processing.load_tokenizer(
                    args.hf_checkpoint, trust_remote_code=True
                )
            ids = self._tokenizer.encode(sample.prompt, add_special_tokens=False)
            sample.tokens = list(ids)
        prompt_ids = sample.tokens[: len(sample.tokens) - sample.response_length]
        future = asyncio.get_running_loop().create_future()
        self._asked.append(_Asked(sample, prompt_ids, sampling_params, future))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send_when_quiet(args))
        _append(args, sample, await future)
        return sample

    async def _send_when_quiet(self, args: Any) -> None:
        num_asked = -1
        while len(self._asked) != num_asked:
            num_asked = len(self._asked)
            await asyncio.sleep(self._quiet_s)
        asked, self._asked = self._asked, []
        call = asyncio.ensure_future(self._send(args, asked))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _send(self, args: Any, asked: list[_Asked]) -> None:
        try:
            urls = self._urls or await _workers(args)
            groups = _groups(asked)
            expected = self.history.expecting(map(_for_server, groups))
            tokens = [
                len(group) * (each.expected_tokens or 0.0) + len(group) * 1e-6
                for group, each in zip(groups, expected, strict=True)
            ]
            # The longest first, to the server with the least.
            dealt: list[list[list[_Asked]]] = [[] for _ in urls]
            load = [0.0] * len(urls)
            for i in sorted(range(len(groups)), key=lambda i: -tokens[i]):
                server = load.index(min(load))
                dealt[server].append(groups[i])
                load[server] += tokens[i]
            async with asyncio.TaskGroup() as tasks:
                for url, groups in zip(urls, dealt, strict=True):
                    if groups:
                        tasks.create_task(self._run(url, groups))
        except* Exception as failures:
            for each in asked:
                if not each.result.done():
                    each.result.set_exception(failures.exceptions[0])

    async def _run(self, url: str, groups: list[list[_Asked]]) -> None:
        client = RolloutClient(url, self._api_key, self.history)
        async with client.start([_for_server(group) for group in groups]) as rollout:
            async for group in rollout:
                for each, result in zip(
                    groups[group.index], group.samples, strict=True
                ):
                    if not each.result.done():  # slime may have given it up
                        each.result.set_result(result)


async def _workers(args: Any) -> list[str]:
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    async with httpx.AsyncClient() as http:
        try:
            answer = await http.get(f"{router}/workers")
            return [worker["url"] for worker in answer.json()["workers"]]
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise ServerError(
                f"{router}/workers does not tell its workers ({error!r}); give the URLs "
                "of the servers to SlimeGenerate."
            ) from None


def _groups(asked: list[_Asked]) -> list[list[_Asked]]:
    """The samples by group, and by prompt if a group has several."""
    groups = defaultdict[Hashable, list[_Asked]](list)
    for each in asked:
        index = each.sample.group_index
        group = id(each.sample) if index is None else index
        groups[group, tuple(each.prompt_ids)].append(each)
    return list(groups.values())


def _for_server(group: list[_Asked]) -> RolloutGroup:
    return RolloutGroup(
        input_ids=group[0].prompt_ids,
        n=len(group),
        samples=[each.for_server for each in group],
    )


def _append(args: Any, sample: SlimeSample, result: SampleResult) -> None:
    """Give a sample its new tokens, as slime does with an answer of ``/generate``."""
    if result.status == "failed":
        sample.status = sample.Status.FAILED
        return
    so_far = sample.response_length
    tokens = result.output_ids[so_far:]
    meta: dict[str, Any] = {
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "completion_tokens": len(tokens),
    }
    if result.weight_versions:
        meta["weight_version"] = result.weight_versions[-1]["version"]
    sample.append_response_tokens(
        args,
        tokens=tokens,
        log_probs=(result.output_logprobs or [])[so_far:],
        trainable=True,
        meta_info=meta,
        text=result.text,
    )
