"""This package beside its peers on a CPU: a small real model, real text, one run.

    python benchmark/bench_peers.py --vllm-python PATH      all peers and jobs
    python benchmark/bench_peers.py --jobs demo --requests 48 --peers ours vllm "stock lpm"

The model is that of `sglang-batch demo-model --real`. Peers: SGLang with each of its policies,
the best of them with mixed chunks, vLLM, transformers in padded batches of similar lengths,
and this package on SGLang and on transformers. Each has a process of its own and as much KV,
takes the jobs one after another, each with a cache that was emptied before, and ends before the
next begins; that is repeated, so that all meet the same changes of the machine. Planning is part of our
time, starting and warming up of nobody's. Without this package SGLang starts on no processor
that lacks AMX, so stock SGLang has this package's platform: `--stock improved` with its
linear layers and attention, too, `plain` without.

cpu s: processor seconds of all processes of a peer, the measure on a machine that others use.
OpenMP's threads sleep while they wait, and freed memory is kept, for all peers as in ours.
cached: share of the prompt tokens that came from the cache. SGLang counts a retracted
    request's first prefill.
same: answers equal to those of transformers, which is exact in float32 alone, and which knows
    no schema: there they are compared with the first peer's.

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from peer_parts.jobs import JOBS, PeerJob, make
from report import RESULTS, Figure, finish, print_figures, print_table

PROCESS = Path(__file__).parent / "peer_parts" / "peer_process.py"
POLICIES = ("fcfs", "lpm", "dfs-weight", "hrrn", "shortest-prefill-first", "random")
NAMES = ("transformers", *(f"stock {p}" for p in POLICIES), "vllm", "dense", "ours")
# Ours over the peer's, with sharing and without.
TARGETS = {"vllm": (0.80, 1.05), "stock": (0.75, 1.00)}


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine with its arguments, which a process gets as JSON.

    kind: ``stock``, ``ours``, ``dense``, ``vllm`` or ``transformers``.
    policy: of stock SGLang.
    improved: whether stock SGLang has our layers.
    eager: whether vLLM runs its model without compiling it.
    """

    kind: str
    model: str
    dtype: str
    kv_tokens: int
    policy: str = ""
    mixed: bool = False
    improved: bool = True
    eager: bool = False

    @property
    def name(self) -> str:
        parts = [self.kind, self.policy, "mixed" * self.mixed]
        return " ".join(filter(None, [*parts, "plain" * (not self.improved)]))


@dataclass(frozen=True, slots=True)
class Run:
    """A job on a peer."""

    seconds: float
    cpu_s: float
    cached_tokens: int
    answers: list[list[int]]


Runs = dict[str, list[Run]]


def run_jobs(peer: Peer, jobs: Sequence[PeerJob], options: Any) -> Iterator[Run]:
    """All jobs on a peer that is started for them.

    Raises:
        RuntimeError: its process failed. The message has the end of its output.
    """
    python = options.vllm_python if peer.kind == "vllm" else sys.executable
    with (
        TemporaryDirectory(prefix="sglang-batch-bench-") as scratch,
        (Path(scratch) / "log").open("w+b") as log,
        started([str(python), str(PROCESS), json.dumps(asdict(peer))], log, options.threads)
        as process,
    ):  # fmt: skip
        for message in ["", *(job.message for job in jobs)]:
            if message:
                process.stdin.write(message + "\n")
                process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                log.seek(0)
                said = log.read()[-4000:].decode(errors="replace")
                raise RuntimeError(f"{peer.name} failed.\n{said}")
            if message:
                yield Run(**json.loads(line))


