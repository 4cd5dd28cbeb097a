"""Jobs as people have them: their prompts, the lengths of their answers and their KV.

The families are few-shot prompts, questions on documents, conversations, rows of tables,
evaluations, groups of samples, agents and prompts that share nothing, with KV for the largest
request up to the whole job, answers that are short, long or of heavy tails, and none, half or all
of their lengths known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.costs.hardware import Parallelism, hardware
from sglang_batch.planner.costs.model_spec import ModelSpec
from sglang_batch.planner.costs.step_costs import step_costs
from sglang_batch.planner.machine_model import EngineLimits, Machine
from sglang_batch.planner.prefixes.prefix_tree import PrefixTree, build_prefix_tree
from sglang_batch.planner.requests import UNKNOWN, Int32s, PlanRequests
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

    @cached_property
    def tree(self) -> PrefixTree:
        """Of the prompts."""
        return build_prefix_tree(self.requests.tokens, self.requests.offsets)


def make_shapes(jobs: int, seed: int, sizes: tuple[int, int]) -> Iterator[Shape]:
    """Of all families in turn.

    sizes: the fewest and the most requests.
    """
    base = step_costs(
        ModelSpec.from_hf_config(MODELS["llama-3-8b"]),
        hardware("a100-sxm-80gb"),
        Parallelism(),
    )
    names = list(FAMILIES)
    for number in range(jobs):
        random = np.random.default_rng((seed, number))
        yield make_shape(names[number % len(names)], random, base, sizes)


def make_shape(
    name: str, random: Generator, base: CostModel, sizes: tuple[int, int]
) -> Shape:
    n = between(random, *sizes)
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
