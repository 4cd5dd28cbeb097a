"""Ways to run a job on transformers in this process, the dense engine among them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from dense_parts.jobs import VOCAB, Task
from sglang_batch.dense.decode_loop import DecodeLoop
from sglang_batch.dense.model import LoadedModel
from sglang_batch.dense.row_request import (
    DenseAnswer,
    DenseRequest,
    DenseSettings,
    Stopping,
)
from sglang_batch.dense.rows import SlabRows


@dataclass(frozen=True, slots=True)
class Done:
    """One run.

    cpu_s, wall_s: of the run alone, without loading a model.
    steps: forward passes that decode.
    cells: most KV cells.
    surgery_s: processor time that moves KV.
    computed, recomputed: prompt tokens.
    """

    answers: list[list[int]]
    cpu_s: float
    wall_s: float
    steps: int = 0
    cells: int = 0
    surgery_s: float = 0.0
    computed: int = 0
    recomputed: int = 0


class Clock:
    """Processor and wall time of this process since it was made."""

    def __init__(self) -> None:
        self._begin = time.process_time(), time.perf_counter()

    def read(self) -> tuple[float, float]:
        return (
            time.process_time() - self._begin[0],
            time.perf_counter() - self._begin[1],
        )


def llama(layers: int, hidden: int) -> Any:
    """A random Llama with two query heads for each KV head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=4 * hidden,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=8192, initializer_range=0.05,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.generation_config = GenerationConfig(
        do_sample=False, pad_token_id=0, eos_token_id=None
    )
    return model


def llama_copy(model: Any) -> Any:
    """The same weights in a model whose attention may differ."""
    copy = LlamaForCausalLM(model.config.__class__.from_dict(model.config.to_dict()))
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    return copy.eval()


def static(
    model: Any, tasks: Sequence[Task], batch: int, *, ordered: bool = False
) -> Done:
    """``generate`` on padded batches, each until its longest answer ends.

    ordered: by length, instead of in the order of the job.
    """
    order = list(range(len(tasks)))
    if ordered:
        order.sort(key=lambda i: (tasks[i].output_len, len(tasks[i].prompt)))
    answers: list[list[int]] = [[] for _ in tasks]
    steps = cells = 0
    clock = Clock()
    for at in range(0, len(order), batch):
        part = order[at : at + batch]
        longest = max(len(tasks[i].prompt) for i in part)
        most = max(tasks[i].output_len for i in part)
        gaps = [longest - len(tasks[i].prompt) for i in part]
        padded = [
            [0] * gap + tasks[i].prompt for gap, i in zip(gaps, part, strict=True)
        ]
        mask = [[0] * gap + [1] * (longest - gap) for gap in gaps]
        out = model.generate(
            torch.tensor(padded), attention_mask=torch.tensor(mask), max_new_tokens=most
        )
        for i, row in zip(part, out[:, longest:].tolist(), strict=True):
            answers[i] = row[: tasks[i].output_len]
        steps += most - 1
        cells = max(cells, len(part) * (longest + most))
    return Done(answers, *clock.read(), steps, cells)


def continuous(model: Any, tasks: Sequence[Task], batch: int) -> Done:
    """transformers' own continuous batching, until the last answer.

    Its end takes half a second of processor time for a job of any size, which is not
    counted.
    """
    config = ContinuousBatchingConfig(
        num_blocks=64, page_size=256, max_requests_per_batch=batch,
        max_batch_tokens=2048, use_cuda_graph=False,
    )  # fmt: skip
    clock = Clock()
    answers: list[list[int]] = [[] for _ in tasks]
    with model.continuous_batching_context_manager(
        generation_config=model.generation_config, continuous_batching_config=config,
        warmup=False,
    ) as manager:  # fmt: skip
        for number, task in enumerate(tasks):
            manager.add_request(
                task.prompt, request_id=str(number), max_new_tokens=task.output_len
            )
        for _ in tasks:
            found = manager.get_result(timeout=600)
            if found is None or found.error:
                raise RuntimeError(f"continuous batching: {found and found.error}")
            answers[int(found.request_id)] = list(found.generated_tokens)
        times = clock.read()
    return Done(answers, *times)


class TimedSlabRows(SlabRows):
    """Measures the moves of KV."""

    surgery_s = 0.0

    def join(self, kvs: Sequence[Any]) -> None:
        with self._timed():
            super().join(kvs)

    def leave(self, row: int, *, wipe: bool = False) -> None:
        with self._timed():
            super().leave(row, wipe=wipe)

    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        with self._timed():
            self._slab.make_room()
        return super().decode(tokens)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.process_time()
        yield
        self.surgery_s += time.process_time() - begin


def dense(
    model: LoadedModel,
    tasks: Sequence[Task],
    settings: DenseSettings,
    *,
    order: Sequence[int] | None = None,
    at_step: dict[int, Callable[[DecodeLoop], None]] | None = None,
) -> Done:
    """The dense engine.

    Args:
        order: of the requests, by default that of the job.
        at_step: what happens before a step.
    """
    answers: list[list[int]] = [[] for _ in tasks]

    def on_answer(request: DenseRequest, answer: DenseAnswer) -> None:
        if answer.reason == "abort":
            raise RuntimeError(f"{request.rid}: {answer.error}")
        answers[int(request.rid)] = list(answer.output_ids)

    clock = Clock()
    rows = TimedSlabRows(model, settings.prefill_tokens, settings.shortest_shared)
    loop = DecodeLoop(model, rows, settings, on_answer)
    for place, number in enumerate(order or range(len(tasks))):
        task = tasks[number]
        loop.add(
            DenseRequest(
                str(number), task.prompt, Stopping(task.output_len), place=place
            )
        )
    changes = dict(at_step or {})
    while loop.can_step:
        if change := changes.pop(loop.counts.steps, None):
            change(loop)
        loop.step()
    return Done(
        answers,
        *clock.read(),
        loop.counts.steps,
        loop.counts.peak_cells,
        rows.surgery_s,
        rows.computed_tokens,
        loop.counts.recomputed_tokens,
    )
