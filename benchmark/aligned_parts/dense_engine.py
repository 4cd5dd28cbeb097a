"""The dense engine: batches of similar length against other orders, ShareGPT's lengths.

A random Llama with 4 layers of 256 channels runs on one CPU core, in float32 and greedy.
All orders take turns, and their answers are compared. Lengths are those of the file in the
folder ``TRACES``, or drawn with the same moments, and halved. Prompts and answers are cut to
1,024 tokens. The seconds are processor time, with prefills.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dense_parts.jobs import Task, longest_first, tasks_of
from dense_parts.turns import differing, in_turns, of_median
from dense_parts.ways import Clock, Done, llama, llama_copy
from report import Figure, print_table

from sglang_batch.dense.admission import ByLength
from sglang_batch.dense.decode_loop import DecodeLoop
from sglang_batch.dense.model import LoadedModel, pack_linears, wrap
from sglang_batch.dense.prefill import Prefilled
from sglang_batch.dense.row_request import (
    DenseAnswer,
    DenseRequest,
    DenseSettings,
    Stopping,
)
from sglang_batch.dense.rows import SlabRows
from sglang_batch.planner.kv_lengths.batch_state import GROUPS, TREE
from sglang_batch.prediction.workloads.sources import SHAREGPT, lognormal_lengths
from sglang_batch.prediction.workloads.traces import read_trace
from sglang_batch.srt.dense.engine import dense_machine

# Lengths are halved for a job of a minute.
SCALE, LONGEST = 0.5, 1024
# KV of eight rows of the longest prompt: memory limits the batch, not the number of rows.
# With KV of four, the longest answers run nearly alone in any order.
MAX_CELLS, SHORT_CELLS, MAX_ROWS = 8 * LONGEST, 4 * LONGEST, 128
LEAST = 1.5
RULES = {"length-aligned": GROUPS, "length-tree": TREE}
# Prompts have tokens from 3 on.
ENDING = 0


@dataclass(frozen=True, slots=True)
class Case:
    """Limits, and the orders that are compared.

    estimated: whether the lengths of answers are not known before they end. Then the mean
        of the job stands for each, as a plan has it for prompts of one kind.
    turns: runs of each order, of which the median counts.
    """

    name: str
    settings: DenseSettings
    policies: Sequence[str]
    estimated: bool = False
    turns: int = 1


class EndingRows(SlabRows):
    """Rows whose answers end with a token that nobody foresees.

    Args:
        tasks: by the number that is the id of a request.
    """

    def __init__(
        self, model: LoadedModel, tasks: Sequence[Task], settings: DenseSettings
    ) -> None:
        super().__init__(model, settings.prefill_tokens, settings.shortest_shared)
        self._tasks = tasks
        self._here: list[Task] = []
        self._of: dict[int, tuple[Any, Task]] = {}  # by the id of a row's KV

    def prefill(
        self, requests: Sequence[DenseRequest], following: DenseRequest | None
    ) -> Iterator[Prefilled]:
        for found in super().prefill(requests, following):
            task = self._tasks[int(found.request.rid)]
            self._of[id(found.kv)] = found.kv, task
            logits = found.logits[None].clone()
            _end(logits, [task.output_len == 1])
            yield replace(found, logits=logits[0])

    def join(self, kvs: Sequence[Any]) -> None:
        super().join(kvs)
        self._here += [self._of.pop(id(kv))[1] for kv in kvs]

    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        pairs = list(zip(self.lengths, self._here, strict=True))
        ends = [
            length - len(task.prompt) + 2 == task.output_len for length, task in pairs
        ]
        logits = super().decode(tokens)
        _end(logits, ends)
        return logits

    def take(self, row: int) -> Any:
        kv = super().take(row)
        self._of[id(kv)] = kv, self._here[row]
        return kv

    def leave(self, row: int, *, wipe: bool = False) -> None:
        super().leave(row, wipe=wipe)
        self._here[row] = self._here[-1]
        self._here.pop()


def _end(logits: torch.Tensor, ends: Sequence[bool]) -> None:
    """Let the rows that end choose the ending token, and no other row."""
    logits[:, ENDING] = -torch.inf
    for row, ended in enumerate(ends):
        if ended:
            logits[row] = -torch.inf
            logits[row, ENDING] = 0.0


def run(
    model: LoadedModel,
    tasks: Sequence[Task],
    settings: DenseSettings,
    policy: str,
    *,
    estimated: bool,
) -> Done:
    """A job in one of the orders."""
    order = list(range(len(tasks)))
    if policy == "aligned":
        order = longest_first(tasks)
    elif policy in RULES:
        order.sort(key=lambda i: len(tasks[i].prompt))
    mean = round(float(np.mean([task.output_len for task in tasks])))
    answers: list[list[int]] = [[] for _ in tasks]

    def on_answer(request: DenseRequest, answer: DenseAnswer) -> None:
        if answer.reason != "stop":
            raise RuntimeError(f"{request.rid}: {answer.reason}, {answer.error}")
        answers[int(request.rid)] = list(answer.output_ids)

    clock = Clock()
    rows = EndingRows(model, tasks, settings)
    loop = DecodeLoop(model, rows, settings, on_answer)
    for place, number in enumerate(order):
        task = tasks[number]
        most = LONGEST if estimated else task.output_len
        loop.add(
            DenseRequest(
                str(number),
                task.prompt,
                Stopping(most, token_ids=frozenset({ENDING})),
                place=place,
                expected_len=mean if estimated else None,
                by_length=ByLength(RULES[policy], len(task.prompt))
                if policy in RULES
                else None,
            )
        )
    while loop.can_step:
        loop.step()
    return Done(
        answers,
        *clock.read(),
        loop.counts.steps,
        loop.counts.peak_cells,
        computed=rows.computed_tokens,
        recomputed=loop.counts.recomputed_tokens,
    )


def job(count: int, longest: int, trace: Path | None) -> list[Task]:
    """Prompts of random tokens. The lengths are a sample of the trace's rows."""
    rng = np.random.default_rng(1)
    if trace is None:
        squares = (
            SHAREGPT.input_mean**2 * (1 + SHAREGPT.own_cv**2),
            SHAREGPT.output_square,
        )
        means = SHAREGPT.input_mean, SHAREGPT.output_mean
        prompts, outputs = (
            rng.permutation(
                lognormal_lengths(count, mean, square, 2, round(longest / SCALE))
            )
            for mean, square in zip(means, squares, strict=True)
        )
    else:
        found = read_trace(trace, max_input_len=round(longest / SCALE))
        chosen = rng.choice(len(found.output_len), count, replace=False)
        prompts = np.diff(found.requests.offsets)[chosen]
        outputs = found.output_len[chosen]
    sizes = [
        np.clip(SCALE * lengths, least, longest).astype(int).tolist()
        for lengths, least in [(prompts, 2), (outputs, 1)]
    ]
    return tasks_of(rng, list(zip(*sizes, strict=True)))


