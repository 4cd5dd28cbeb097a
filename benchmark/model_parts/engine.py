"""Several jobs on one engine, in a process of its own.

python -m model_parts.engine JOBS ANSWERS [SGLang's arguments]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from throughput_engine import answer_all, num_steps
from throughput_jobs import ThroughputJob


@dataclass(frozen=True, slots=True)
class JobResult:
    """Answers in the order of the prompts, and their counts.

    cached_tokens: prompt tokens found in the cache when a request first joined.
    retractions: requests whose prompt was computed again.
    verified: drafts that were verified. 0 without speculation.
    steps: of the engine. 0 for stock SGLang.
    """

    output_ids: list[list[int]]
    cached_tokens: int
    retractions: int
    verified: int
    steps: int


def run_jobs(
    jobs: list[ThroughputJob], model: Path, *, ours: bool, arguments: list[str]
) -> list[JobResult]:
    """Run jobs one after another, each with an empty cache.

    Raises:
        SystemExit: the engine has failed. Has the end of its output.
    """
    with TemporaryDirectory() as folder:
        given, found = Path(folder, "jobs.json"), Path(folder, "answers.json")
        rows = [[job.prompts, job.sampling_params] for job in jobs]
        given.write_text(json.dumps({"ours": ours, "jobs": rows}))
        command = [sys.executable, "-m", "model_parts.engine", str(given), str(found)]
        done = subprocess.run(
            [*command, f"--model-path={model}", "--dtype=float32", *arguments],
            cwd=Path(__file__).parents[1],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                # As the weights. SGLang keeps the last inputs of convolutions in bfloat16.
                "SGLANG_MAMBA_CONV_DTYPE": "float32",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if not found.exists():
            raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
        return [JobResult(**each) for each in json.loads(found.read_text())]


def _result(answers: list[dict[str, Any]], steps: int = 0) -> dict[str, Any]:
    infos = [answer["meta_info"] for answer in answers]
    return {
        "output_ids": [list(map(int, answer["output_ids"])) for answer in answers],
        "cached_tokens": sum(info["cached_tokens"] for info in infos),
        "retractions": sum(info.get("num_retractions") or 0 for info in infos),
        "verified": sum(info.get("spec_verify_ct") or 0 for info in infos),
        "steps": steps,
    }


def _with_plans(jobs: list[Any], arguments: list[str]) -> list[Any]:
    from sglang_batch.config import OfflineBatchConfig
    from sglang_batch.srt.engine import in_process

    results: list[Any] = []
    if not any(each.startswith("--offline-batch-config") for each in arguments):
        # Steps are counted, which must not depend on how long they take here.
        arguments = [*arguments, '--offline-batch-config={"learn_costs": false}']
    with in_process.engine(in_process.parse_server_args(arguments)) as (engine, loop):
        loop.run_until_complete(engine.connect())
        manager: Any = engine.manager
        for prompts, params in jobs:
            config = OfflineBatchConfig(policy="dfs")
            answers = answer_all(engine, config, prompts, params)
            done = loop.run_until_complete(answers)
            before = sum(each["steps"] for each in results)
            results.append(_result(done, num_steps(loop, engine) - before))
            loop.run_until_complete(manager.flush_cache())
    return results


def _stock(jobs: list[Any], arguments: list[str]) -> list[Any]:
    import sglang
    from sglang.srt.plugins import load_plugins

    load_plugins()  # a plugin makes SGLang run on a CPU
    from sglang.srt.server_args import prepare_server_args

    engine = sglang.Engine(
        server_args=prepare_server_args([*arguments, "--schedule-policy=lpm"])
    )
    results = []
    for prompts, params in jobs:
        answers = engine.generate(input_ids=prompts, sampling_params=params)
        results.append(_result(answers))
        engine.flush_cache()
    engine.shutdown()
    return results


def main() -> None:
    given, found, *arguments = sys.argv[1:]
    task = json.loads(Path(given).read_text())
    run = _with_plans if task["ours"] else _stock
    results = run(task["jobs"], [*arguments, "--log-level=error"])
    Path(found).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
