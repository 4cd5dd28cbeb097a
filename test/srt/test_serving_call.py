"""SGLang's serving code that is held at its request to the engine, and dropped there."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Callable
from itertools import product
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_batch.srt.engine.serving_call import HoldingManager, ServingCall


class Manager:
    """A tokenizer manager whose requests never end."""

    async def generate_request(self, obj: Any, request: None) -> AsyncGenerator[Any]:
        await asyncio.Event().wait()
        yield {}


async def one_answer(manager: Any) -> Any:
    request = GenerateReqInput(rid="", input_ids=[1])
    return await manager.generate_request(request).__anext__()


async def tool_loop(manager: Any) -> Any:
    """A generator over the engine's, as SGLang's for ``/v1/responses``."""

    async def answers() -> AsyncGenerator[Any]:
        yield await one_answer(manager)

    async for answer in answers():
        return answer
    return None


def drop(call: ServingCall) -> None:
    """Without another reference, Python ends a call at once."""


def drop_in_a_cycle(call: ServingCall) -> None:
    """The garbage collector ends a call's parts in any order."""
    ring: list[Any] = [call]
    ring.append(ring)


@pytest.mark.parametrize("way", [drop, drop_in_a_cycle])
def test_calls_that_are_dropped_leave_no_error(
    way: Callable[[ServingCall], None],
) -> None:
    async def scenario() -> list[Any]:
        complaints: list[Any] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: complaints.append(context))
        manager: Any = Manager()
        for serving_code, sent in product((one_answer, tool_loop), (False, True)):
            for _ in range(20):
                coroutine: Any = serving_code(HoldingManager(manager))
                call = ServingCall(coroutine, "r")
                assert call.render() is not None
                if sent:
                    await cancelled(call)
                way(call)
                del call, coroutine
        gc.collect()
        await asyncio.sleep(0.01)
        gc.collect()
        await asyncio.sleep(0.01)
        return complaints

    assert asyncio.run(scenario()) == []


async def cancelled(call: ServingCall) -> None:
    task = asyncio.ensure_future(run(call))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def run(call: ServingCall) -> object:
    return await call.run()