def cases(quick: bool) -> list[Case]:
    """What is measured."""
    limited = DenseSettings(max_rows=MAX_ROWS, max_cells=MAX_CELLS)
    short = replace(limited, max_cells=SHORT_CELLS)
    rows = DenseSettings()
    if quick:
        limited, short = replace(limited, max_cells=256), replace(short, max_cells=256)
        rows = replace(rows, max_rows=4)
    own = "fcfs", "length-aligned"
    return [
        Case(
            "KV limited",
            limited,
            ("fcfs", "aligned", "length-tree", own[1]),
            turns=1 if quick else 3,
        ),
        Case("KV limited, lengths estimated", limited, own, estimated=True),
        Case("half the KV", short, own),
        Case("32 rows", rows, ("fcfs", "aligned", own[1])),
    ]


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part. A quick run has few and short requests.

    Raises:
        RuntimeError: an order has other answers than ``fcfs``.
    """
    torch.set_num_threads(1)
    with torch.inference_mode():
        return _measure(quick)


def _measure(quick: bool) -> list[Figure]:
    plain = llama(2, 64) if quick else llama(4, 256)
    model = wrap(llama_copy(plain))
    pack_linears(model.model)
    cost = dense_machine(model, DenseSettings()).cost
    step_cells = float(cost.weight_read_time_s / cost.kv_read_time_s)
    count, longest = (24, 60) if quick else (320, LONGEST)
    folder = os.environ.get("TRACES")
    trace = Path(folder) / "sharegpt_lengths.csv" if folder else None
    tasks = job(count, longest, trace)
    _compile(model)
    figures, table = [], []
    for case in cases(quick):
        settings = replace(case.settings, step_cells=step_cells)
        ways = {
            policy: partial(
                run, model, tasks, settings, policy, estimated=case.estimated
            )
            for policy in case.policies
        }
        runs = in_turns(case.name, ways, case.turns)
        for policy in case.policies:
            for each in runs[policy]:
                if differing(plain, tasks, runs["fcfs"][0], each):
                    raise RuntimeError(f"{case.name}: {policy} answers otherwise")
        done = {policy: of_median(each) for policy, each in runs.items()}
        for policy, each in done.items():
            rows = sum(task.output_len - 1 for task in tasks) / each.steps
            name = case.name, policy, f"{each.cpu_s:.1f}", each.steps, f"{rows:.1f}"
            table.append(name)
            if policy != "fcfs":
                has_target = case.settings.max_cells == MAX_CELLS and not case.estimated
                target = policy == "length-aligned" and has_target
                figures.append(
                    Figure(
                        f"{case.name}: fcfs over {policy}",
                        done["fcfs"].cpu_s / each.cpu_s,
                        "x",
                        (">=", LEAST) if target and not quick else None,
                    )
                )
    print_table(
        "Processor seconds", ["case", "order", "s", "steps", "rows a step"], table
    )
    return figures


def _compile(model: LoadedModel) -> None:
    """Have the compiled functions ready, which a first job on a machine compiles."""
    tasks = tasks_of(np.random.default_rng(0), [(4, 60), (5, 3), (6, 3), (40, 30)] * 8)
    for policy in RULES:
        run(model, tasks, DenseSettings(max_rows=4), policy, estimated=False)
