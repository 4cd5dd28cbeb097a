"""How much `auto` loses to the best single order, over jobs as people have them.

    python benchmark/bench_auto.py                     400 jobs, one law each
    python benchmark/bench_auto.py --jobs 40 --seed 7  fewer, others
    python benchmark/bench_auto.py --show 10           and the worst ten
    python benchmark/bench_auto.py --largest 600 --redraws 16   beside the best guess
    python benchmark/bench_auto.py --engine            12 small shapes on SGLang itself

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
from collections.abc import Sequence
from typing import Any

import numpy as np
from auto_parts.shapes import make_shapes
from auto_parts.simulated import best_guess, measure
from report import Figure, add_save, finish, print_figures, print_table
from tqdm import tqdm


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
    parser.add_argument(
        "--engine", type=int, nargs="?", const=12, default=0, metavar="SHAPES",
        help="run small shapes on SGLang instead; 12 by default",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="of --engine, each run once"
    )
    add_save(parser)
    options = parser.parse_args()
    if options.engine:
        from auto_parts import engine

        figures = engine.measure(options.engine, options.seed, quick=options.quick)
    else:
        figures = simulated_jobs(options)
    print_figures("auto", figures)
    finish({"figures": [figure.as_json for figure in figures]}, options.save)


def simulated_jobs(options: argparse.Namespace) -> list[Figure]:
    rows, taken, guesses = [], [], []
    shapes = make_shapes(options.jobs, options.seed, (30, options.largest))
    for number, shape in enumerate(tqdm(shapes, total=options.jobs, disable=None)):
        runs, auto, chosen, plan_s = measure(shape)
        name = min(runs, key=lambda each: runs[each])
        rows.append((auto / runs[name], number, shape, chosen, name, runs, auto))
        taken.append(plan_s)
        if options.redraws:
            guess = best_guess(shape, runs, (options.seed, number), options.redraws)
            guesses.append((runs[guess] / runs[name], shape.known == "half"))
    print_worst(rows, options.show)
    over_best = np.array([row[0] for row in rows])
    half = np.array([row[0] for row in rows if row[2].known == "half"])
    over = {
        name: np.array([row[6] / row[5][name] for row in rows])
        for name in ("dfs", "dfs-weight", "fcfs")
    }
    return [
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


def guess_figures(guesses: Sequence[tuple[float, bool]]) -> list[Figure]:
    """Of each job the best guess over the best order, and whether half of its lengths are
    known."""
    if not guesses:
        return []
    over, half = np.array(guesses).T
    return [
        Figure(f"the best guess over the best order, {name}", float(value))
        for name, value in (
            ("mean", over.mean()),
            ("95 of 100 jobs at most", np.quantile(over, 0.95)),
            ("worst", over.max()),
            ("worst with half of the lengths known", over[half > 0].max(initial=1)),
        )
    ]


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


if __name__ == "__main__":
    main()
