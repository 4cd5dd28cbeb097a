"""Copies of offloaded KV between a GPU and the host pool, beside a stream that computes.

    python benchmark/kernels/bench_host_pool.py                    on a GPU
    python benchmark/kernels/bench_host_pool.py --device cpu       plain copies

Prints GB/s to the host and back, the share of a matrix product's time that copies beside
it add, and the same for SGLang's way: a pageable tensor for each layer, and two
synchronizations. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from report import Figure, add_save, finish, print_figures

PAGE = 16


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--layers", type=int, default=32, help="default: 32")
    parser.add_argument("--tokens", type=int, default=512, help="of a request")
    parser.add_argument("--rounds", type=int, default=20, help="default: 20")
    parser.add_argument("--dry-run", action="store_true", help="only check the options")
    add_save(parser)
    options = parser.parse_args(argv)
    if options.dry_run:
        print(f"{options.layers} layers, a request of {options.tokens} tokens")
        return
    from sglang_batch.srt.scheduler.kv.host_pool import HostPool  # brings SGLang

    device, tokens = torch.device(options.device), options.tokens // PAGE * PAGE
    kv = [
        torch.randn(4 * tokens, 8, 128, dtype=torch.bfloat16, device=device)
        for _ in range(2 * options.layers)
    ]
    slots = torch.randperm(4 * tokens, device=device)[:tokens]
    pool, runs = HostPool(kv, tokens // PAGE, PAGE), [(0, tokens // PAGE)]
    size = tokens * pool.token_bytes

    def save() -> None:
        pool.save(slots, runs)
        pool.end_step()

    def load() -> None:
        pool.load(slots, runs, 0)
        pool.end_step()

    def stock() -> None:
        _wait(device)
        copies = [each[slots].to("cpu", non_blocking=True) for each in kv]
        _wait(device)
        for each, copy in zip(kv, copies, strict=True):
            each[slots] = copy.to(device, non_blocking=True)
        _wait(device)

    before = [each[slots].clone() for each in kv]
    save()
    for each in kv:
        each[slots] = 0
    load()
    _wait(device)
    if not all(torch.equal(each[slots], b) for each, b in zip(kv, before, strict=True)):
        raise RuntimeError("the KV that came back is another")
    weights = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)

    def compute() -> None:
        for _ in range(8 if device.type != "cpu" else 1):
            weights @ weights

    alone = _seconds(compute, device, options.rounds)
    figures = [
        Figure(
            "to the host", size / 1e9 / _seconds(save, device, options.rounds), "GB/s"
        ),
        Figure("back", size / 1e9 / _seconds(load, device, options.rounds), "GB/s"),
        Figure(
            "SGLang, both ways",
            2 * size / 1e9 / _seconds(stock, device, options.rounds),
            "GB/s",
        ),
    ]
    for name, copy in (("to the host", save), ("back", load)):

        def both(copy: Callable[[], None] = copy) -> None:
            copy()
            compute()

        more = _seconds(both, device, options.rounds) / alone - 1
        figures.append(Figure(f"{name}: computing takes longer by", more))
    print_figures(f"{size / 1e6:.1f} MB of KV of a request, {device}", figures)
    finish({"figures": [figure.as_json for figure in figures]}, options.save)


def _wait(device: torch.device) -> None:
    torch.get_device_module(device).synchronize()


def _seconds(work: Callable[[], None], device: torch.device, rounds: int) -> float:
    """Mean seconds of a round, without the first."""
    work()
    _wait(device)
    begin = time.perf_counter()
    for _ in range(rounds):
        work()
    _wait(device)
    return (time.perf_counter() - begin) / rounds


if __name__ == "__main__":
    main()
