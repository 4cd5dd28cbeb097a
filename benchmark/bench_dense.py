"""The dense engine: steps and processor time against other ways to run transformers.

    python benchmark/bench_dense.py                  all parts
    python benchmark/bench_dense.py small memory     some of them

Random models of 3 to 30 million parameters run on one CPU core, in float32, greedy, to
lengths that are set. All ways of a row take turns in this process, ``--repeats`` times;
medians count, and all answers are compared. The last line is one JSON document. The exit
status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import transformers
from report import RESULTS, Figure, finish, print_figures, print_table
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from sglang_batch.dense.decode_loop import DecodeLoop
from sglang_batch.dense.model import LoadedModel, wrap
from sglang_batch.dense.row_request import DenseAnswer, DenseRequest, Stopping
from sglang_batch.dense.rows import SlabRows
from sglang_batch.dense.settings import DenseSettings
from sglang_batch.workloads.sources import SHAREGPT, lognormal_lengths

VOCAB = 1000
# Logits of float32 that differ by less may come in either order.
TIE = 1e-5
# Baton's times over static batches, with prefill apart, by batch size (sections 5.2, 5.3).
PAPER_1 = {4: 1.86, 8: 2.49}
PAPER_2 = {2: 1.94, 4: 1.87, 6: 1.66, 8: 1.61, 10: 1.31}


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, and how many tokens its answer has."""

    prompt: list[int]
    output_len: int


@dataclass(frozen=True, slots=True)
class Done:
    """One run: answers, processor seconds, forward passes that decode, most KV cells."""

    answers: list[list[int]]
    cpu_s: float
    steps: int = 0
    cells: int = 0
    surgery_s: float = 0.0
    computed: int = 0
    recomputed: int = 0


# Jobs -----------------------------------------------------------------------------------


def mixed(count: int, long: int, short: tuple[int, int], seed: int) -> list[Task]:
    """Long in and short out, short in and long out, both short: 1:1:2 (Baton, 5.1)."""
    rng = np.random.default_rng([seed, 1])
    tasks = []
    for number in range(count):
        lengths = rng.integers(*short, 2, endpoint=True)
        if number % 4 < 2:
            lengths[number % 4] = rng.integers(int(0.8 * long), int(1.2 * long))
        tasks.append(_task(rng, *map(int, lengths)))
    order = rng.permutation(count)
    return [tasks[place] for place in order]


def short(count: int, most: int, seed: int) -> list[Task]:
    """Short in and short out (Baton, 5.1)."""
    rng = np.random.default_rng([seed, 4])
    sizes = rng.integers(3, most, (count, 2), endpoint=True).tolist()
    return [_task(rng, prompt, output) for prompt, output in sizes]


def sharegpt(count: int, scale: float, seed: int) -> list[Task]:
    """Lengths of ShareGPT, scaled."""
    rng = np.random.default_rng([seed, 2])
    sizes = []
    for mean, square in (
        (SHAREGPT.input_mean, SHAREGPT.input_mean**2 * (1 + SHAREGPT.own_cv**2)),
        (SHAREGPT.output_mean, SHAREGPT.output_square),
    ):
        found = lognormal_lengths(count, scale * mean, scale**2 * square, 2, 500)
        sizes.append(rng.permutation(found))
    return [_task(rng, int(a), int(b)) for a, b in zip(*sizes, strict=True)]


def siblings(groups: int, each: int, seed: int) -> list[Task]:
    """Four fifths of each prompt are its group's."""
    rng = np.random.default_rng([seed, 3])
    tasks = []
    for _ in range(groups):
        shared = rng.integers(3, VOCAB, 256).tolist()
        tasks += [
            Task(shared + rng.integers(3, VOCAB, 64).tolist(), 8) for _ in range(each)
        ]
    order = rng.permutation(len(tasks))
    return [tasks[place] for place in order]


def _task(rng: np.random.Generator, prompt_len: int, output_len: int) -> Task:
    return Task(rng.integers(3, VOCAB, prompt_len).tolist(), max(1, output_len))


# Ways to run them -----------------------------------------------------------------------


def llama(layers: int, hidden: int) -> LlamaForCausalLM:
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


def static(model: Any, tasks: Sequence[Task], batch: int, *, ordered: bool) -> Done:
    """``generate`` on padded batches, each until its longest answer ends."""
    order = list(range(len(tasks)))
    if ordered:
        order.sort(key=lambda i: (tasks[i].output_len, len(tasks[i].prompt)))
    answers: list[list[int]] = [[] for _ in tasks]
    steps = cells = 0
    begin = time.process_time()
    for at in range(0, len(order), batch):
        part = order[at : at + batch]
        longest = max(len(tasks[i].prompt) for i in part)
        most = max(tasks[i].output_len for i in part)
        padded = [
            [0] * (longest - len(tasks[i].prompt)) + tasks[i].prompt for i in part
        ]
        mask = [
            [0] * (longest - len(tasks[i].prompt)) + [1] * len(tasks[i].prompt)
            for i in part
        ]
        out = model.generate(
            torch.tensor(padded), attention_mask=torch.tensor(mask), max_new_tokens=most
        )
        for i, row in zip(part, out[:, longest:].tolist(), strict=True):
            answers[i] = row[: tasks[i].output_len]
        steps += most - 1
        cells = max(cells, len(part) * (longest + most))
    return Done(answers, time.process_time() - begin, steps, cells)


