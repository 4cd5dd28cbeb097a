"""Servers whose mixed steps are never split."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_batch.srt.overlap import overlap_choice
from sglang_batch.srt.overlap.overlap_choice import why_never


def runner(
    model: torch.nn.Module | None = None,
    arguments: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """A model runner as why_never sees it."""
    flags = (
        "enable_deterministic_inference", "rl_on_policy_target",
        "enable_torch_compile", "enable_two_batch_overlap", "enable_pdmux",
        "enable_return_routed_experts", "enable_return_indexer_topk",
    )  # fmt: skip
    model_config = SimpleNamespace(
        **{
            "is_encoder_decoder": False,
            "quantization": None,
            "hf_text_config": SimpleNamespace(),
        }
        | (config or {})
    )
    found = {
        "device": "cpu",
        "is_generation": True,
        "spec_algorithm": SimpleNamespace(is_none=lambda: True),
        "use_mla_backend": False,
        "lora_manager": None,
        "canary_manager": None,
        "hisparse_coordinator": None,
        "server_args": SimpleNamespace(**(dict.fromkeys(flags) | (arguments or {}))),
        "model_config": model_config,
        "model": model or torch.nn.Linear(2, 2),
    }
    return SimpleNamespace(**(found | changes))


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    ranks = SimpleNamespace(tp_size=1, pp_size=1, attn_dp_size=1)
    monkeypatch.setattr(overlap_choice, "get_parallel", lambda: ranks)
    monkeypatch.setattr(overlap_choice, "keeps_states", lambda config: False)
    return ranks


def test_a_dense_model_on_one_device_is_split() -> None:
    assert why_never(runner()) is None


@pytest.mark.parametrize("kind", ["tp_size", "pp_size", "attn_dp_size"])
def test_several_ranks_are_not(_one_rank: SimpleNamespace, kind: str) -> None:
    setattr(_one_rank, kind, 2)
    assert str(why_never(runner())).startswith("several ranks")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_mla_backend": True}, "latent attention"),
        ({"lora_manager": object()}, "adapters"),
        ({"spec_algorithm": SimpleNamespace(is_none=lambda: False)}, "drafts"),
        ({"is_generation": False}, "a model that does not decode"),
        ({"device": "xpu"}, "a xpu"),
        ({"arguments": {"enable_pdmux": True}}, "--enable-pdmux"),
        ({"arguments": {"rl_on_policy_target": "x"}}, "deterministic inference"),
        (
            {"config": {"hf_text_config": SimpleNamespace(num_experts=8)}},
            "a mixture of experts in 16 or 32 bits",
        ),
    ],
)
def test_other_servers_are_not(changes: dict[str, Any], reason: str) -> None:
    assert why_never(runner(**changes)) == reason


def test_a_quantised_mixture_is_split() -> None:
    experts = SimpleNamespace(num_experts=8)
    config = {"hf_text_config": experts, "quantization": "fp8"}
    assert why_never(runner(config=config)) is None


def test_kernels_with_one_workspace_are_not_split_on_a_gpu() -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("workspace", torch.zeros(4))
    assert why_never(runner(model)) is None
    found = why_never(runner(model, device="cuda"))
    assert found == "kernels with one workspace"
