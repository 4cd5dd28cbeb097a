"""Stock SGLang for comparison: ``sglang.Engine`` in a process of its own."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from soak_server import ENGINE_ARGUMENTS, chat_line

START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 10
GENERATE_TIMEOUT_S = 1200
OUTPUT_TOKENS = 8


def sampling() -> dict[str, Any]:
    return {"max_new_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}


def same_line(custom_id: str, prompt: str) -> dict[str, Any]:
    """A line of a batch with the parameters of :func:`sampling`."""
    return chat_line(
        custom_id, prompt, max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True
    )


class StockEngine:
    """A handle on the process. :meth:`seconds` sends all prompts at once."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def seconds(self, prompts: list[str]) -> float:
        """Wall time of ``Engine.generate`` over these chat messages, on a cold cache.

        Messages become prompts by the model's chat template within that time, as
        they do in a batch.
        """
        self._pipe.send(prompts)
        if not self._pipe.poll(GENERATE_TIMEOUT_S):
            raise TimeoutError(f"no answers after {GENERATE_TIMEOUT_S} s")
        return float(self._pipe.recv())


@contextmanager
def stock_engine(model: Path) -> Iterator[StockEngine]:
    """SGLang without this package's flags, as long as the context."""
    ours, theirs = mp.Pipe()
    process = start_process(theirs, str(model))
    theirs.close()
    try:
        if not ours.poll(START_TIMEOUT_S):
            raise TimeoutError(f"the engine did not start in {START_TIMEOUT_S} s")
        ours.recv()
        yield StockEngine(ours)
    finally:
        with suppress(OSError):
            ours.send(None)
        process.join(STOP_TIMEOUT_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


def start_process(pipe: Connection, model: str) -> BaseProcess:
    """A process that runs :func:`serve`."""
    process = mp.get_context("spawn").Process(target=serve, args=(pipe, model))
    process.start()
    return process


def serve(pipe: Connection, model: str) -> None:
    """Run an engine: answer each list of prompts with its seconds, until there is None."""
    os.setsid()  # a group of its own, which can be killed
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Warnings about missing accelerators.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    warnings.simplefilter("ignore")
    import sglang
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    engine = sglang.Engine(model_path=model, log_level="error", **ENGINE_ARGUMENTS)
    pipe.send("ready")
    while (prompts := pipe.recv()) is not None:
        engine.flush_cache()
        began = time.perf_counter()
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                tokenize=False,
                add_generation_prompt=True,
            )
            for prompt in prompts
        ]
        answers = engine.generate(texts, sampling())
        took = time.perf_counter() - began
        lengths = {answer["meta_info"]["completion_tokens"] for answer in answers}
        assert lengths == {OUTPUT_TOKENS}, lengths
        pipe.send(took)
    engine.shutdown()