def continuous(model: Any, tasks: Sequence[Task], batch: int) -> Done:
    """transformers' own continuous batching."""
    config = ContinuousBatchingConfig(
        num_blocks=64, page_size=256, max_requests_per_batch=batch,
        max_batch_tokens=2048, use_cuda_graph=False,
    )  # fmt: skip
    begin = time.process_time()
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
    return Done(answers, time.process_time() - begin)


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

    def _timed(self) -> _Timed:
        return _Timed(self)


class _Timed:
    def __init__(self, rows: TimedSlabRows) -> None:
        self._rows = rows

    def __enter__(self) -> None:
        self._begin = time.process_time()

    def __exit__(self, *exc: object) -> None:
        self._rows.surgery_s += time.process_time() - self._begin


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

    begin = time.process_time()
    rows = TimedSlabRows(model, settings.prefill_tokens, settings.shortest_shared)
    loop = DecodeLoop(model, rows, settings, on_answer)
    for place, number in enumerate(order or range(len(tasks))):
        task = tasks[number]
        loop.add(
            DenseRequest(
                str(number), task.prompt, Stopping(task.output_len), place=place
            )
        )
    while loop.has_work:
        if at_step and loop.counts.steps in at_step:
            at_step.pop(loop.counts.steps)(loop)
        loop.step()
    return Done(
        answers,
        time.process_time() - begin,
        loop.counts.steps,
        loop.counts.peak_cells,
        rows.surgery_s,
        rows.computed_tokens,
        loop.counts.recomputed_tokens,
    )


def by_prefix(tasks: Sequence[Task]) -> list[int]:
    """The order that keeps shared prefixes together."""
    return sorted(range(len(tasks)), key=lambda i: tasks[i].prompt)


def longest_first(tasks: Sequence[Task]) -> list[int]:
    """Expected lengths known, as after a run's sample: the longest answers first."""
    return sorted(range(len(tasks)), key=lambda i: -tasks[i].output_len)


