"""Options that a machine's devices do not take are refused before the engine starts."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from sglang_batch.errors import ConfigError
from sglang_batch.run.fleet_options import EngineOptions, RayOptions
from sglang_batch.srt.compat import command_line
from sglang_batch.srt.compat.command_line import check_device


@pytest.fixture(autouse=True)
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(command_line, "DEVICES", tmp_path)
    monkeypatch.setattr("sys.platform", "linux")
    (tmp_path / "null").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"device": "cuda"}, "--device cuda: this machine has no accelerator"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "choose one of auto, bfloat16"),
        ({"quantization": "awq"}, "--quantization awq needs an accelerator"),
        ({"attention_backend": "fa3"}, "choose one of torch_native, triton"),
        ({"decode_attention_backend": "flashinfer"}, "--decode-attention-backend"),
    ],
)
def test_what_a_cpu_cannot_do(
    devices: Path, monkeypatch: pytest.MonkeyPatch, option: dict[str, Any], said: str
) -> None:
    known = Namespace(model_path="none", **option)
    with pytest.raises(ConfigError, match=said):
        check_device(known)
    with pytest.raises(ConfigError, match=said):
        EngineOptions().find_model(known)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    check_device(known)  # SGLang has kernels for it
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    (devices / "kfd").touch()
    check_device(known)


@pytest.mark.parametrize(
    "option",
    [
        {},
        {"device": "cpu", "attention_backend": "triton", "kv_cache_dtype": "auto"},
        {"tp_size": 2, "attention_backend": "shared_prefix"},
    ],
)
def test_what_a_cpu_does(option: dict[str, Any]) -> None:
    check_device(Namespace(**option))


def test_the_head_of_a_fleet_needs_no_devices() -> None:
    ray = RayOptions(fleet=None, resources=None)  # type: ignore[arg-type]
    ray.find_model(Namespace(model_path="none", device="cuda"))


def test_ranks_need_a_gpu_each(devices: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (devices / name).touch()
    check_device(Namespace(tp_size=2))
    check_device(Namespace(tp_size=8, nnodes=4))
    with pytest.raises(
        ConfigError, match="are 4 processes, and this machine has 2 GPUs"
    ):
        check_device(Namespace(tp_size=2, pp_size=2))
    with pytest.raises(ConfigError, match="are 4096 processes"):
        check_device(Namespace(tp_size=4096, device="cpu"))
