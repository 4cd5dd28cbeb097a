"""A backend that reads shared prefixes once, without a model, and steps for it.

Steps are planned without a forward, or attention is run by PyTorch.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import (
    AttentionBackend,
)
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_kernel_ext.shared_prefix_attention import (
    AttentionPlanner,
    run_reference,
)
from sglang_batch.srt.attention.attention_backend import (
    Implementation,
    Layers,
    SharedPrefixMixin,
)
from sglang_batch.srt.attention.attention_plans import StepPlans
from sglang_batch.srt.attention.prefix_forest import PrefixForest

HEADS, DIM, SLOTS, DRAFTS = 2, 16, 4000, 4


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def attention(heads: int = HEADS, **given: Any) -> RadixAttention:
    return RadixAttention(2 * heads, DIM, 0.25, num_kv_heads=heads, layer_id=0, **given)


def latent_layer(heads: int) -> RadixAttention:
    return RadixAttention(heads, 24, 0.25, num_kv_heads=1, layer_id=0, v_head_dim=16)


class Stock(AttentionBackend):  # type: ignore[misc]
    """One of SGLang's backends, which notes what it is asked for."""

    # As FlashInfer's has it; a backend of two parts has its part for decodes there.
    decode_backend = "fa2"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.asked.append("eager")

    def init_forward_metadata_out_graph(
        self, forward_batch: Any, in_capture: bool = False
    ) -> None:
        self.asked.append("capture" if in_capture else "replay")

    def forward_decode(self, q: torch.Tensor, *_: object, **options: object) -> Any:
        self.asked.append(f"attend {sorted(options)}")
        return q


class Sharing(SharedPrefixMixin, Stock):
    """What ``share`` makes of it."""


def planner(max_tokens: int = 32, kv_dtype: Any = None) -> AttentionPlanner:
    return AttentionPlanner(
        num_q_heads=HEADS, num_kv_heads=HEADS, head_dim=DIM, dtype=torch.float32,
        kv_dtype=kv_dtype, page_size=1, device="cpu", max_requests=8, max_tokens=max_tokens, max_nodes=8,
    )  # fmt: skip


def sharing_backend() -> Sharing:
    """One of three layers, whose decodes and chunks are planned."""
    made = Sharing()
    decodes = planner()
    made.plans = StepPlans(decodes, planner(64), num_layers=3)
    made.implementation = Implementation("ours", run_reference, capturable=True)
    own = RadixAttention(HEADS, DIM, 0.25, num_kv_heads=HEADS, layer_id=0)
    made._layers = Layers([own], [])
    return made


def decode(*kv_len: int) -> SimpleNamespace:
    lengths = torch.tensor(kv_len)
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(kv_len),
        seq_lens_cpu=lengths,
        needs_forward_metadata_init=lambda: True,
    )


def verify(*before: int) -> SimpleNamespace:
    """``DRAFTS`` tokens of each request, which SGLang's lengths do not count."""
    batch = decode(*before)
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    batch.spec_info = SimpleNamespace(draft_token_num=DRAFTS)
    return batch


def groups(*nodes: int, end: int = 1000) -> PrefixForest:
    return PrefixForest(
        np.arange(len(nodes), dtype=np.int32), ints(*nodes), ints(-1), ints(end)
    )
