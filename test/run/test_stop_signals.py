"""Ctrl-C and SIGTERM stop a job in order, a second one at once, and none is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from sglang_batch.run.stop_signals import StopSignals


class Terminated(Exception):
    """Raised by the handler of SIGTERM from before the engine."""


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    def terminate(signum: int, frame: object) -> None:
        raise Terminated

    # A shell starts background jobs with SIGINT ignored.
    handlers = {
        signal.SIGTERM: terminate,
        signal.SIGINT: signal.default_int_handler,
    }
    earlier = {signum: signal.signal(signum, f) for signum, f in handlers.items()}
    yield StopSignals()
    for signum, handler in earlier.items():
        signal.signal(signum, handler)


async def run_until_stopped(signals: StopSignals, sent: list[int]) -> list[str]:
    loop, stop, said = asyncio.get_running_loop(), asyncio.Event(), list[str]()
    loop.add_signal_handler(signal.SIGTERM, said.append, "SGLang waits")
    with signals.setting(stop, lambda: said.append("stopping")):
        for signum in sent:
            os.kill(os.getpid(), signum)
        async with asyncio.timeout(5):
            await stop.wait()
    return said


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_stops_the_job_and_later_ones_end_the_run(
    signals: StopSignals, signum: int
) -> None:
    loop = asyncio.new_event_loop()  # stays open, as SGLang's does
    assert loop.run_until_complete(run_until_stopped(signals, [signum])) == ["stopping"]
    assert signals.received
    with pytest.raises(Terminated):
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    loop.close()


def test_a_second_one_ends_the_run_while_it_stops(signals: StopSignals) -> None:
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run_until_stopped(signals, [signal.SIGTERM, signal.SIGINT]))