@contextmanager
def started(command: list[str], log: Any, threads: int) -> Iterator[Any]:
    environment = {
        **os.environ, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000",
        "OMP_NUM_THREADS": str(threads),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        env=environment,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.communicate()  # the end of its input ends it


def measure(
    peers: Sequence[Peer], jobs: Sequence[PeerJob], options: Any
) -> dict[str, Runs]:
    """By job and peer, a run of each round."""
    runs: dict[str, Runs] = {job.name: {} for job in jobs}
    for number in range(options.repeats):
        for peer in peers:
            # transformers has no grammars.
            able = [j for j in jobs if peer.kind != "transformers" or j.schema is None]
            for job, done in zip(able, run_jobs(peer, able, options), strict=True):
                runs[job.name].setdefault(peer.name, []).append(done)
                print(
                    f"{number + 1}: {job.name}, {peer.name}: {done.seconds:.1f} s,"
                    f" {done.cpu_s:.1f} processor seconds",
                    file=sys.stderr,
                )
    return runs


def with_best_mixed(runs: dict[str, Runs], peers: Sequence[Peer]) -> list[Peer]:
    """Stock's best policy, over all jobs, with mixed chunks."""
    stock = [peer for peer in peers if peer.kind == "stock" and peer.improved]
    if not stock:
        return []
    best = min(stock, key=lambda p: sum(_cpu_s(of[p.name]) for of in runs.values()))
    return [Peer(**{**asdict(best), "mixed": True})]


def _cpu_s(runs: Sequence[Run]) -> float:
    return median(run.cpu_s for run in runs)


# Tables -------------------------------------------------------------------------------


def print_job(job: PeerJob, runs: Runs, tokenizer: Any) -> list[Figure]:
    """A job's table, and ours over its peers' processor seconds."""
    total = sum(map(len, job.prompts))
    texts = {
        name: tokenizer.batch_decode(done[0].answers, skip_special_tokens=True)
        for name, done in runs.items()
    }
    reference = texts.get("transformers") or next(iter(texts.values()))
    rows = []
    for name, done in runs.items():
        same = sum(a == b for a, b in zip(texts[name], reference, strict=True))
        seconds = median(run.seconds for run in done)
        cached = done[0].cached_tokens / total
        rows.append(
            [name, f"{seconds:.1f}", f"{_cpu_s(done):.1f}", f"{cached:.1%}", f"{same}"]
        )
    print_table(
        f"{job.name}: {len(job.prompts)} requests, {total:,} prompt tokens",
        ["peer", "seconds", "cpu s", "cached", "same"],
        rows,
    )
    return [
        figure
        for way in ("ours", "dense")
        if way in runs
        for figure in _ratios(job, way, runs)
    ]


def _ratios(job: PeerJob, way: str, runs: Runs) -> Iterator[Figure]:
    ours = _cpu_s(runs[way])
    for kind, bounds in TARGETS.items():
        found = {
            name: _cpu_s(done) for name, done in runs.items() if name.startswith(kind)
        }
        found = {name: cpu_s for name, cpu_s in found.items() if "plain" not in name}
        if not found:
            continue
        best = min(found, key=lambda name: found[name])
        yield Figure(
            f"{job.name}: {way} over {best}",
            ours / found[best],
            target=("<=", bounds[0 if job.shares else 1]) if way == "ours" else None,
            note="processor seconds",
        )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", type=Path, help="made by demo-model --real by default"
    )
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--peers", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--requests", type=int, help="most of a job")
    parser.add_argument("--vllm-python", type=Path, help="without it, no vLLM")
    parser.add_argument("--vllm-eager", action="store_true", help="do not compile it")
    parser.add_argument("--stock", choices=("improved", "both"), default="both")
    parser.add_argument("--no-mixed", action="store_true", help="no mixed chunks")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1, help="of OpenMP")
    parser.add_argument("--kv-tokens", type=int, default=12_032)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="random model, four requests, two peers"
    )
    default = RESULTS / "peers.json"
    parser.add_argument("--save", type=Path, nargs="?", const=default, metavar="FILE")
    options = parser.parse_args()
    if options.quick:
        options.peers, options.jobs = ["transformers", "ours"], ["demo", "no sharing"]
        options.requests, options.repeats = 4, 1
    return options


def peers_of(options: argparse.Namespace, model: Path) -> list[Peer]:
    peers = []
    for name in options.peers:
        kind, _, policy = name.partition(" ")
        if kind == "vllm" and options.vllm_python is None:
            continue
        common = (kind, str(model), options.dtype, options.kv_tokens, policy)
        peers.append(Peer(*common, eager=options.vllm_eager))
        if kind == "stock" and options.stock == "both":
            peers.append(Peer(*common, improved=False))
    return peers


def run(options: argparse.Namespace, model: Path) -> int:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    jobs = [make(name, tokenizer, options.requests) for name in options.jobs]
    peers = peers_of(options, model)
    runs = measure(peers, jobs, options)
    if not options.no_mixed and (mixed := with_best_mixed(runs, peers)):
        for name, found in measure(mixed, jobs, options).items():
            runs[name] |= found
    figures = [
        figure for job in jobs for figure in print_job(job, runs[job.name], tokenizer)
    ]
    print_figures("Ours over peers", figures)
    missed = [figure.name for figure in figures if figure.met is False]
    document = {"figures": [figure.as_json for figure in figures], "missed": missed}
    finish(
        {**document, "threads": options.threads, "dtype": options.dtype}, options.save
    )
    return 1 if missed else 0


def main() -> int:
    options = _parse()
    with TemporaryDirectory(prefix="sglang-batch-bench-") as scratch:
        model = options.model or Path(scratch) / "model"
        if options.model is None:
            command = [sys.executable, "-m", "sglang_batch", "demo-model", str(model)]
            subprocess.run([*command, *["--real"] * (not options.quick)], check=True)
        return run(options, model)


if __name__ == "__main__":
    sys.exit(main())
