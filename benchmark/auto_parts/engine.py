"""`auto` beside single orders on SGLang itself, on small shapes of all families.

A shape is drawn as for the simulator, with 60 to 150 requests. Of its prompts, answers and
limits every k-th token stays, so that the KV of an engine is to the job what the shape's was;
what prompts share stays shared. A length that is not known is decided by a bias for the end
token, which nobody plans with. Each shape runs with `auto`, with `dfs` and with the order that
is best in the simulator, in turn, always with an empty cache.

Costs are those of the data sheet, so that the choice does not depend on how busy the machine
is. What is computed varies between repeats all the same: a new plan comes when answers do, and
the engine does not wait for it. Medians count.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from report import Figure, print_table
from rollout_engine import sampling
from throughput_engine import Engine, Task, TaskResult, ready_engines
from throughput_jobs import NUM_IDS, ThroughputJob, exactly
from tqdm import tqdm

from sglang_batch.config import AUTO
from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.machine_model import Machine
from sglang_batch.planner.requests import UNKNOWN, Int32s, PlanRequests
from sglang_batch.run.demo_model import write_demo_model

from . import simulated
from .shapes import Shape, make_shapes

SIZES = 60, 150
REPEATS = 3
# Engines by their tokens of KV: for jobs of many times as many tokens, and for the others.
KV_TOKENS = 5_000, 20_000
MANY = 4
MAX_RUNNING = 48
ENDLESS = 10_000  # repeats of an engine that is ended from outside


@dataclass(frozen=True, slots=True)
class Run:
    """A job on the engine.

    computed, cached: prompt tokens.
    priced_s: its steps by the costs that it was planned with, which no other load changes.
    orders: of its plans, one after the other.
    """

    computed: int
    cached: int
    prefill_steps: int
    decode_steps: int
    seconds: float
    priced_s: float
    orders: list[str]

    @classmethod
    def of(cls, done: TaskResult, cost: CostModel) -> Run:
        prefilled, rows = done.steps["prefill_tokens"], done.steps["decode_rows"]
        priced_s = (
            len(rows) * cost.weight_read_time_s
            + (prefilled + rows).sum() * cost.token_time_s
            + done.steps["decode_kv_tokens"].sum() * cost.kv_read_time_s
        )
        return cls(
            int(prefilled.sum()),
            done.cached_tokens,
            int((prefilled > 0).sum()),
            int((rows > 0).sum()),
            done.seconds,
            float(priced_s),
            done.orders,
        )


@dataclass(frozen=True, slots=True)
class Compared:
    """A shape's runs by order, of which ``best`` is the simulator's."""

    shape: Shape
    job: ThroughputJob
    best: str
    runs: Mapping[str, Sequence[Run]]

    def median(self, order: str, name: str) -> float:
        return float(median(getattr(run, name) for run in self.runs[order]))

    def over(self, name: str) -> float:
        """`auto` over the least of the others."""
        others = [self.median(order, name) for order in self.runs if order != AUTO]
        return self.median(AUTO, name) / max(min(others), 1e-9)

    def share(self, order: str) -> float:
        """Of the prompt tokens that can come from the cache, those that do."""
        possible = self.job.tree().prefix_sharing_ratio * self.job.num_prompt_tokens
        return self.median(order, "cached") / max(possible, 1.0)

    @property
    def points(self) -> float:
        """By which the share of all prompt tokens from the cache is below the best of the
        others, in hundredths."""
        most = max(self.median(x, "cached") for x in self.runs if x != AUTO)
        return 100 * (most - self.median(AUTO, "cached")) / self.job.num_prompt_tokens

    @property
    def noise(self) -> float:
        """The longest run of an order over its shortest, at most."""
        seconds = [[run.seconds for run in runs] for runs in self.runs.values()]
        return max(max(each) / min(each) for each in seconds)


def measure(number: int, seed: int, *, quick: bool) -> list[Figure]:
    """Compare so many shapes. The table is printed."""
    repeats = 1 if quick else REPEATS
    with tempfile.TemporaryDirectory(prefix="sglang-batch-bench-") as scratch:
        model = Path(scratch) / "model"
        write_demo_model(model, context_len=max(KV_TOKENS))
        with ready_engines([_task(model, kv) for kv in KV_TOKENS]) as engines:
            found = [
                compare(shape, engine, repeats)
                for shape, engine in tqdm(
                    _fitted(number, seed, engines), total=number, disable=None
                )
            ]
    _print(found)
    figures = _figures(found)
    # With one repeat the times of a shape mean nothing.
    return [replace(each, target=None) for each in figures] if quick else figures


def _task(model: Path, kv_tokens: int) -> Task:
    arguments = [
        f"--model-path={model}", "--dtype=float32", "--sleep-on-idle",
        "--mem-fraction-static=0.3", f"--max-total-tokens={kv_tokens}",
        f"--max-running-requests={MAX_RUNNING}", "--chunked-prefill-size=512",
        '--offline-batch-config={"learn_costs": false}',
    ]  # fmt: skip
    return Task(True, "dfs", arguments, [], [], repeats=ENDLESS)


def _fitted(
    number: int, seed: int, engines: Sequence[Engine]
) -> Iterator[tuple[Shape, Engine]]:
    """The shapes, each as large as the engine that it is for."""
    tight, roomy = engines
    for shape in make_shapes(number, seed, SIZES):
        tokens = int(shape.requests.input_len.sum() + shape.true_output_len.sum())
        many = tokens > MANY * shape.machine.limits.kv_capacity_tokens
        engine = tight if many else roomy
        yield scaled(shape, engine.machine), engine


def scaled(shape: Shape, machine: Machine) -> Shape:
    """The shape for a machine with less KV, as much smaller."""
    kv = machine.limits.kv_capacity_tokens
    step = max(1.0, shape.machine.limits.kv_capacity_tokens / kv)

    def fewer(length: Int32s) -> Int32s:
        kept: Int32s = np.maximum(np.rint(length / step), 1).astype(np.int32)
        return kept

    requests = shape.requests
    # A token's place decides whether it stays: what is equal stays equal.
    prompts = [
        requests.tokens[begin:end][np.arange(0, end - begin, step).astype(np.int64)]
        for begin, end in zip(requests.offsets, requests.offsets[1:], strict=False)
    ]
    output_len = fewer(shape.true_output_len)
    known = requests.known_output_len != UNKNOWN
    limit = np.where(known, output_len, fewer(requests.max_new_tokens))
    small = PlanRequests(
        np.concatenate(prompts) % NUM_IDS,
        np.cumsum([0, *map(len, prompts)], dtype=np.int64),
        limit.astype(np.int32),
        np.where(known, output_len, UNKNOWN).astype(np.int32),
    )
    output_len = np.minimum(output_len, limit).astype(np.int32)
    return replace(shape, requests=small, true_output_len=output_len, machine=machine)


def job_of(shape: Shape) -> ThroughputJob:
    """The shape as requests to an engine."""
    requests = shape.requests
    each = zip(
        shape.true_output_len.tolist(),
        requests.max_new_tokens.tolist(),
        (requests.known_output_len != UNKNOWN).tolist(),
        strict=True,
    )
    limits = shape.machine.limits
    return ThroughputJob(
        shape.name,
        [
            requests.tokens[begin:end].tolist()
            for begin, end in zip(requests.offsets, requests.offsets[1:], strict=False)
        ],
        [
            # Equal requests are computed once unless their answers are random.
            {**exactly(length), "temperature": 1.0} if known else sampling(length, most)
            for length, most, known in each
        ],
        limits.kv_capacity_tokens,
        limits.max_running or MAX_RUNNING,
        output_len=shape.true_output_len.tolist(),
    )


def compare(shape: Shape, engine: Engine, repeats: int) -> Compared:
    """Run a shape in each order.

    Raises:
        RuntimeError: an answer does not have the length of the shape.
    """
    predicted = simulated.measure(shape)[0]
    best = min(predicted, key=lambda order: predicted[order])
    job = job_of(shape)
    runs: dict[str, list[Run]] = {order: [] for order in (AUTO, "dfs", best)}
    for number in range(repeats):
        # The other way round each time, so that no order is always after the same one.
        for order in list(runs)[:: -1 if number % 2 else 1]:
            done = engine.run(job, policy=order)
            if list(map(len, done.output_ids)) != job.output_lens:
                raise RuntimeError(f"{shape.name}, {order}: answers of other lengths")
            runs[order].append(Run.of(done, shape.machine.cost))
    return Compared(shape, job, best, runs)


def _print(found: Sequence[Compared]) -> None:
    print_table(
        "on the engine",
        [
            "job", "requests", "lengths known", "KV / tokens", "best simulated", "auto took",
            "computed", "over the best", "cached of possible", "points below",
            "prefill steps", "decode steps", "priced over the best", "seconds", "over the best", "noise",
        ],
        [_row(number, each) for number, each in enumerate(found)],
    )  # fmt: skip


def _row(number: int, one: Compared) -> list[str]:
    tokens = one.job.num_prompt_tokens + sum(one.job.output_lens)

    def all_orders(name: str, form: str) -> str:
        return " ".join(f"{one.median(order, name):{form}}" for order in one.runs)

    return [
        f"{number} {one.shape.name}", f"{len(one.job.prompts)}", one.shape.known,
        f"{one.job.kv_tokens / tokens:.2f}", one.best,
        " ".join(dict.fromkeys(x for run in one.runs[AUTO] for x in run.orders)),
        all_orders("computed", ".0f"), f"{one.over('computed'):.3f}",
        " ".join(f"{one.share(order):.1%}" for order in one.runs), f"{one.points:.2f}",
        all_orders("prefill_steps", ".0f"), all_orders("decode_steps", ".0f"), f"{one.over('priced_s'):.3f}",
        all_orders("seconds", ".2f"), f"{one.over('seconds'):.2f}", f"{one.noise:.2f}",
    ]  # fmt: skip


def _figures(found: Sequence[Compared]) -> list[Figure]:
    def each(name: str) -> list[float]:
        return [one.over(name) for one in found]

    noise = median(one.noise for one in found)
    return [
        Figure("points of the cached share below the best, worst", max(one.points for one in found), "", ("<=", 0.5)),
        Figure("prompt tokens computed over the best, median", median(each("computed"))),
        Figure("prompt tokens computed over the best, worst", max(each("computed")), "", ("<=", 1.02)),
        Figure("prefill steps over the best, worst", max(each("prefill_steps"))),
        Figure("decode steps over the best, median", median(each("decode_steps"))),
        Figure("decode steps over the best, worst", max(each("decode_steps"))),
        Figure("seconds by the costs over the best, median", median(each("priced_s"))),
        Figure("seconds by the costs over the best, worst", max(each("priced_s"))),
        Figure("seconds over the best, median", median(each("seconds")), "", None, f"repeats differ by {noise:.2f} in the median"),
        Figure("seconds over the best, worst", max(each("seconds"))),
    ]  # fmt: skip
