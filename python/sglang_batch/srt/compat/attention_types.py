"""The parts of SGLang's model runner and attention that we use, as protocols.

Each lists only the attributes and methods that we read or call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from .scheduler_types import ForwardMode, RowPool, SpeculativeAlgorithm
from .server_types import ModelConfig, OfflineArgs


class ForwardBatch(Protocol):
    """``ForwardBatch``: one forward, of ``n`` rows.

    seq_lens, seq_lens_cpu: ``[n]`` KV tokens of each row after the forward, on the
        device and on the host.
    extend_seq_lens, extend_seq_lens_cpu: ``[n]`` tokens that the forward computes for
        each row of an extend.
    out_cache_loc: KV slots of the tokens that it computes.
    dimensions: of an embedding of each row, None for the model's.
    """

    forward_mode: ForwardMode
    batch_size: int
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    extend_seq_lens: torch.Tensor
    extend_seq_lens_cpu: Sequence[int]
    out_cache_loc: torch.Tensor
    dimensions: Sequence[int] | None


class AttentionLayer(Protocol):
    """``RadixAttention``: the attention of one layer, with this rank's heads."""

    layer_id: int
    tp_q_head_num: int
    tp_k_head_num: int
    qk_head_dim: int
    v_head_dim: int
    scaling: float
    sliding_window_size: int
    logit_cap: float
    is_cross_attention: bool
    attn_type: object
    xai_temperature_len: int
    use_irope: bool
    pos_encoding_mode: str


class LayerKvPool(Protocol):
    """``MHATokenToKVPool``: the KV cache, ``[num_slots, num_kv_heads, head_dim]``
    for K and for V of each layer."""

    dtype: torch.dtype
    layer_num: int

    def get_key_buffer(self, layer_id: int) -> torch.Tensor: ...

    def get_value_buffer(self, layer_id: int) -> torch.Tensor: ...

    def set_kv_buffer(
        self,
        layer: AttentionLayer,
        loc_info: object,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
    ) -> None: ...


class Model(Protocol):
    """A model of SGLang, a ``torch.nn.Module``."""

    def modules(self) -> Iterator[object]: ...

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class AttentionBackend(Protocol):
    """One of SGLang's attention backends, which is only passed on."""


class ModelRunner(Protocol):
    """``sglang.srt.model_executor.model_runner.ModelRunner``."""

    model: Model
    model_config: ModelConfig
    server_args: OfflineArgs
    attn_backend: AttentionBackend
    token_to_kv_pool: LayerKvPool
    req_to_token_pool: RowPool
    device: str
    dtype: torch.dtype
    is_generation: bool
    spec_algorithm: SpeculativeAlgorithm
