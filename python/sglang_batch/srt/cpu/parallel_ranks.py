"""Attention data parallelism and expert parallelism, for SGLang on a CPU.

With the first, tokens of all ranks are gathered into one buffer between attention and the
layers that the ranks share, and scattered again. With the second, a rank leaves out what other
ranks' experts compute. SGLang's kernels for that need Triton, and its forms without are for
its own CPU kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import dp_attention
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.moe import fused_moe_native
from sglang.srt.layers.moe.token_dispatcher import standard
from sglang.srt.model_executor import forward_batch_info

_all_experts = fused_moe_native.moe_forward_native


def use_pytorch() -> None:
    """Have the ranks work together without Triton. Later calls do nothing."""
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    standard.mask_dp_pad_moe_topk_ids = mask_padding
    fused_moe_native.moe_forward_native = own_experts
    # Without operators that are registered for accelerators only, and pinned memory.
    parallel_state._is_cpu = forward_batch_info._is_cpu = True
    parallel_state.GroupCoordinator.reduce_scatterv = reduce_scatterv
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = padded_length


def reduce_scatterv(
    group: Any,
    input_: torch.Tensor,
    output: torch.Tensor | None = None,
    sizes: list[int] | None = None,
) -> torch.Tensor:
    """SGLang's, in its form without NCCL.

    Args:
        input_: ``[num_tokens of all ranks, hidden_size]``.
        output: of the sum, this rank's ``[num_tokens, hidden_size]``. None makes one.
        sizes: tokens of each rank. None: equal parts.
    """
    summed: torch.Tensor = group._deterministic_reduce_scatterv(input_, output, sizes)
    return summed


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


def own_experts(layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> Any:
    """SGLang's experts in PyTorch, where an id of -1 is an expert of another rank.

    Args:
        x: ``[num_tokens, hidden_size]``.
        topk_output: with ``topk_ids`` and ``topk_weights``
            ``[num_tokens, experts_per_token]``.

    Returns:
        ``[num_tokens, hidden_size]``, the part of this rank's experts.
    """
    ids, weights = topk_output.topk_ids, topk_output.topk_weights
    if (ids >= 0).all():
        return _all_experts(layer, x, topk_output, config)
    output = torch.zeros_like(x)
    for each in range(ids.shape[1]):
        here = ids[:, each] >= 0
        if here.any():
            one = topk_output._replace(
                topk_ids=ids[here, each : each + 1],
                topk_weights=weights[here, each : each + 1],
            )
            output[here] += _all_experts(layer, x[here], one, config)
    return output
