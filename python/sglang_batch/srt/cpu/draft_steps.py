"""Attention of a draft model on a CPU, for which SGLang has backends of accelerators only.

A draft model computes several tokens one after the other in one step of the scheduler, as
``topk`` branches of each request. Their KV follows that of the request, branch by branch.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.speculative.draft_utils import DraftBackendFactory


class DraftBackends(DraftBackendFactory):  # type: ignore[misc]
    """Makes the attention of a draft model."""

    def create_decode_backend(self) -> DraftSteps | None:
        steps = self.speculative_num_steps
        if steps <= 1:  # the only draft comes with the KV of accepted tokens
            return None
        return DraftSteps(self.draft_model_runner, self.topk, steps)

    def create_draft_extend_backend(self) -> None:
        """KV of accepted tokens is computed like a prompt's."""


class DraftSteps:
    """The attention of all tokens that are drafted at once, one after the other.

    attn_backends: that of each token but the last, which is not computed.
    """

    def __init__(self, model_runner: Any, topk: int, num_steps: int) -> None:
        self._rows = model_runner.req_to_token_pool
        self._topk, self._num_steps = topk, num_steps
        used = model_runner.attn_backend
        used = getattr(used, "decode_backend", used)  # of two that SGLang has combined
        kind = type("DraftStep", (DraftStep, type(used)), {})
        self.attn_backends = [kind(model_runner) for _ in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Give each branch a row with the slots of its request and its own behind them."""
        topk, steps = self._topk, self._num_steps
        lengths = forward_batch.seq_lens.repeat_interleave(topk)
        width = int(lengths.max()) + topk * steps
        rows = self._rows.req_to_token[forward_batch.req_pool_indices, :width]
        rows = rows.repeat_interleave(topk, 0)
        branch = torch.arange(len(rows))
        at = lengths.unsqueeze(1) + torch.arange(steps)
        begin = (branch % topk * steps).unsqueeze(1)
        rows.scatter_(1, at, rows.gather(1, at + begin))
        for step, backend in enumerate(self.attn_backends, 1):
            backend.req_to_token_pool = SimpleNamespace(req_to_token=rows)
            backend.branches = branch, lengths + step


class DraftStep(TorchNativeAttnBackend):  # type: ignore[misc]
    """The attention of one token of each branch.

    branches: the row of each branch, and its length with the token ``[requests * topk]``.
    """

    branches: tuple[torch.Tensor, torch.Tensor]

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *rest: Any, **more: Any
    ) -> torch.Tensor:  # fmt: skip
        of_requests = forward_batch.req_pool_indices, forward_batch.seq_lens
        if self.use_sliding_window_kv_pool:
            self.swa_out_cache_loc = (
                self.token_to_kv_pool.translate_loc_from_full_to_swa(
                    forward_batch.out_cache_loc
                )
            )
        forward_batch.req_pool_indices, forward_batch.seq_lens = self.branches
        found = super().forward_decode(q, k, v, layer, forward_batch, *rest, **more)
        forward_batch.req_pool_indices, forward_batch.seq_lens = of_requests
        return found
