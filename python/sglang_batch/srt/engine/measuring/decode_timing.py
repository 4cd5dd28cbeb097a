"""Seconds of an engine's decode steps, from SGLang's own record of them.

SGLang's scheduler can keep the seconds between the results of consecutive decode steps,
by the number of rows. Its state, which it tells on demand, then has all of them.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence

from ....engine import GENERATE_URL
from ....errors import ConfigError, EngineError
from ....planner.steps.step_law import StepLaw
from ....request import BatchRequestInput, RequestOutput
from ....store.measured.row_share_file import RowShareKey
from ...compat.server_types import SchedulerState
from ..machine import datasheet_cost, engine_key, model_spec, row_share_key
from ..sglang_engine import Prepared, SGLangEngine
from .timed_costs import kept_law

# Without these in its environment and arguments, an engine keeps no times of steps.
ENVIRONMENT = {"SGLANG_RECORD_STEP_TIME": "1"}
ARGUMENTS = ("--decode-log-interval=1",)


class DecodeTimer:
    """Runs batches on a connected engine that does nothing else.

    All calls must come from the engine's event loop.
    """

    def __init__(self, engine: SGLangEngine) -> None:
        self._engine = engine
        self._manager = engine._tokenizer_manager
        self._num_batches = 0

    @property
    def context_len(self) -> int:
        """Most tokens of a request, with its answer."""
        return self._manager.context_len

    async def key(self) -> RowShareKey:
        """What a measurement on this engine holds for."""
        spec = model_spec(self._manager.model_config.hf_config)
        return row_share_key(self._manager, await self._state(), spec)

    async def step_seconds(
        self, lengths: Sequence[int], new_tokens: int
    ) -> list[float]:
        """Seconds of each step in which all rows of a batch decoded, in order.

        The first of them contains the time since the last step before.

        Args:
            lengths: tokens of each row's prompt. Prompts are random, and no two begin
                alike.
            new_tokens: tokens that each row generates, whatever they are.

        Raises:
            EngineError: a request failed, or the engine keeps no times.
        """
        before = len(await self._times(len(lengths)))
        await self.run(lengths, [new_tokens] * len(lengths))
        return (await self._times(len(lengths)))[before:]

    async def run(
        self, lengths: Sequence[int], outputs: Sequence[int], shared: int = 0
    ) -> None:
        """Run a batch.

        Args:
            lengths, outputs: tokens of each row's prompt and of its answer.
            shared: tokens that all prompts begin with. They are computed before the batch.

        Raises:
            EngineError: a request failed.
        """
        prompts = random_prompts(
            lengths, self._manager.model_config.vocab_size, seed=self._num_batches
        )
        if shared:
            prefix = prompts[0][:shared]
            prompts = [prefix + prompt[: len(prompt) - shared] for prompt in prompts]
            await self._answer(len(prompts), prefix, 1)
        answers = await asyncio.gather(
            *(
                self._answer(row, prompt, output)
                for row, (prompt, output) in enumerate(
                    zip(prompts, outputs, strict=True)
                )
            )
        )
        self._num_batches += 1
        for answer in answers:
            if not answer.ok:
                raise EngineError(
                    f"a measured request failed: {answer.body.decode(errors='replace')}"
                )

    async def learn_costs(self) -> StepLaw | None:
        """Keep the steps that were timed so far, and the law that they and earlier ones show.

        None if there are too few of them.
        """
        await self._engine.learn_costs()
        manager, state = self._manager, await self._state()
        return kept_law(datasheet_cost(manager, state), engine_key(manager, state))

    async def _answer(
        self, row: int, prompt: list[int], new_tokens: int
    ) -> RequestOutput:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body = json.dumps({"input_ids": prompt, "sampling_params": sampling})
        name = f"calibrate_{self._num_batches}_{row}"
        request = BatchRequestInput(row, name, GENERATE_URL, body.encode())
        prepared = await self._engine.prepare(request, name, tokenize=False)
        if not isinstance(prepared, Prepared):
            return prepared
        return await self._engine.execute(prepared)

    async def _state(self) -> SchedulerState:
        return (await self._manager.get_internal_state())[0]

    async def _times(self, rows: int) -> list[float]:
        times = (await self._state()).get("step_time_dict")
        if times is None:
            raise EngineError(
                "SGLang keeps no times of its steps: its scheduler was started without "
                + " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
            )
        return list(times.get(rows, ()))


def random_prompts(
    lengths: Sequence[int], vocab_size: int, *, seed: int
) -> list[list[int]]:
    """Prompts of these lengths whose first tokens all differ.

    The ids are from the middle of the vocabulary, where no model has special tokens,
    unless there are more prompts than ids.

    Raises:
        ConfigError: there are more prompts than ids in the vocabulary.
    """
    if len(lengths) > vocab_size:
        raise ConfigError(
            f"--rows {len(lengths)} is more than the {vocab_size} tokens of the "
            "vocabulary, so that prompts cannot all differ; give fewer."
        )
    chance = random.Random(seed)
    ids = range(vocab_size // 8, vocab_size // 2)
    if len(ids) < len(lengths):
        ids = range(vocab_size)
    firsts = chance.sample(ids, len(lengths))
    return [
        [first, *chance.choices(ids, k=length - 1)]
        for first, length in zip(firsts, lengths, strict=True)
    ]
