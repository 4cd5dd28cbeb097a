"""Runs a mix of requests as a job of an engine in this process."""

from __future__ import annotations

import json

from ..config import OfflineBatchConfig
from ..errors import EngineError
from ..job.engine import GENERATE_URL, Engine
from ..job.job import Job
from ..request import BatchRequestInput, RequestOutput
from ..workloads.random_prompts import random_prompts
from .step_mixes import Mix

# Prefixes in common run together, and no candidates are simulated.
_CONFIG = OfflineBatchConfig(policy="dfs")


async def run_mix(engine: Engine, mix: Mix, number: int, vocab_size: int) -> None:
    """Run a mix: planned, so that its steps take what those of a job take.

    Args:
        number: of the mix; its prompts begin with other tokens than those of other numbers.

    Raises:
        EngineError: a request failed.
    """
    prompts = random_prompts(mix.lengths, vocab_size, seed=number)
    prefix = prompts[0][: mix.shared]
    requests = [
        BatchRequestInput(
            row,
            f"{number}-{row}",
            GENERATE_URL,
            json.dumps(
                {
                    "input_ids": [*prefix, *prompt[mix.shared :]],
                    "sampling_params": {
                        "temperature": 0,
                        "max_new_tokens": output,
                        "ignore_eos": True,
                    },
                }
            ).encode(),
        )
        for row, (prompt, output) in enumerate(zip(prompts, mix.outputs, strict=True))
    ]

    def check(_: BatchRequestInput, answer: RequestOutput) -> None:
        if not answer.ok:
            raise EngineError(
                f"a measured request failed: {answer.body.decode(errors='replace')}"
            )

    job = Job(
        f"calibrate-{number}", requests, range(len(requests)), engine, _CONFIG, check
    )
    await job.run()
