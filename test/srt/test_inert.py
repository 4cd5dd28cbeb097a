"""Without ``--offline-batch``, SGLang behaves as without this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import preloaded
import pytest
from prompts import MAX_TOKENS, Case
from servers import server

# SGLang needs a platform where there is no accelerator; this one stands in for ours
# in the environment that lacks our package.
PLATFORM_MODULE = """
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

class Platform(CpuDeviceMixin, SRTPlatform):
    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"
    def get_device(self, device_id=0): return "cpu"
    def get_default_attention_backend(self): return "torch_native"
    def is_pin_memory_available(self, device=None): return False
"""
ENTRY_MODULE = "def activate(): return 'stand_in_platform.Platform'\n"

REPORT = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
import sglang.srt.entrypoints.http_server as http_server
import sglang.srt.managers.scheduler as scheduler
from sglang.srt.arg_groups.resolution_hooks import _HOOKS
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import prepare_server_args
args = prepare_server_args(["--model-path", sys.argv[1]])
print(json.dumps({
    "args": type(args).__module__ + "." + type(args).__qualname__,
    "scheduler": scheduler.Scheduler.__module__,
    "engine_args": type(Engine.server_args_class(model_path="m")).__module__,
    "routes": sorted(getattr(r, "path", "") for r in http_server.app.routes),
    "steps": [f.__module__ for fs in _HOOKS.values() for f in fs],
    "hooks": sorted(
        target
        for target, hooks in HookRegistry._hooks.items()
        if any(f.__module__.startswith("sglang_batch") for _, f, _ in hooks)
    ),
}))
"""

WHICH = """
from importlib.util import find_spec
print(*(find_spec(name) is not None for name in ("sglang", "sglang_batch")))
"""


@pytest.fixture(scope="module")
def without_package(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables under which this Python lacks our package.

    All installed packages but ours, as links in a directory of its own.
    """
    overlay = tmp_path_factory.mktemp("site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "sglang_batch" not in entry.name and entry.suffix != ".pth":
            (overlay / entry.name).symlink_to(entry)
    (overlay / "stand_in_platform.py").write_text(PLATFORM_MODULE)
    (overlay / "stand_in_entry.py").write_text(ENTRY_MODULE)
    metadata = overlay / "stand_in-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: stand-in\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[sglang.srt.platforms]\nstand_in = stand_in_entry:activate\n"
    )
    # The children of the stock server are its forks, those of ours new processes.
    helpers = Path(__file__).parents[1] / "helpers"
    return {
        "PYTHONPATH": os.pathsep.join(map(str, (overlay, helpers))),
        "SGLANG_BATCH_TEST_FORKS": "sglang.launch_server",
    }


def base_python() -> str:
    """The interpreter below the virtual environment, which sees none of it."""
    return os.path.realpath(sys.executable)


def test_only_the_flag_itself_is_hooked(demo_model: Path) -> None:
    report = preloaded.run([sys.executable, "-c", REPORT, str(demo_model)])
    assert report.returncode == 0, report.stderr
    found = json.loads(report.stdout.splitlines()[-1])
    assert found["hooks"] == [
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        "sglang.srt.server_args.ServerArgs.from_cli_args",
    ]
    assert found["args"] == "sglang.srt.server_args.ServerArgs"
    assert found["scheduler"] == "sglang.srt.managers.scheduler"
    assert found["engine_args"] == "sglang.srt.server_args"
    assert not any("batch" in path or "files" in path for path in found["routes"])
    assert not any(step.startswith("sglang_batch") for step in found["steps"])


def test_server_without_the_flag_is_the_stock_server(
    demo_model: Path,
    cases: list[Case],
    tmp_path: Path,
    without_package: dict[str, str],
) -> None:
    found = subprocess.run(
        [base_python(), "-c", WHICH],
        env={**os.environ, **without_package},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "True False\n"

    stock = serve(demo_model, cases, tmp_path, base_python(), without_package)
    ours = serve(demo_model, cases, tmp_path, sys.executable, {})
    assert ours["answers"] == stock["answers"] == [case.output_ids for case in cases]
    assert ours["info"] == stock["info"]
    assert ours["batches_status"] == stock["batches_status"] == 404


def serve(
    model: Path, cases: list[Case], log_dir: Path, python: str, env: dict[str, str]
) -> dict[str, Any]:
    """What a server without the flag answers and says of itself."""
    with server(
        model,
        "--sleep-on-idle",
        log_dir=log_dir,
        python=python,
        env=env,
        as_user=True,
    ) as running:
        body = {
            "input_ids": None,
            "text": [case.prompt for case in cases],
            "sampling_params": {"temperature": 0, "max_new_tokens": MAX_TOKENS},
        }
        answers = post(f"{running.url}/generate", body)
        with urllib.request.urlopen(f"{running.url}/server_info") as answer:
            info = json.load(answer)
        return {
            "answers": [answer["output_ids"] for answer in answers],
            "info": sorted(info),
            "batches_status": status(f"{running.url}/v1/batches"),
        }


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
