"""KV reserved for an answer: its mean length, or a quantile of the lengths, simulated.

    python benchmark/bench_reserve.py

Jobs of equal prompts whose answers differ only by chance. Admission takes each reserve as
the estimate of every answer, and is otherwise unchanged. An offload costs
nothing in the simulator: one may cost the time saved by each offload more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from report import finish, paths_given, print_table

from sglang_batch.planner.costs.cost_model import CostModel
from sglang_batch.planner.machine_model import EngineLimits
from sglang_batch.planner.ordering.order import Order
from sglang_batch.planner.prefixes.prefix_tree import build_prefix_tree
from sglang_batch.planner.simulator.simulator import Simulation, simulate

NUM_REQUESTS, INPUT_LEN, MEAN, MOST = 2000, 100, 200, 2048
KV_TOKENS = 8000
QUANTILES = (0.5, 0.8, 0.9, 0.95)


def shapes() -> dict[str, NDArray[np.int32]]:
    """Lengths of answers by shape, in tokens."""
    rng = np.random.default_rng(0)
    chance = rng.random(NUM_REQUESTS)
    lengths = {
        "constant": np.full(NUM_REQUESTS, MEAN),
        "exponential": rng.exponential(MEAN, NUM_REQUESTS),
        "20 or 380": np.where(chance < 0.5, 20, 380),
        "105, of one in ten 1050": np.where(chance < 0.9, 105, 1050),
    }
    return {
        name: np.clip(values, 1, MOST).astype(np.int32)
        for name, values in lengths.items()
    }


def run(lengths: NDArray[np.int32], reserve: float) -> Simulation:
    tokens = np.random.default_rng(1).integers(0, 2**30, NUM_REQUESTS * INPUT_LEN)
    ends = np.arange(NUM_REQUESTS + 1, dtype=np.int64) * INPUT_LEN
    return simulate(
        build_prefix_tree(tokens.astype(np.int32), ends),
        CostModel(
            token_time_s=2e-5,
            kv_read_time_s=4e-8,
            weight_read_time_s=5e-3,
            interference_exponent=1.0,
        ),
        EngineLimits(KV_TOKENS, as_sglang=True),
        order=Order(np.arange(NUM_REQUESTS)),
        output_len=lengths,
        est_output_len=np.full(NUM_REQUESTS, reserve),
        max_new_tokens=np.full(NUM_REQUESTS, MOST, np.int32),
    )


def main() -> None:
    paths_given(__doc__)
    rows = []
    for shape, lengths in shapes().items():
        reserves = {"mean": float(lengths.mean())}
        reserves |= {f"{q:.0%}": float(np.quantile(lengths, q)) for q in QUANTILES}
        for name, reserve in reserves.items():
            done = run(lengths, reserve)
            rows.append(
                {
                    "lengths": shape,
                    "reserve": name,
                    "seconds": round(done.seconds, 1),
                    "steps": done.num_steps,
                    "offloads": done.retractions,
                    "recomputed": done.recomputed_tokens,
                    "kv": round(done.mean_kv_share, 2),
                }
            )
    print_table(
        "Reserve of an answer", list(rows[0]), [list(row.values()) for row in rows]
    )
    finish({"rows": rows}, None)


if __name__ == "__main__":
    main()
