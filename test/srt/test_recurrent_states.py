"""Models with a recurrent state besides KV, under the plan, in real SGLang.

Answers are compared with ``transformers``, and SGLang counts KV and states after every step,
as the scheduler of the tests does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stress_runs import scenario
from tiny_checkpoints import ARGUMENTS, write_checkpoint

from sgl_kernel_ext import recurrent_layers
from sglang_batch.errors import ConfigError
from sglang_batch.srt.plugin.defaults import check_states_anywhere

# Gated delta nets with few states: 3 requests run at a time, and hold 2 each. Kimi Delta
# Attention beside latent attention. Mamba-2.
CASES = {
    "qwen3_next": ("branch_points,random", "--max-mamba-cache-size=9"),
    "kimi_linear": ("branch_points,random",),
    "granitemoehybrid": ("branch_points,random", "--enable-mixed-chunk"),
}


@pytest.mark.parametrize("model_type", CASES)
def test_jobs_on_a_model_with_states(
    model_type: str,
    demo_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As the weights. SGLang keeps the last inputs of convolutions in bfloat16.
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")
    model = write_checkpoint(model_type, tmp_path / model_type, demo_model)
    what, *arguments = CASES[model_type]
    found = scenario(model, what, 1, 2, *ARGUMENTS[model_type], *arguments)
    # Each prefix was computed once.
    assert found["branch_points"]["computed"] == found["branch_points"]["least"]
    assert found["random"]["lines"] > 50


def test_a_prompt_in_two_parts_and_a_decode_are_the_prompt_in_one() -> None:
    """Kimi Delta Attention: states go from step to step, also within a bounded gate."""
    heads, dim, many = 2, 8, 12
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, many, heads, dim) for _ in range(4))
    beta = torch.randn(1, many, heads)
    rates, bias = torch.rand(1, 1, heads, 1), torch.randn(heads * dim)
    for bound in (None, -5.0):
        states = torch.zeros(2, heads, dim, dim)

        def attend(
            begin: int, end: int, slot: int, states: Any = states, bound: Any = bound
        ) -> torch.Tensor:
            return recurrent_layers.chunk_kda(
                *(x[:, begin:end] for x in (q, k, v, g, beta)),
                states,
                torch.tensor([slot]),
                torch.tensor([0, end - begin]),
                rates,
                bias,
                bound,
                beta_is_raw=True,
            )

        whole = attend(0, many, 0)
        parts = torch.cat([attend(0, 5, 1), attend(5, many - 1, 1)], 1)
        torch.testing.assert_close(parts, whole[:, :-1])
        last = torch.empty(1, 1, heads, dim)
        recurrent_layers.packed_kda_decode(
            torch.cat([x[0, -1].flatten() for x in (q, k, v)]).unsqueeze(0),
            g[0, -1:].flatten(1),
            beta[0, -1:],
            rates,
            bias,
            dim**-0.5,
            states,
            last,
            torch.tensor([1]),
            bound,
        )
        torch.testing.assert_close(last[0], whole[0, -1:])
        torch.testing.assert_close(states[1], states[0])


@pytest.mark.parametrize(
    ("strategy", "page_size", "wrong"),
    [
        ("auto", None, None),
        ("no_buffer", 1, None),
        ("extra_buffer", 1, "--mamba-radix-cache-strategy extra_buffer"),
        ("auto", 64, "--page-size 64"),
    ],
)
def test_states_are_kept_at_any_token_or_not_at_all(
    strategy: str, page_size: int | None, wrong: str | None
) -> None:
    if wrong is None:
        check_states_anywhere(strategy, page_size)
        return
    with pytest.raises(
        ConfigError, match=f"^{wrong} does not work .*; drop it, or give"
    ):
        check_states_anywhere(strategy, page_size)
