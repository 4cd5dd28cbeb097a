"""The share of the prompts that caches can save on several engines, against one engine.

Every engine computes each prefix of its lines once and keeps it. So the share follows from who
has which lines: ``partition``, or blocks of 16 lines in the order of the file, dealt to the
engines in turn, as Ray Data does. The optimum is that of one engine that has them all.

The files are that of ``demo.py``, with one token for each byte, and questions about documents,
six of each, among other prompts.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np
from demo import DATA
from planner_stages import A100
from report import Figure, print_table

from sglang_batch.planner.costs.tree_work import leaf_work
from sglang_batch.planner.prefixes.prefix_tree import PrefixTree, build_prefix_tree
from sglang_batch.planner.requests import Floats, Int32s, Int64s
from sglang_batch.planner.sharding.partition import partition, shared_within_shards
from sglang_batch.prediction.workloads.mix import assemble, seeds_of
from sglang_batch.prediction.workloads.sources import Source, draw_sample
from sglang_batch.run.demo_model import SPECIAL_IDS

ENGINES = (2, 4, 8, 16)
LINES_PER_ENGINE = 100
BLOCK = 16
# Least share of the optimum, by engines, where each has so many lines.
LEAST = {2: 0.99, 16: 0.98}
DOCUMENTS = Source("documents", 500, 0.5, 60, 7_200, 0.75, 256, 1 << 30, 6, 0.5)
OTHERS = Source("others", 200, 0.8, 60, 7_200, 0.0, 256)


class _File(NamedTuple):
    """Lines in the order of the file. output_len: float64, estimated tokens of answers."""

    tokens: Int32s
    offsets: Int64s
    output_len: Floats


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part. It is small and has nothing to leave out."""
    figures: list[Figure] = []
    rows: list[tuple[object, ...]] = []
    lines = LINES_PER_ENGINE * max(ENGINES)
    for name, file in (("demo", _demo()), ("documents", _documents(lines))):
        tree = build_prefix_tree(file.tokens, file.offsets)
        optimum = tree.prefix_sharing_ratio
        for engines in ENGINES:
            cut, slowest = _partition(tree, file, engines)
            ours = _cached_share(tree, cut, engines)
            blocks = (np.arange(tree.num_requests) // BLOCK % engines).astype(np.int32)
            in_turn = _cached_share(tree, blocks, engines)
            rows.append(
                (name, tree.num_requests, engines,
                 *(round(100 * each, 2) for each in (optimum, ours, in_turn)),
                 round(slowest, 3))
            )  # fmt: skip
            least = LEAST.get(engines)
            if tree.num_requests < LINES_PER_ENGINE * engines:
                least = None
            figures.append(
                Figure(
                    f"{name}, {engines} engines: of the optimum", ours / optimum, "",
                    None if least is None else (">=", least),
                    f"in blocks {in_turn / optimum:.3g}",
                )
            )  # fmt: skip
    print_table(
        "Cached share of the prompt tokens, %",
        ("file", "lines", "engines", "optimum", "partition", "blocks in turn",
         "slowest/mean"),
        rows,
    )  # fmt: skip
    return figures


def _demo() -> _File:
    prompts, limits = [], []
    for line in DATA.read_bytes().splitlines():
        body = json.loads(line)["body"]
        tokens = [SPECIAL_IDS["<|bos|>"]]
        for message in body["messages"]:
            tokens.append(SPECIAL_IDS[f"<|{message['role']}|>"])
            tokens += message["content"].encode()
            tokens.append(SPECIAL_IDS["<|end|>"])
        prompts.append([*tokens, SPECIAL_IDS["<|assistant|>"]])
        limits.append(float(body["max_tokens"]))
    return _File(
        np.concatenate(prompts).astype(np.int32),
        np.cumsum([0, *map(len, prompts)], dtype=np.int64),
        np.array(limits),
    )


def _documents(lines: int) -> _File:
    counts = {DOCUMENTS: 3 * lines // 4, OTHERS: lines // 4}
    name = "+".join(f"{source.name}:{count}" for source, count in counts.items())
    seeds = seeds_of(0, name)
    rng = np.random.default_rng(seeds)
    samples = [draw_sample(source, count, rng) for source, count in counts.items()]
    job = assemble(samples, name, seeds, known=False)
    lengths = job.output_len.astype(np.float64)
    return _File(job.requests.tokens, job.requests.offsets, lengths)


def _partition(tree: PrefixTree, file: _File, engines: int) -> tuple[Int32s, float]:
    """The engine of each line, and the slowest engine's time over the mean."""
    work = leaf_work(tree, A100, file.output_len, file.output_len**2)
    cut = partition(tree, A100, work, engines)
    seconds = A100.step_time_s(cut.compute_s, cut.memory_s)
    return cut.shard, float(seconds.max() / seconds.mean())


def _cached_share(tree: PrefixTree, engine: Int32s, engines: int) -> float:
    """Of all prompt tokens, where ``engine``, int32 ``[n]``, has each line."""
    shared = shared_within_shards(tree.lcp, engine[tree.order], engines)
    return float(shared.sum(dtype=np.int64)) / tree.num_tokens
