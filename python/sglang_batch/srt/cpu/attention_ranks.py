"""Attention data parallelism, for SGLang on a CPU.

Between attention and the layers that all ranks share, the ranks' tokens are gathered into one
buffer and scattered again. SGLang's kernels for that need Triton, and its forms without are
for its own CPU kernels.
"""

from __future__ import annotations

import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import dp_attention
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.moe.token_dispatcher import standard
from sglang.srt.model_executor import forward_batch_info


def use_pytorch() -> None:
    """Have tokens gathered and scattered without Triton. Later calls do nothing."""
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    standard.mask_dp_pad_moe_topk_ids = mask_padding
    # Without operators that are registered for accelerators only, and pinned memory.
    parallel_state._is_cpu = forward_batch_info._is_cpu = True
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = padded_length


def padded_length(backend: object) -> int:
    """The length in tokens of rows that only pad a step, whose KV is never used."""
    return 1


def mask_padding(topk_ids: torch.Tensor) -> None:
    """Give rows that only pad a rank's tokens no expert (-1), in place.

    topk_ids: ``[num_ranks * most_tokens_of_a_rank, experts_per_token]``.
    """
    buffer = dp_attention._DpGatheredBufferWrapper
    counts = buffer.get_dp_global_num_tokens_gpu()
    most = buffer.get_local_dp_buffer_len()
    if counts is None or most <= 0 or len(topk_ids) != len(counts) * most:
        return
    padding = torch.arange(most) >= counts.unsqueeze(1)
    topk_ids[padding.flatten()] = -1
