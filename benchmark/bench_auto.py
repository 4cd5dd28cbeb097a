"""How much `auto` loses to the best single order, over jobs as people have them.

    python benchmark/bench_auto.py                     400 jobs, one law each
    python benchmark/bench_auto.py --jobs 40 --seed 7  fewer, others
    python benchmark/bench_auto.py --show 10           and the worst ten
    python benchmark/bench_auto.py --largest 600 --redraws 16   beside the best guess

Llama-3-8B on an A100, simulated as SGLang with the offline scheduler. Each order runs as a job of
that policy: it begins with its sample, and the rest is planned anew from the answers that have
come whenever the job would do so. `auto` follows `dfs` until then. The true lengths are seen by
no order.

The families are few-shot prompts, questions on documents, conversations, rows of tables,
evaluations, groups of samples, agents and prompts that share nothing, of 30 to 10,000
requests (``--largest``), with KV for the largest request up to the whole job, answers that are
short, long or of heavy tails, and none, half or all of their lengths known.

The best order is that for the lengths that came, which nobody knows beforehand. The best guess,
with `--redraws`, is the order that is best in the mean of other lengths that were drawn in the
same way: the choice of somebody who knows all but the outcome.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from report import Figure, add_save, finish, print_figures, print_table
from tqdm import tqdm

from sglang_batch.config import AUTO, OfflineBatchConfig
from sglang_batch.job.answer_feedback import AnswerFeedback
from sglang_batch.job.job_planner import JobPlanner
from sglang_batch.job.job_shards import JobProgress
from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.costs.hardware import Parallelism, hardware
from sglang_batch.planner.costs.model_spec import ModelSpec
from sglang_batch.planner.costs.step_costs import step_costs
from sglang_batch.planner.machine_model import EngineLimits, Machine
from sglang_batch.planner.ordering.order import Order
from sglang_batch.planner.output_lengths.estimates import OutputEstimates
from sglang_batch.planner.plan import Plan, orders_for
from sglang_batch.planner.prefixes.prefix_tree import build_prefix_tree
from sglang_batch.planner.requests import UNKNOWN, Int32s, PlanRequests
from sglang_batch.planner.simulator.simulator import Simulation, simulate
from sglang_batch.prediction.models import MODELS

LAWS = (1.0, 1.2, 1.47)
Prompts = list[np.ndarray]
Generator = np.random.Generator


@dataclass(frozen=True)
class Shape:
    """A job.

    true_output_len: int32 ``[n]``, the lengths that its answers get.
    answers: draws them.
    known: whether none, half or all of them are known beforehand.
    """

    name: str
    requests: PlanRequests
    true_output_len: Int32s
    answers: Lengths
    known: str
    machine: Machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=400, help="default: 400")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--largest", type=int, default=10_000, help="requests; default: 10000"
    )
    parser.add_argument(
        "--redraws", type=int, default=0, help="of the best guess; default: none"
    )
    parser.add_argument("--show", type=int, default=10, help="worst jobs; default: 10")
    add_save(parser)
    options = parser.parse_args()

    rows, taken, guesses = [], [], []
    shapes = make_shapes(options.jobs, options.seed, options.largest)
    for number, shape in enumerate(tqdm(shapes, total=options.jobs, disable=None)):
        runs, auto, chosen, plan_s = measure(shape)
        name = min(runs, key=lambda each: runs[each])
        rows.append((auto / runs[name], number, shape, chosen, name, runs, auto))
        taken.append(plan_s)
        if options.redraws:
            guess = best_guess(shape, runs, (options.seed, number), options.redraws)
            guesses.append(runs[guess] / runs[name])
    print_worst(rows, options.show)
    over_best = np.array([row[0] for row in rows])
    half = np.array([row[0] for row in rows if row[2].known == "half"])
    over = {
        name: np.array([row[6] / row[5][name] for row in rows])
        for name in ("dfs", "dfs-weight", "fcfs")
    }
    figures = [
        Figure("auto over the best order, median", float(np.median(over_best)), "", ("<=", 1.0005)),
        Figure("auto over the best order, mean", float(over_best.mean())),
        Figure("95 of 100 jobs at most", float(np.quantile(over_best, 0.95)), "", ("<=", 1.01)),
        Figure("worst", float(over_best.max()), "", ("<=", 1.04)),
        Figure("worst with half of the lengths known", float(half.max(initial=1)), "", ("<=", 1.05)),
        *(
            Figure(f"over {name}, worst", float(each.max()), "", ("<=", 1.01) if name != "dfs" else None)
            for name, each in over.items()
        ),
        *guess_figures(guesses),
        Figure("seconds of planning, median", float(np.median(taken)), "s"),
    ]  # fmt: skip
    print_figures("auto", figures)
    finish({"figures": [figure.as_json for figure in figures]}, options.save)


def measure(shape: Shape) -> tuple[dict[str, float], float, str, float]:
    """Simulated seconds of each order and of `auto`, its choice, seconds of planning."""
    began = time.perf_counter()
    auto = planned(shape, AUTO)
    took = time.perf_counter() - began
    runs = {
        policy: seconds(shape, planned(shape, policy).scan, auto.estimates)
        for policy in orders_for(shape.machine)
    }
    return runs, seconds(shape, auto.scan, auto.estimates), auto.policy, took


def best_guess(
    shape: Shape, runs: dict[str, float], seed: tuple[int, ...], redraws: int
) -> str:
    """The order that takes least in the mean of other lengths drawn in the same way."""
    if shape.known == "all":
        return min(runs, key=lambda policy: runs[policy])
    known = shape.requests.known_output_len
    total = dict.fromkeys(runs, 0.0)
    for number in range(redraws):
        drawn = shape.answers.draw(np.random.default_rng((*seed, number)))
        drawn = np.where(known == UNKNOWN, drawn, known).astype(np.int32)
        room = shape.machine.limits.kv_capacity_tokens - 64 - shape.requests.input_len
        other = replace(shape, true_output_len=np.minimum(drawn, room))
        for policy in runs:
            plan = planned(other, policy)
            total[policy] += seconds(other, plan.scan, plan.estimates)
    return min(total, key=lambda policy: total[policy])


def guess_figures(guesses: Sequence[float]) -> list[Figure]:
    if not guesses:
        return []
    return [
        Figure(f"the best guess over the best order, {name}", value)
        for name, value in (
            ("mean", float(np.mean(guesses))),
            ("95 of 100 jobs at most", float(np.quantile(guesses, 0.95))),
            ("worst", max(guesses)),
        )
    ]


def planned(shape: Shape, policy: str) -> Plan:
    """The last plan of a job, with its order from the first request to the last."""
    n = len(shape.requests)
    planner = JobPlanner(
        shape.requests,
        np.arange(n),
        shape.machine,
        OfflineBatchConfig(policy=policy),
    )
    feedback = AnswerFeedback(planner.sample, planner.num_unknown)
    (last,) = planner.plans()
    plan = last.plan
    left = np.ones(n)
    while planner.num_unknown:
        run = simulated(shape, plan.scan, plan.estimates)
        if not answers_until_due(feedback, run, shape.true_output_len, left):
            break
        planner.observe(*feedback.pop_answers())
        begun = np.flatnonzero(left < 1)
        begun = begun[np.argsort(run.prompt_step[begun], kind="stable")]
        replica, whole = np.zeros(n, np.int32), True
        (last,) = planner.plans(JobProgress(replica, left < 1, left.copy(), whole))
        scan = last.plan.scan.beginning_with(begun)
        if scan.is_dynamic:
            # The simulator takes it from its ends from the first step on.
            run = simulated(shape, scan, last.plan.estimates)
            scan = Order(run.admission_order).beginning_with(begun)
        plan = replace(last.plan, scan=scan)
    return plan


def answers_until_due(
    feedback: AnswerFeedback, run: Simulation, output_len: Int32s, left: np.ndarray
) -> bool:
    """Pass on the answers of a run, by its steps, until a new plan is due. False if none is.

    Args:
        left: float64 ``[n]``, of ``JobProgress``, is changed. What began stays as it is.
    """
    n = len(left)
    steps = np.concatenate([run.prompt_step, run.last_step])
    for event in np.argsort(steps, kind="stable").tolist():
        number = event % n
        if event < n and left[number] == 1.0:
            left[number] = 0.5
            feedback.add_started(0, number)
        elif event >= n and left[number] > 0.0:
            left[number] = 0.0
            feedback.add_answer(number, int(output_len[number]))
            if feedback.is_due:
                return True
    return False


def seconds(shape: Shape, order: Order, estimates: OutputEstimates) -> float:
    """The simulated run of an order.

    Args:
        estimates: by which requests are admitted. The scheduler learns them under any policy,
            so all runs have the same.
    """
    return simulated(shape, order, estimates).seconds


def simulated(shape: Shape, order: Order, estimates: OutputEstimates) -> Simulation:
    requests = shape.requests
    return simulate(
        build_prefix_tree(requests.tokens, requests.offsets),
        shape.machine.cost,
        shape.machine.limits,
        order=order,
        output_len=shape.true_output_len,
        est_output_len=estimates.est_output_len,
        est_output_len_sq=estimates.est_output_len_sq,
        max_new_tokens=requests.max_new_tokens,
    )


def print_worst(rows: list[tuple[Any, ...]], show: int) -> None:
    worst = sorted(rows, key=lambda row: -row[0])[:show]
    print_table(
        f"the worst {len(worst)}",
        [
            "job",
            "requests",
            "lengths known",
            "KV",
            "k",
            "auto over best",
            "auto took",
            "best",
        ],
        [
            [
                f"{number} {shape.name}",
                f"{len(shape.requests)}",
                shape.known,
                f"{shape.machine.limits.kv_capacity_tokens}",
                f"{shape.machine.cost.interference_exponent:g}",
                f"{over:.3f}",
                chosen,
                name,
            ]
            for over, number, shape, chosen, name, _, _ in worst
        ],
    )


def make_shapes(jobs: int, seed: int, largest: int) -> Iterator[Shape]:
    base = step_costs(
        ModelSpec.from_hf_config(MODELS["llama-3-8b"]),
        hardware("a100-sxm-80gb"),
        Parallelism(),
    )
    names = list(FAMILIES)
    for number in range(jobs):
        random = np.random.default_rng((seed, number))
        yield make_shape(names[number % len(names)], random, base, largest)


def make_shape(name: str, random: Generator, base: CostModel, largest: int) -> Shape:
    n = int(np.exp(random.uniform(np.log(30), np.log(largest))))
    prompts, group = FAMILIES[name](random, n)
    n = len(prompts)
    if random.random() < 0.5:  # the order of the input
        places = random.permutation(n)
        prompts, group = [prompts[i] for i in places], group[places]
    limit = int(random.choice([16, 64, 256, 1024]))
    answers = Lengths.of(random, group, limit)
    output_len = answers.draw(random)
    known = str(random.choice(["none", "none", "half", "all"]))
    is_known = np.zeros(n, np.bool_)
    if known == "all":
        is_known[:] = True
    elif known == "half":
        # Of whole groups, as where one source has fixed generations, or of single lines.
        ids = np.unique(group)
        chosen = random.permutation(ids)[: max(1, len(ids) // 2)]
        is_known = np.isin(group, chosen) if len(ids) > 3 else random.random(n) < 0.5
    size = np.array([len(each) for each in prompts], np.int64)
    requests = PlanRequests(
        np.concatenate(prompts).astype(np.int32),
        np.concatenate([[0], size.cumsum()]).astype(np.int64),
        np.full(n, limit, np.int32),
        np.where(is_known, output_len, UNKNOWN).astype(np.int32),
    )
    least = int((size + output_len).max()) + 64
    most = max(int((size + output_len).sum()), least + 1)
    capacity = int(
        np.exp(random.uniform(np.log(1.2 * least), np.log(1.2 * max(most, least))))
    )
    cost = replace(base, interference_exponent=float(random.choice(LAWS)))
    limits = EngineLimits(
        min(capacity, 450_000) if capacity > least else least, as_sglang=True
    )
    if limits.kv_capacity_tokens < least:
        limits = EngineLimits(least, as_sglang=True)
    return Shape(name, requests, output_len, answers, known, Machine(cost, limits))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Answers of one kind, of a mean for each group, or with a heavy tail.

    mean: ``[n]``, None for short ones.
    """

    n: int
    limit: int
    mean: np.ndarray | None
    spread: float

    @classmethod
    def of(cls, random: Generator, group: np.ndarray, limit: int) -> Lengths:
        n, kind = len(group), random.choice(["short", "alike", "groups", "tail"])
        mean = np.full(n, max(1.0, limit * random.uniform(0.05, 0.6)))
        if kind == "groups":
            of_group = random.normal(np.log(mean[0]), 0.9, group.max() + 1)
            mean = np.exp(of_group)[group]
        spread = 1.3 if kind == "tail" else 0.3
        return cls(n, limit, None if kind == "short" else mean, spread)

    def draw(self, random: Generator) -> Int32s:
        if self.mean is None:
            most = 1 + max(2, self.limit // 8)
            return random.integers(1, most, self.n).astype(np.int32)
        center = np.log(self.mean) - self.spread**2 / 2
        drawn = np.exp(random.normal(center, self.spread))
        clipped: Int32s = np.clip(drawn, 1, self.limit).astype(np.int32)
        return clipped


def text(random: Generator, size: float) -> np.ndarray:
    return random.integers(0, 100_000, max(1, int(size)))


def between(random: Generator, low: float, high: float) -> int:
    return int(np.exp(random.uniform(np.log(low), np.log(high))))


def grouped(
    random: Generator, n: int, groups: int, shared: int, own: int
) -> tuple[Prompts, np.ndarray]:
    firsts = [text(random, shared) for _ in range(groups)]
    group = np.sort(random.integers(0, groups, n))
    return [
        np.concatenate([firsts[i], text(random, own * random.uniform(0.5, 1.5))])
        for i in group
    ], group


def few_shot(random: Generator, n: int) -> tuple[Prompts, np.ndarray]:
    groups = between(random, 1, max(2, n / 20))
    return grouped(
        random, n, groups, between(random, 300, 3000), between(random, 20, 200)
    )


def documents(random: Generator, n: int) -> tuple[Prompts, np.ndarray]:
    n = min(n, 1000)
    groups = max(1, n // int(random.integers(2, 20)))
    shared = between(random, 2000, 30_000)
    return grouped(random, n, groups, shared, between(random, 20, 100))


def chats(random: Generator, n: int) -> tuple[Prompts, np.ndarray]:
    """A system prompt, and conversations whose turns are a request each."""
    system = text(random, between(random, 50, 1500))
    prompts: Prompts = []
    group: list[int] = []
    while len(prompts) < n:
        talk, number = system, len(group)
        for _ in range(int(random.integers(1, 8))):
            talk = np.concatenate([talk, text(random, between(random, 20, 400))])
            prompts.append(talk)
            group.append(number)
    return prompts, np.unique(group, return_inverse=True)[1]


def tables(random: Generator, n: int) -> tuple[Prompts, np.ndarray]:
    """An instruction, then columns of few values each."""
    instruction = text(random, between(random, 30, 400))
    columns = [
        [
            text(random, between(random, 2, 60))
            for _ in range(int(random.integers(2, 30)))
        ]
        for _ in range(int(random.integers(1, 4)))
    ]
    picks = np.stack([random.integers(0, len(each), n) for each in columns])
    picks = picks[:, np.lexsort(picks[::-1])]
    prompts = [
        np.concatenate(
            [
                instruction,
                *(columns[c][picks[c, i]] for c in range(len(columns))),
                text(random, 20),
            ]
        )
        for i in range(n)
    ]
    return prompts, picks[0]


def evaluations(random: Generator, n: int) -> tuple[Prompts, np.ndarray]:
    """Tasks of unlike sizes, each with its shots, questions with several endings."""
    tasks = int(random.integers(2, 12))
    share = random.dirichlet(np.ones(tasks))
    prompts: Prompts = []
    group = []
    for task in range(tasks):
        shots = text(random, between(random, 200, 2500))
        for _ in range(max(1, int(share[task] * n / 4))):
            question = np.concatenate([shots, text(random, between(random, 20, 200))])
            for _ in range(4):
                prompts.append(np.concatenate([question, text(random, 6)]))
                group.append(task)
    return prompts, np.array(group)


def rollouts(random: Generator, n: int) -> tuple[Prompts, np.ndarray]:
    samples = int(random.choice([4, 8, 16, 64]))
    groups = max(1, n // samples)
    size = between(random, 50, 1000)
    firsts = [text(random, size) for _ in range(groups)]
    group = np.repeat(np.arange(groups), samples)
    return [firsts[i] for i in group], group


def agents(random: Generator, n: int) -> tuple[Prompts, np.ndarray]:
    """A deep tree: each request continues one of the earlier ones."""
    prompts = [text(random, between(random, 300, 4000))]
    group = [0]
    while len(prompts) < n:
        parent = int(random.integers(max(0, len(prompts) - 20), len(prompts)))
        if len(prompts[parent]) > 20_000:
            parent = 0
        more = text(random, between(random, 30, 600))
        prompts.append(np.concatenate([prompts[parent], more]))
        group.append(len(prompts) % 7)
    return prompts, np.array(group)


def distinct(random: Generator, n: int) -> tuple[Prompts, np.ndarray]:
    size = between(random, 30, 3000)
    spread = random.uniform(0.1, 1.2)
    sizes = np.clip(random.lognormal(np.log(size), spread, n), 4, 16_000)
    return [text(random, each) for each in sizes], random.integers(0, 5, n)


FAMILIES: dict[str, Callable[[Generator, int], tuple[Prompts, np.ndarray]]] = {
    "few-shot": few_shot,
    "documents": documents,
    "chats": chats,
    "tables": tables,
    "evaluations": evaluations,
    "rollouts": rollouts,
    "agents": agents,
    "distinct": distinct,
}


if __name__ == "__main__":
    main()
