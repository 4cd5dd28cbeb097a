"""Host pool and running tree: offloaded KV against its bound, tokens recomputed, copies.

A batch decodes with all KV in use, and bursts of online requests take KV from it: the
newest lines are offloaded. Engines differ in the size of the host pool: the default, a
small one, and none. The running tree is asked for in a job of 100,000 requests.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from report import Figure, print_table

from doors.own_process import last_line_of

TOKEN_BYTES = 512  # of the demo model's KV in float32
KV_TOKENS, ROWS = 6000, 48
# Bytes of the pools: the default, a twentieth of the device's KV, and none.
POOLS: dict[str, int | None] = {
    "default": None,
    "small": KV_TOKENS // 20 * TOKEN_BYTES,
    "none": 0,
}
BURSTS, BURST, ONLINE_LEN = 6, 4, 900
TREE_MS = 5.0


def measure(quick: bool) -> list[Figure]:
    from sglang_batch.run.demo_model import write_demo_model

    figures = [tree_figure(2_000 if quick else 100_000)]
    pools = {"small": POOLS["small"]} if quick else POOLS
    with tempfile.TemporaryDirectory(prefix="sglang-batch-bench-") as scratch:
        model = Path(scratch) / "model"
        write_demo_model(model)
        found = {name: run_engine(model, size, quick) for name, size in pools.items()}
    answers = [each.pop("answers") for each in found.values()]
    if any(each != answers[0] for each in answers):
        raise RuntimeError("the answers depend on the size of the host pool")
    columns = ("offloaded", "resumed", "offload_loads", "offload_recomputed",
               "offloaded_host_bytes_most", "offload_bytes", "recomputed_tokens",
               "seconds")  # fmt: skip
    print_table(
        "Bursts of online requests beside a batch, by size of the host pool",
        ["pool", *columns],
        [[name, *(f"{one[c]:,.5g}" for c in columns)] for name, one in found.items()],
    )
    figures += pool_figures(found)
    return [replace(each, target=None) for each in figures] if quick else figures


def pool_figures(found: dict[str, dict[str, Any]]) -> list[Figure]:
    small = found["small"]
    figures = [
        Figure(
            "small pool: most bytes in use / its size",
            small["offloaded_host_bytes_most"] / small["offload_bytes"],
            "", ("<=", 1.0),
        ),
    ]  # fmt: skip
    for name, one in found.items():
        if one["resumed"]:
            figures.append(
                Figure(
                    f"{name} pool: copies per resumed request",
                    one["offload_loads"] / one["resumed"], "",
                    # The free pages of a full pool are in pieces.
                    ("<=", 1.1) if name == "default" else None,
                    f"{one['resumed']} resumed",
                )
            )  # fmt: skip
        others = found.get("none", one)
        figures.append(
            Figure(
                f"{name} pool: tokens recomputed",
                one["recomputed_tokens"],
                "",
                ("<=", 1.0 * others["recomputed_tokens"])
                if others is not one
                else None,
                f"{one['offload_recomputed']} requests lost their KV to a full pool",
            )
        )
    return figures


# The running tree -----------------------------------------------------------------------


def tree_figure(num_requests: int) -> Figure:
    """Milliseconds of the scheduler's processor time that the tree of a job takes."""
    from sglang_batch.planner.costs.cost_model import CostModel
    from sglang_batch.planner.machine_model import EngineLimits, Machine
    from sglang_batch.planner.prefixes.prefix_tree import build_prefix_tree
    from sglang_batch.scheduling.job_plan import unplanned
    from sglang_batch.scheduling.job_state import JobState
    from sglang_batch.scheduling.running_tree import running_tree

    rng = np.random.default_rng(0)
    # Documents in folders, and a question about each: three levels.
    document = rng.integers(0, 500, num_requests)
    prompts = np.empty((num_requests, 48), np.int32)
    prompts[:, :16], prompts[:, 16:32] = (document // 20)[:, None], document[:, None]
    prompts[:, 32:] = np.arange(num_requests)[:, None]
    tree = build_prefix_tree(
        prompts.ravel(), np.arange(num_requests + 1, dtype=np.int64) * 48
    )
    limits = EngineLimits(kv_capacity_tokens=100_000, step_tokens=1024, max_running=256)
    machine = Machine(CostModel(token_time_s=1e-5, kv_read_time_s=1e-8), limits)
    steps = rng.uniform(1, 200, num_requests).astype(np.float32)
    plan = replace(
        unplanned(machine),
        policy="dfs",
        number=tree.order.astype(np.int32),
        position=np.arange(num_requests, dtype=np.int32),
        node=tree.leaf_parent.astype(np.int32),
        input_len=tree.input_len,
        read_len=tree.input_len,
        est_decode_steps=steps,
        est_decode_steps_sq=steps**2,
        parent=tree.parent,
        depth=tree.depth,
        leaf_begin=tree.leaf_begin.astype(np.int32),
        leaf_end=tree.leaf_end.astype(np.int32),
    )
    job = JobState("job", plan, 1)
    took = []
    for _ in range(20):
        # Requests start and end between two questions.
        for leaf in rng.choice(np.flatnonzero(~job.uses.started), 50, False):
            job.uses.skip(int(leaf), int(plan.node[leaf]))
        begin = time.thread_time()
        json.dumps(running_tree([job], 50))
        took.append(1e3 * (time.thread_time() - begin))
    return Figure(
        f"running tree of {num_requests:,} requests", float(np.median(took)), "ms",
        ("<=", TREE_MS), f"median of 20; longest {max(took):.1f}",
    )  # fmt: skip


# Engines ----------------------------------------------------------------------------------


def run_engine(model: Path, pool_bytes: int | None, quick: bool) -> dict[str, Any]:
    """A batch and bursts of online requests on an engine in a process of its own.

    Raises:
        RuntimeError: it failed.
    """
    found: dict[str, Any] = last_line_of(
        __file__, str(model), json.dumps(pool_bytes), str(int(quick))
    )
    return found


async def _beside(engine: Any, quick: bool) -> list[Any]:
    rng = np.random.default_rng(3)
    shared = rng.integers(0, 256, 60).tolist()
    prompts = [
        shared * (i % 2) + rng.integers(0, 256, 20 + i % 50).tolist()
        for i in range(ROWS if quick else 5 * ROWS)
    ]
    lengths = [40 + 7 * i % 60 for i in range(len(prompts))]
    batch = asyncio.ensure_future(
        engine.async_generate(input_ids=prompts, sampling_params=_lengths(lengths))
    )
    online = []
    for _ in range(1 if quick else BURSTS):
        await asyncio.sleep(0.5)
        burst = rng.integers(0, 256, (BURST, ONLINE_LEN)).tolist()
        online += await asyncio.gather(
            *(
                engine.async_generate(input_ids=one, sampling_params=_lengths([9])[0])
                for one in burst
            )
        )
    return [*(await batch), *online]


def _lengths(lengths: list[int]) -> list[dict[str, Any]]:
    return [
        {"max_new_tokens": length, "temperature": 0, "ignore_eos": True}
        for length in lengths
    ]


def main() -> None:
    model, pool_bytes, quick = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] == "1"
    import sglang
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    arguments = [
        f"--model-path={model}", "--dtype=float32", "--offline-batch", "--log-level=error",
        f"--max-total-tokens={KV_TOKENS}", f"--max-running-requests={ROWS}",
        "--mem-fraction-static=0.3", "--sleep-on-idle",
        f"--offline-batch-config={json.dumps({'offload_bytes': pool_bytes})}",
    ]  # fmt: skip
    engine = sglang.Engine(server_args=prepare_server_args(arguments))
    try:
        begin = time.perf_counter()
        answers = engine.loop.run_until_complete(_beside(engine, quick))
        seconds = time.perf_counter() - begin
        state = engine.get_server_info()["internal_states"][0]["offline_batch"]
    finally:
        engine.shutdown()
    prompt_tokens = sum(answer["meta_info"]["prompt_tokens"] for answer in answers)
    found = {
        **{k: v for k, v in state.items() if "offload" in k or k == "resumed"},
        "recomputed_tokens": state["prefill_tokens"] + state["cached_tokens"]
        - prompt_tokens,
        "seconds": seconds,
        "answers": [answer["output_ids"] for answer in answers],
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
