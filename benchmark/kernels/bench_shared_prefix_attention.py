"""Decode attention that reads shared prefixes once, against other implementations.

    python benchmark/kernels/bench_shared_prefix_attention.py           all there is
    python benchmark/kernels/bench_shared_prefix_attention.py --quick   a few shapes
    python benchmark/kernels/bench_shared_prefix_attention.py --tune    tile sizes

Without a GPU it prints the figures that need only the host: bytes, floors and
plans of every shape, the correctness of the planner and of the kernels in Triton's
interpreter, and the host's time for a plan. With a GPU it then measures the device's
ceilings, checks every variant against float32, and times them in alternation, as replays of
CUDA graphs over KV copies that together exceed the L2 cache several times. The figures
per layer: median, spread, GB/s of unique KV bytes, share of the floor.

Every shape runs with the first page size, the families "performance" and "mixed" with
all of them. The last line is one JSON document. The exit status is 1 if a target is
missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The kernels' package and the benchmarks' report are found without an installation.
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import gpu_measurements  # noqa: E402
import host_figures  # noqa: E402
import torch  # noqa: E402
import tuning  # noqa: E402
from gpu_results import figures_of  # noqa: E402
from report import (  # noqa: E402
    Figure,
    add_save,
    finish,
    print_figures,
    save_as_they_come,
)
from shapes import FAMILIES, Shape, all_shapes, quick_shapes  # noqa: E402

ALL_PAGES = ("performance", "mixed")


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="only a few shapes")
    parser.add_argument(
        "--tune", action="store_true", help="search tile sizes on a GPU"
    )
    parser.add_argument(
        "--family",
        nargs="+",
        choices=FAMILIES,
        default=FAMILIES,
        help="families of shapes (default: all)",
    )
    parser.add_argument(
        "--pages", type=int, nargs="+", default=(16, 1),
        help="page sizes in tokens (default: 16 1)",
    )  # fmt: skip
    parser.add_argument(
        "--heads",
        type=int,
        nargs=2,
        default=(32, 8),
        help="query and KV heads (default: 32 8)",
    )
    parser.add_argument("--head-dim", type=int, default=128, help="default: 128")
    parser.add_argument(
        "--rounds", type=int, default=60, help="replays per variant (default: 60)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=60,
        help="start nothing new on the GPU after this time (default: 60)",
    )
    parser.add_argument(
        "--no-gpu", action="store_true", help="only the figures of the host"
    )
    parser.add_argument(
        "--only-gpu", action="store_true", help="without the figures of the host"
    )
    parser.add_argument(
        "--without", nargs="*", default=[], metavar="VARIANT", help="not these variants"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only plan the shapes and print them"
    )
    add_save(parser)
    parser.add_argument("--interpreted", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.no_gpu and options.only_gpu:
        parser.error("--no-gpu and --only-gpu leave nothing to measure.")
    if options.rounds < 50 and not options.quick:
        parser.error(f"--rounds is {options.rounds}; a median needs 50 or more.")
    return options


def workloads(options: argparse.Namespace) -> list[tuple[Shape, int]]:
    """Shapes and page sizes to run."""
    first, *more = options.pages
    shapes = quick_shapes() if options.quick else all_shapes()
    chosen = [(s, first) for s in shapes if s.family in options.family]
    if options.quick:
        return chosen
    repeated = [s for s, _ in chosen if s.family in ALL_PAGES]
    return chosen + [(shape, page) for page in more for shape in repeated]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    if options.interpreted:
        print(json.dumps(host_figures.interpreted_errors()))
        return 0
    heads, head_dim = tuple(options.heads), options.head_dim
    has_gpu = torch.cuda.is_available() and not options.no_gpu
    chosen = workloads(options)
    if options.dry_run and options.tune:
        print(f"tiles for pages of {options.pages[0]}, by {', '.join(tuning.SHAPES)}")
        return 0
    if options.dry_run:
        for shape, page in chosen:
            pairs = zip(shape.counts, shape.tokens, strict=True)
            unique = sum(count * tokens for count, tokens in pairs)
            print(f"{shape.family}, page {page}: {shape.name}, {unique:,} tokens of KV")
        return 0
    if options.tune:
        save_as_they_come(options.save, tuning.RESULTS)
        status = tuning.main(
            heads, head_dim, options.pages[0], has_gpu, options.minutes
        )
        finish(tuning.RESULTS, options.save)
        return status
    if options.only_gpu and not has_gpu:
        print("--only-gpu measures on a GPU, and there is none.")
        return 1
    results = {"heads": heads, "head_dim": head_dim, "dtype": "bfloat16"}
    results |= {"torch": torch.__version__, "triton": gpu_measurements.triton_version()}
    save_as_they_come(options.save, results)
    figures: list[Figure] = []
    if not options.only_gpu:
        computed = [
            host_figures.Computed.of(s, page, heads, head_dim) for s, page in chosen
        ]
        host_figures.print_computed(computed)
        figures += host_figures.correctness(
            list(dict.fromkeys(shape for shape, _ in chosen)), Path(__file__)
        )
        times = 300 if options.quick else 3000
        figures += host_figures.host_times(heads, head_dim, times)
        print_figures("Without a GPU", figures)
        results |= {"computed": [asdict(each) for each in computed]}
    if has_gpu:
        measured = gpu_measurements.measure(
            chosen, heads, head_dim, options.rounds, options.minutes, options.without
        )
        gpu_figures = figures_of(measured)
        print_figures("On the GPU", gpu_figures)
        figures += gpu_figures
        results |= measured.as_json
    else:
        print("\nNo GPU is used: nothing was timed on one.")
    results["figures"] = [figure.as_json for figure in figures]
    finish(results, options.save)
    return 1 if any(figure.met is False for figure in figures) else 0


if __name__ == "__main__":
    raise SystemExit(main())
