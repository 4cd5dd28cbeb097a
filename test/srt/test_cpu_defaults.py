"""An engine on a CPU takes memory that a laptop has, and a dtype that the processor multiplies."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch

from sglang_batch.dense.model import ModelOptions, is_multiplied, load_model
from sglang_batch.srt.engine.cpu_defaults import (
    ENVIRONMENT,
    KV_BYTES,
    default_limits,
)

CHOSEN = """if True:
    import json, sys
    from sglang.srt.configs.model_config import ModelConfig
    from sglang_batch.srt.engine import cpu_defaults
    from sglang_batch.srt.engine.in_process import parse_server_args

    multiplied, *cases = json.loads(sys.argv[1])
    cpu_defaults.is_multiplied = lambda dtype: str(dtype).removeprefix("torch.") in multiplied
    for path, options in cases:
        args = parse_server_args(["--model-path", path, "--device", "cpu", *options])
        print(str(ModelConfig.from_server_args(args).dtype).removeprefix("torch."))
"""


@pytest.mark.parametrize(
    ("bytes_per_token", "context", "gib", "limits"),
    [
        (512, 2048, 16, {"max_total_tokens": 256 * 2048}),  # 256 of full length
        (131_072, 8192, 16, {"max_total_tokens": 8192}),
        (
            131_072, 131_072, 63,
            {"max_total_tokens": 8192, "max_running_requests": 256},
        ),
        (  # one request of full length, in a quarter of the memory
            131_072, 131_072, 64,
            {"max_total_tokens": 131_072, "max_running_requests": 256},
        ),
        (1 << 20, 4096, 1, {"max_total_tokens": 4096}),  # the least
    ],
)  # fmt: skip
def test_a_cpu_gets_memory_that_a_laptop_holds(
    bytes_per_token: int, context: int, gib: int, limits: dict[str, int]
) -> None:
    found = default_limits(bytes_per_token, context, gib << 30)
    assert found == limits
    most = max(4 * KV_BYTES, (gib << 30) // 4)
    assert found["max_total_tokens"] * bytes_per_token <= most


def checkpoint(demo_model: Path, folder: Path, dtype: str) -> str:
    """The demo model as if it had been trained in a dtype."""
    path = folder / dtype
    path.mkdir()
    for file in demo_model.iterdir():
        (path / file.name).symlink_to(file)
    config = json.loads((path / "config.json").read_text())
    config.pop("torch_dtype", None)
    (path / "config.json").unlink()
    (path / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    return str(path)


CHOOSES = """if True:
    import os
    from sglang_batch.srt.engine import cpu_defaults
    from sglang_batch.srt.engine.in_process import parse_server_args, resolve
    from sglang_batch.srt.plugin import defaults

    for name in cpu_defaults.ENVIRONMENT:
        os.environ.pop(name, None)
    for policy in ("ACTIVE", "passive"):
        os.environ["OMP_WAIT_POLICY"] = policy
        made = parse_server_args(["--model-path", "{model}", "--device", "cpu"])
        resolve(made, print)
        print(*(os.environ.get(name) for name in cpu_defaults.ENVIRONMENT))
        defaults.undo(None, None)
        print(*(os.environ.get(name) for name in cpu_defaults.ENVIRONMENT))
"""


def test_its_processes_keep_freed_memory_unless_the_user_chose(
    demo_model: Path,
) -> None:
    command = [sys.executable, "-c", CHOOSES.replace("{model}", str(demo_model))]
    done = preloaded.run(command)
    active, after, passive, _ = done.stdout.splitlines()
    kept = [str(1 << 30), str(32 << 20), "glibc.malloc.hugetlb=1"]
    assert active.split() == ["ACTIVE", "None", *kept], done.stderr
    assert passive.split() == ["passive", "3000", *kept]
    assert after.split() == ["ACTIVE", *["None"] * 4], "the next engine may be SGLang's"


UNDONE = """if True:
    import os
    from sglang_batch.srt.engine.in_process import parse_server_args, resolve
    from sglang_batch.srt.plugin import defaults

    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:9"
    os.environ["OTEL_EXPORTER_OTLP_PROTOCOL"] = "http/protobuf"
    before = dict(os.environ)
    flags = ["--enable-strict-thinking", "--reasoning-parser=qwen3", "--device=cpu"]
    resolve(parse_server_args(["--model-path={model}", *flags]), print)
    print("set", *sorted(os.environ.keys() - before.keys()))
    defaults.undo(None, None)
    after = dict(os.environ)
    print("left", *(name for name in after if after[name] != before.get(name)))
"""


def test_the_next_engine_of_a_process_has_the_users_environment(
    demo_model: Path,
) -> None:
    command = [sys.executable, "-c", UNDONE.replace("{model}", str(demo_model))]
    done = preloaded.run(command)
    *_, found, left = done.stdout.splitlines()
    ours = {
        *ENVIRONMENT,
        "SGLANG_MAX_THINK_TOKENS",
        "SGLANG_TRACE_LEVEL",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    }
    assert ours <= {*found.split(), *os.environ}, done.stderr
    assert ours.isdisjoint(left.split()), "SGLang sets others itself"


@pytest.mark.parametrize(
    ("multiplied", "expected"),
    [
        (["float32"], ["float32"] * 3),
        (["float32", "bfloat16"], ["float32", "float32", "bfloat16"]),
        # A float32 checkpoint is rounded as SGLang rounds it.
        (["float32", "bfloat16", "float16"], ["float16", "float16", "bfloat16"]),
    ],
)
def test_a_dtype_that_the_processor_would_emulate_is_float32(
    demo_model: Path, tmp_path: Path, multiplied: list[str], expected: list[str]
) -> None:
    cases: list[Any] = [
        (checkpoint(demo_model, tmp_path, dtype), [])
        for dtype in ("float32", "float16", "bfloat16")
    ]
    named = "float16", "bfloat16"
    cases += [(cases[0][0], ["--dtype", dtype]) for dtype in named]
    argument = json.dumps([multiplied, *cases])
    done = preloaded.run([sys.executable, "-c", CHOSEN, argument])
    assert done.stdout.split() == [*expected, *named], done.stderr[-3000:]


def test_so_it_is_in_the_dense_engine(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(demo_model, tmp_path, "bfloat16")

    def dtype_of(**options: str) -> torch.dtype:
        return load_model(ModelOptions(path, device="cpu", **options)).model.dtype  # type: ignore[arg-type]

    def emulated(dtype: torch.dtype) -> bool:
        return dtype == torch.float32

    own = torch.bfloat16 if is_multiplied(torch.bfloat16) else torch.float32
    assert dtype_of() == own
    monkeypatch.setattr("sglang_batch.dense.model.is_multiplied", emulated)
    assert dtype_of() == torch.float32
    assert dtype_of(dtype="bfloat16") == torch.bfloat16


def test_a_profile_records_the_processor() -> None:
    """SGLang asks when ``/start_profile`` has come; an error would end the scheduler."""
    from sglang_batch.srt.cpu.cpu_platform import TorchNativeCpuPlatform

    platform, activities = TorchNativeCpuPlatform(), torch.profiler.ProfilerActivity
    named = getattr(activities, platform.get_torch_profiler_activity_str())
    assert platform.get_torch_profiler_activity() == named == activities.CPU
