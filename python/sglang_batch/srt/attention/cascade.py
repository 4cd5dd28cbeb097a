"""A shared-prefix plan run by FlashInfer's multi-level cascade instead of our kernel.

FlashInfer attends level by level, one kernel per level, and merges the levels' results
by their lse. The plan decides which nodes are worth a level. ``prepare`` is called once per
step, also if it keeps its plan, because its requests have grown; ``run`` for each layer, with
the arguments of ``sgl_kernel_ext.shared_prefix_attention.run``. The cascade cannot be captured
in a CUDA graph: a level's kernels are launched for the ranges of one step.

FlashInfer needs an NVIDIA GPU and compiles its kernels at their first use. This module
was written against FlashInfer 0.7.2 without a GPU, and has never run on one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from sglang.srt.environ import envs

from sgl_kernel_ext.shared_prefix_attention import AttentionPlan, Level, cascade_levels

from ...errors import ConfigError, EngineError

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)


MakeWrapper: TypeAlias = Callable[[int, torch.Tensor, str], Any]
"""FlashInfer's constructor of a ``MultiLevelCascadeAttentionWrapper``: the number of levels,
the workspace and the KV layout."""


class Cascade:
    """FlashInfer's cascade for the attention shape of this rank's layers, on one device.

    dtype: of q and the KV cache.
    scale: of the logits, in all layers.
    make_wrapper: replaces FlashInfer's constructor, without FlashInfer or a GPU.

    Raises:
        ConfigError: FlashInfer has no kernel for this dtype, head dim or device, or it
            is not installed.
    """

    def __init__(
        self,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        scale: float,
        device: torch.device | str,
        make_wrapper: MakeWrapper | None = None,
    ) -> None:
        _check_shape(head_dim, dtype)
        self._num_q_heads = num_q_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._dtype = dtype
        self._scale = scale
        self._device = torch.device(device)
        self._make_wrapper = make_wrapper or _flashinfer(self._device)
        # As large as in SGLang's FlashInfer backend: 384 MiB unless the environment sets
        # another size. It holds partial results of split spans. Those of a level are
        # merged before the next level runs, so all levels share it.
        size = envs.SGLANG_FLASHINFER_WORKSPACE_SIZE.get()
        self._workspace = torch.empty(size, dtype=torch.uint8, device=self._device)
        # By number of levels. Each level of each has another 8 MiB for indices.
        self._wrappers: dict[int, Any] = {}
        self._on_gpu = self._device.type == "cuda"
        event = torch.cuda.Event() if self._on_gpu else None
        self._sent: torch.cuda.Event | None = event
        self._prepared: AttentionPlan | None = None
        # Of the prepared step. int64 [num_tokens]: flat query token, on the device.
        self._wrapper: Any = None
        self._gather: torch.Tensor | None = None

    def prepare(
        self,
        plan: AttentionPlan,
        q_len: np.ndarray,
        kv_len: np.ndarray,
        table_row: np.ndarray,
        node_end: np.ndarray,
        table: torch.Tensor,
    ) -> None:
        """Pass the ranges and KV slots of one step to FlashInfer, before its first layer.

        ``table`` is read on the current stream, on which ``run`` is called. The host waits
        for the copies of the last ``prepare`` only.

        Args:
            plan: the newest plan of its planner, for ``page_size`` 1.
            q_len, table_row, node_end: int32 on the host, as planned.
            kv_len: int32 ``[n]`` on the host, the present lengths: as planned, or such that
                the plan is ``still_valid``.
            table: int32 ``[rows, max_pages]`` on the device: the slot of each position,
                SGLang's ``req_to_token``, including the slots of this step's tokens.

        Raises:
            EngineError: the plan is for pages of more than one token.
        """
        if plan.planner.page_size != 1:
            raise EngineError(
                f"the plan is for pages of {plan.planner.page_size} tokens, and "
                "FlashInfer needs single slots; make the planner with page_size=1."
            )
        levels = cascade_levels(plan, q_len, kv_len, table_row, node_end)
        spans = [level.kv_end - level.kv_begin for level in levels]
        slots = self._slots(levels, spans, table)
        if len(levels) not in self._wrappers:
            made = self._make_wrapper(len(levels), self._workspace, "NHD")
            self._wrappers[len(levels)] = made
        wrapper = self._wrappers[len(levels)]
        if self._sent is not None:  # page-locked memory that is overwritten now
            self._sent.synchronize()
        wrapper.plan(
            [self._on_host(level.token_indptr) for level in levels],
            # The offset of each span's slots, and their total at the end.
            [self._on_host(np.append(0, np.cumsum(s)).astype(np.int32)) for s in spans],
            slots,
            # Pages have one token. FlashInfer counts the last page of a span even if
            # the span is empty, so it has 0 tokens there.
            [self._on_host(np.minimum(span, 1)) for span in spans],
            self._num_q_heads,
            self._num_kv_heads,
            self._head_dim,
            1,
            causal=True,  # FlashInfer applies it to the last level only
            sm_scale=self._scale,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        if self._sent is not None:
            self._sent.record()
        self._gather = plan.planner.buffers.gather[: plan.num_tokens].long()
        self._prepared, self._wrapper = plan, wrapper

    def run(
        self,
        plan: AttentionPlan,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        table: torch.Tensor,
        kv_len: torch.Tensor,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """Attention of one layer for the step that was prepared.

        Args:
            q: ``[at least num_tokens, num_q_heads, head_dim]`` in the batch's order.
            k_cache, v_cache: ``[num_slots, num_kv_heads, head_dim]``, both with the
                same strides.
            table, kv_len: not read here, but in ``prepare``.
            out: written, with the shape of q. Rows from num_tokens stay as they are.

        Raises:
            EngineError: the scale differs, or the plan was not prepared.
        """
        if scale != self._scale:
            raise EngineError(
                f"a layer scales its logits by {scale}, and FlashInfer was set up with "
                f'{self._scale} for all layers; set attention to "auto".'
            )
        if plan is not self._prepared:
            raise EngineError(
                f"a layer of a step of {plan.num_tokens} tokens runs before the step "
                "was prepared; call prepare() before its first layer."
            )
        assert self._wrapper is not None and self._gather is not None
        # Slots as pages of one token: [num_slots, 1, num_kv_heads, head_dim], "NHD".
        pages = k_cache.unsqueeze(1), v_cache.unsqueeze(1)
        result = self._wrapper.run(q[self._gather], pages)
        out.index_copy_(0, self._gather, result.to(out.dtype))

    def _slots(
        self, levels: Sequence[Level], spans: Sequence[np.ndarray], table: torch.Tensor
    ) -> list[torch.Tensor]:
        """Per level, the concatenated slots of all its spans, on the device."""
        span = np.concatenate(spans, dtype=np.int64)
        row = np.concatenate([level.table_row for level in levels])
        begin = np.concatenate([level.kv_begin for level in levels])
        shift = begin - (np.cumsum(span) - span)  # from a slot's index to its position
        ranges = self._on_host(np.stack([span, row, shift]))
        lengths, rows, shifts = ranges.to(self._device, non_blocking=True)
        total = int(span.sum())
        # Without output_size, the host would wait for the sum.
        which = torch.repeat_interleave(lengths, output_size=total)
        position = torch.arange(total, device=self._device) + shifts[which]
        slots = table[rows[which], position]
        return list(torch.split(slots, [int(each.sum()) for each in spans]))

    def _on_host(self, values: np.ndarray) -> torch.Tensor:
        """A host tensor for FlashInfer, page-locked so that copies do not block."""
        tensor = torch.from_numpy(values)
        return tensor.pin_memory() if self._on_gpu else tensor


def _check_shape(head_dim: int, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ConfigError(
            'attention="flashinfer" works with float16 and bfloat16, and this model '
            f'runs in {str(dtype).removeprefix("torch.")}; set "auto".'
        )
    if head_dim not in HEAD_DIMS:
        raise ConfigError(
            'attention="flashinfer" works with heads of 64, 128 or 256 values, and '
            f'those of this model have {head_dim}; set "auto".'
        )


def _flashinfer(device: torch.device) -> MakeWrapper:
    """FlashInfer's constructor. Raises ConfigError where FlashInfer cannot run."""
    if device.type != "cuda" or torch.version.hip is not None:
        raise ConfigError(
            'attention="flashinfer" needs an NVIDIA GPU, and this is a '
            f'{"ROCm" if torch.version.hip else device.type} device; set "auto".'
        )
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ImportError as error:
        raise ConfigError(
            'attention="flashinfer" needs FlashInfer, which cannot be imported '
            f'({error}); pip install flashinfer-python, or set "auto".'
        ) from error
    make: MakeWrapper = flashinfer.MultiLevelCascadeAttentionWrapper
    return make
