"""What the cache held of a prompt before the first of its samples was computed.

A prompt with several samples counts once, and usage has it from its first sample. Whoever
computes the prompt, it is not always this one: SGLang has a request of its own do it, which
has no answer, and with a plan any of the samples may be first.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from ..compat.server_types import EngineAnswer, EngineRequest, SequenceAnswer


async def counted(
    original: Callable[..., AsyncGenerator[Any]],
    manager: Any,
    obj: Any,
    request: Any,
    request_states: dict[str, Any],
) -> AsyncGenerator[Any]:
    """SGLang's own ``TokenizerManager._handle_batch_request``, with its samples counted.

    Args:
        original: the method, not bound.
    """
    samples = int(getattr(obj, "parallel_sample_num", 1))
    found = SampledPrompts(samples)
    if samples > 1:
        manager = NotingPrompts(manager, found, obj.batch_size)
    async with aclosing(original(manager, obj, request, request_states)) as answers:
        async for answer in answers:
            if samples > 1:
                found.count(answer)
            yield answer


class SampledPrompts:
    """The prompts of one call, each with the same number of samples.

    Args:
        samples: of each prompt.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        # By prompt, the fewest cached tokens that one of its requests reported.
        self._cached: dict[int, int] = {}
        self._num_computed = 0

    def computed_first(self, answer: SequenceAnswer) -> None:
        """The request that computed the next prompt, before its samples, has ended."""
        self._note(self._num_computed, answer)
        self._num_computed += 1

    def count(self, answers: EngineAnswer) -> None:
        """Correct the cached tokens of each prompt's first sample.

        Args:
            answers: of all samples in the order of the prompts, or one with its ``index`` in
                it, as of a stream.
        """
        found: list[Any] = answers if isinstance(answers, list) else [answers]
        placed = [
            (answer.get("index", place), answer)
            for place, answer in enumerate(found)
            if answer is not None
        ]
        for index, answer in placed:
            self._note(index // self._samples, answer)
        for index, answer in placed:
            prompt = index // self._samples
            if index % self._samples == 0 and prompt in self._cached:
                answer["meta_info"]["cached_tokens"] = self._cached[prompt]

    def _note(self, prompt: int, answer: Any) -> None:
        cached = answer["meta_info"].get("cached_tokens")
        if cached is not None:
            least = min(cached, self._cached.get(prompt, cached))
            self._cached[prompt] = least


class NotingPrompts:
    """A tokenizer manager for SGLang's code that samples prompts, which computes each prompt in
    a request of its own first and drops what that reports.

    Everything is passed on to the real tokenizer manager.

    Args:
        num_prompts: of the call.
    """

    def __init__(
        self, tokenizer_manager: Any, prompts: SampledPrompts, num_prompts: int
    ) -> None:
        self._tokenizer_manager = tokenizer_manager
        self._prompts = prompts
        self._num_left = num_prompts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer_manager, name)

    def _wait_one_response(
        self, obj: EngineRequest, request: Any = None
    ) -> AsyncGenerator[Any]:
        answers: AsyncGenerator[Any]
        answers = self._tokenizer_manager._wait_one_response(obj, request)
        if not self._num_left:
            return answers  # a sample's
        self._num_left -= 1
        return self._noting(answers)

    async def _noting(self, answers: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
        async with aclosing(answers):
            async for answer in answers:
                self._prompts.computed_first(answer)
                yield answer
