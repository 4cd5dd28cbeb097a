"""Seconds of an engine's decode steps, from SGLang's own record of them.

SGLang's scheduler can keep the seconds between the results of consecutive decode steps, by the
number of rows, in the state that it tells on demand.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ...errors import EngineError
from ...job.engine import GENERATE_URL
from ...request import BatchRequestInput, random_prompts
from ...store.measured_costs import RowShareKey
from ..compat.server_types import SchedulerState
from .machine import model_spec, row_share_key
from .sglang_engine import Prepared, SGLangEngine

# Without these in its environment and arguments, an engine keeps no times of steps.
ENVIRONMENT = {"SGLANG_RECORD_STEP_TIME": "1"}
ARGUMENTS = ("--decode-log-interval=1",)


class DecodeTimer:
    """Runs batches on a connected engine that does nothing else, on its event loop.

    context_len: most tokens of a request, with its answer.
    """

    def __init__(self, engine: SGLangEngine) -> None:
        self.engine = engine
        self._manager = engine.manager
        self._num_batches = 0
        self.context_len = self._manager.context_len
        self.vocab_size = self._manager.model_config.vocab_size

    async def key(self) -> RowShareKey:
        """The key of a measurement on this engine."""
        spec = model_spec(self._manager.model_config.hf_config)
        return row_share_key(self._manager, await self._state(), spec)

    async def empty_cache(self) -> None:
        """Forget all KV, so that free places are in a row again."""
        await self._manager.flush_cache()

    async def step_seconds(
        self, lengths: Sequence[int], new_tokens: int
    ) -> list[float]:
        """Seconds of each step in which all rows of a batch decoded, in order.

        The first of them contains the time since the last step before.

        Args:
            lengths: tokens of each row's prompt, which is random and begins as no other.
            new_tokens: tokens that each row generates.

        Raises:
            EngineError: a request failed, or the engine keeps no times.
        """
        before = len(await self._times(len(lengths)))
        prompts = random_prompts(lengths, self.vocab_size, seed=self._num_batches)
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        # One request: its prompts reach the scheduler in one message, however busy the
        # machine is. Of several, the first could end before the last arrives.
        body = json.dumps({"input_ids": prompts, "sampling_params": sampling})
        name = f"calibrate_{self._num_batches}"
        self._num_batches += 1
        request = BatchRequestInput(0, name, GENERATE_URL, body.encode())
        answer = await self.engine.prepare(request, name, tokenize=False)
        if isinstance(answer, Prepared):
            answer = await self.engine.execute(answer)
        if not answer.ok:
            raise EngineError(
                f"a measured request failed: {answer.body.decode(errors='replace')}"
            )
        return (await self._times(len(lengths)))[before:]

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