def interleaved(
    model: Any, tasks: Sequence[Task], ways: dict[str, Callable[[], Done]], repeats: int
) -> dict[str, Done]:
    """Each way's run of median processor time, after checking that all answers agree."""
    runs: dict[str, list[Done]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            gc.collect()
            runs[name].append(run())
    answers = next(iter(runs.values()))[0].answers
    for name, done in runs.items():
        for each in done:
            for task, one, other in zip(tasks, answers, each.answers, strict=True):
                if one != other and not _is_tie(model, task, one, other):
                    raise RuntimeError(
                        f"{name} answers otherwise than {next(iter(runs))}"
                    )
    middle = {name: median(each.cpu_s for each in done) for name, done in runs.items()}
    return {name: replace(done[0], cpu_s=middle[name]) for name, done in runs.items()}


def _is_tie(model: Any, task: Task, one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two answers part at tokens whose logits differ by rounding only."""
    if len(one) != len(other):
        return False
    at = next(
        i for i, pair in enumerate(zip(one, other, strict=True)) if len({*pair}) > 1
    )
    logits = model(torch.tensor([[*task.prompt, *one[:at]]])).logits[0, -1]
    return abs(float(logits[one[at]] - logits[other[at]])) < TIE


# Parts ----------------------------------------------------------------------------------


def steps(repeats: int) -> list[Figure]:
    """Decode steps of the paper's two sets of queries, a tenth as long, and their times."""
    plain = llama(2, 128)
    figures = []
    for name, tasks, paper in (
        ("Target-1", mixed(120, 400, (3, 40), 1), PAPER_1),
        ("Target-2", short(30, 20, 2), PAPER_2),
    ):
        rows = []
        for batch, ratio in paper.items():
            done = interleaved(plain, tasks, _static_and_dense(plain, tasks, batch), 1)
            static_run, ours = done["static"], done["dense"]
            rows.append([batch, static_run.steps, ours.steps, *_times(done)])
            figures.append(
                Figure(
                    f"{name}, batch {batch}: static steps over dense steps",
                    static_run.steps / ours.steps,
                    "",
                    None,
                    f"times {static_run.cpu_s / ours.cpu_s:.2f}; "
                    f"the paper's times {ratio}",
                )
            )
        print_table(
            f"{name}: {len(tasks)} queries",
            ["batch", "static steps", "dense steps", *done],
            rows,
        )
    return figures


def small(repeats: int) -> list[Figure]:
    """Processor time against other ways, 4 layers of 256 channels."""
    return _times_of(4, 256, repeats)


def large(repeats: int) -> list[Figure]:
    """The same, 6 layers of 512 channels."""
    return _times_of(6, 512, repeats)


def _times_of(layers: int, hidden: int, repeats: int) -> list[Figure]:
    plain = llama(layers, hidden)
    model = wrap(llama_copy(plain))
    figures, rows, surgery = [], [], []
    for name, tasks in (
        ("1:1:2", mixed(32, 160, (3, 40), 1)),
        ("ShareGPT", sharegpt(32, 0.25, 1)),
    ):
        for batch in (8, 16):
            order = longest_first(tasks)
            settings = DenseSettings(max_rows=batch)
            done = interleaved(
                plain,
                tasks,
                {
                    "static": partial(static, plain, tasks, batch, ordered=False),
                    "sorted": partial(static, plain, tasks, batch, ordered=True),
                    "continuous": partial(continuous, plain, tasks, batch),
                    "dense": partial(dense, model, tasks, settings, order=order),
                },
                repeats,
            )
            ours = done["dense"].cpu_s
            label = f"{layers}x{hidden}, {name}, batch {batch}"
            rows.append([label, *_times(done)])
            surgery.append(done["dense"].surgery_s / ours)
            for way, least in (("static", 2.0), ("sorted", 1.2), ("continuous", 1.0)):
                ratio = done[way].cpu_s / ours
                name_of_ratio = f"{label}: {way} over dense"
                figures.append(Figure(name_of_ratio, ratio, "x", (">=", least)))
            cells = done["dense"].cells / done["static"].cells
            name_of_cells = f"{label}: peak KV cells over static's"
            figures.append(Figure(name_of_cells, cells, "x", ("<=", 1.0)))
    print_table(
        "Processor seconds", ["job", "static", "sorted", "continuous", "dense"], rows
    )
    most = 100 * max(surgery)
    figures.append(Figure("cache surgery, most of all rows", most, "%", ("<=", 3.0)))
    return figures


def sharing(repeats: int) -> list[Figure]:
    """A job of which four fifths are shared prefixes."""
    tasks = siblings(8, 12, 1)
    plain = llama(4, 256)
    model = wrap(plain)
    whole = DenseSettings(max_rows=12)
    alone = DenseSettings(max_rows=12, shortest_shared=1 << 30)
    done = interleaved(
        plain,
        tasks,
        {
            "alone": lambda: dense(model, tasks, alone, order=by_prefix(tasks)),
            "shared": lambda: dense(model, tasks, whole, order=by_prefix(tasks)),
        },
        repeats,
    )
    least = 8 * 256 + 96 * 64
    ours, other = done["shared"], done["alone"]
    return [
        Figure("prompt tokens computed", ours.computed, "", ("=", least)),
        Figure(
            "without sharing over with it", other.cpu_s / ours.cpu_s, "x", (">=", 1.5)
        ),
    ]


def memory(repeats: int) -> list[Figure]:
    """The limit on KV cells is halved while a job runs, and raised again."""
    tasks = mixed(48, 240, (3, 40), 3)
    model = wrap(llama(2, 128))
    wide = DenseSettings(max_rows=16)
    full = dense(model, tasks, wide)
    half = full.cells // 2
    figures = []
    for name, host in (("all fit the host pool", 1 << 20), ("no host pool", 0)):
        settings = replace(wide, host_cells=host)
        changes: dict[int, Callable[[DecodeLoop], None]] = {
            60: lambda loop: loop.limit_cells(half),
            200: lambda loop: loop.limit_cells(1 << 40),
        }
        done = dense(model, tasks, settings, at_step=changes)
        lost = sum(a != b for a, b in zip(done.answers, full.answers, strict=True))
        figures.append(Figure(f"{name}: answers that differ", lost, "", ("=", 0)))
        bound = ("=", 0.0) if host else None
        figures.append(
            Figure(f"{name}: tokens computed again", done.recomputed, "", bound)
        )
    return figures


def _static_and_dense(
    plain: Any, tasks: Sequence[Task], batch: int
) -> dict[str, Callable[[], Done]]:
    model = wrap(llama_copy(plain))
    settings = DenseSettings(max_rows=batch)
    return {
        "static": lambda: static(plain, tasks, batch, ordered=False),
        "dense": lambda: dense(model, tasks, settings),
    }


def llama_copy(model: Any) -> Any:
    """The same weights in a model whose attention may differ."""
    copy = LlamaForCausalLM(model.config.__class__.from_dict(model.config.to_dict()))
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    return copy.eval()


def _times(done: dict[str, Done]) -> list[str]:
    return [f"{each.cpu_s:.2f}" for each in done.values()]


PARTS: dict[str, Callable[[int], list[Figure]]] = {
    "steps": steps, "small": small, "large": large, "sharing": sharing,
    "memory": memory,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all by default")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument(
        "--save", action="store_true", help="write the JSON to results/"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Continuous batching warns of each request that has no ending token.
    transformers.logging.set_verbosity_error()
    figures: list[Figure] = []
    with torch.inference_mode():
        for name in options.parts or PARTS:
            measured = PARTS[name](options.repeats)
            print_figures(name, measured)
            figures += measured
    missed = [figure.name for figure in figures if figure.met is False]
    save = RESULTS / "dense.json" if options.save else None
    finish({"figures": [figure.as_json for figure in figures], "missed": missed}, save)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
