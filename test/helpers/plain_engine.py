"""An engine whose model also runs each step by SGLang's modules.

Runs in a process of its own: ``main`` gets the directories of two checkpoints, whose weights
differ, and more arguments of the engine as JSON. It prints how many steps a
:class:`PlainDecoder` ran, by mode, and how many of these gave other states than SGLang's
modules, with the first checkpoint, and after an update of the weights to the second.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import sglang
import torch
from sglang.srt.entrypoints.engine import Engine


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """SGLang's function of this name, with a model that compares its steps."""
    from sglang.srt.managers import scheduler
    from sglang.srt.plugins import load_plugins

    from sglang_batch.srt.cpu.plain_decoder import PlainDecoder

    load_plugins()
    run, kept, state = PlainDecoder._run, Path(sys.argv[-1]), Counter[str]()

    def compared(
        decoder: PlainDecoder, input_ids: Any, positions: Any, batch: Any
    ) -> torch.Tensor:
        # First, so that it reads the KV that it writes itself.
        found = run(decoder, input_ids, positions, batch)
        wanted = decoder._stock(input_ids, positions, batch)
        counts = batch.extend_seq_lens_cpu or []
        state[batch.forward_mode.name] += 1
        state["mixed"] += counts.count(1) > 2 and max(counts) > 5
        sampled = decoder._sampled(batch)
        state["whole"] += sampled is None and bool(counts)
        if sampled is not None:
            state["zeros"] += int((found.abs().amax(1) == 0).sum())
        rows = slice(None) if sampled is None else sampled
        state["different"] += not torch.equal(wanted[rows], found[rows])
        state["odd"] += not found.isfinite().all()
        kept.write_text(json.dumps(state))
        return found

    PlainDecoder._run = compared  # type: ignore[method-assign]
    scheduler.run_scheduler_process(*args, **kwargs)


def prompts() -> list[list[int]]:
    """Prompts of one token and more, of which some begin alike."""
    draw = random.Random(0)
    common = [draw.randrange(10, 250) for _ in range(60)]
    return [
        common[: draw.choice([0, 17, 60])]
        + [draw.randrange(10, 250) for _ in range(draw.choice([1, 5, 40]))]
        for _ in range(24)
    ]


def main() -> None:
    model, other, arguments, kept = sys.argv[1:]
    Engine.run_scheduler_process_func = staticmethod(run_scheduler_process)
    engine = sglang.Engine(
        model_path=model,
        log_level="error",
        max_total_tokens=1_000,
        chunked_prefill_size=64,
        max_running_requests=8,
        **{"offline_batch": True} | json.loads(arguments),
    )
    # The last need more than the states at which tokens are sampled, and are not mixed.
    whole = [index >= 18 for index in range(len(prompts()))]
    sampling = [
        {"temperature": 0, "max_new_tokens": 6 + index % 7, "ignore_eos": True}
        for index in range(len(prompts()))
    ]
    answers = []
    for path in (model, other):
        if path != model:
            done, message, *_ = engine.update_weights_from_disk(path)
            assert done, message
        outputs = engine.generate(
            input_ids=prompts(), sampling_params=sampling, return_logprob=whole
        )
        answers.append([each["output_ids"] for each in outputs])
    engine.shutdown()
    found = json.loads(Path(kept).read_text())
    print(json.dumps(found | {"changed": answers[0] != answers[1]}))


if __name__ == "__main__":
    main()
