"""The weight matrices of a model, layer by layer, counted from its ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .weight_bits import Config, WeightBits, first_number, integer

# Models whose feed-forward network has two matrices, without a gate.
_UNGATED = {"phi", "gpt_neox", "starcoder2", "nemotron"}


class Split(StrEnum):
    """How tensor parallelism divides a matrix.

    COLUMNS: each device has a part of the outputs.
    ROWS: each device has a part of the inputs, and the sums are reduced over all.
    WHOLE: each device has all of it.
    """

    COLUMNS = "columns"
    ROWS = "rows"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix that occurs in several layers.

    inputs, outputs: K and N of the product ``[tokens, K] x [K, N]``.
    count: layers that have one.
    bits: of a stored weight, with its share of the scales.
    rate_bits: of the operands that are multiplied: 16, 8 or 4.
    experts, chosen: of a mixture, experts of a layer and those that a token uses. 0 for
        a matrix that every token uses.
    """

    inputs: int
    outputs: int
    count: int
    split: Split = Split.COLUMNS
    bits: float = 16.0
    rate_bits: int = 16
    experts: int = 0
    chosen: int = 0

    @property
    def params(self) -> int:
        """Weights in all layers."""
        return self.inputs * self.outputs * self.count * max(1, self.experts)

    @property
    def active_params(self) -> int:
        """Weights that one token uses."""
        used = self.chosen if self.experts else 1
        return self.inputs * self.outputs * self.count * used


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Operators of one forward pass.

    mixers: matrices of attention and of recurrent layers.
    feed_forward: those of feed-forward networks and mixtures of experts.
    head: the output matrix, which only tokens that are sampled pass.
    residual: width of the hidden state between layers, which tensor parallelism reduces
        over all devices twice in a layer.
    num_layers: all layers.
    expert_layers: layers with a mixture of experts.
    decode_flops_per_kv_token: arithmetic of a decode step for each token of KV, in all
        layers that read all tokens.
    """

    mixers: tuple[Matrix, ...]
    feed_forward: tuple[Matrix, ...]
    head: Matrix
    residual: int
    num_layers: int
    expert_layers: int
    decode_flops_per_kv_token: int


@dataclass(frozen=True, slots=True)
class AttentionMatrices:
    """One layer's attention.

    params: all parameters, with biases and norms.
    width: over all heads. With latent attention, the mean of those of keys and values.
    kv_values: values of a token's KV.
    kv_shards: devices among which it can be divided.
    decode_flops: of a decode step for each token of KV.
    """

    matrices: tuple[Matrix, ...]
    params: int
    width: int
    kv_values: int
    kv_shards: int
    decode_flops: int

    @classmethod
    def of(cls, config: Config, count: int, bits: WeightBits) -> AttentionMatrices:
        """The attention of ``count`` equal layers."""
        if config.get("kv_lora_rank"):
            return cls._latent(config, count, bits)
        hidden = integer(config, "hidden_size")
        heads = integer(config, "num_attention_heads")
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        q, kv = heads * head_dim, kv_heads * head_dim
        qkv = q + 2 * kv
        if config.get("linear_num_value_heads"):  # its attention has a gate
            qkv += q
        family = str(config.get("model_type", ""))
        others = 0
        if config.get("attention_bias"):
            others += q + 2 * kv + hidden
        elif config.get("qkv_bias", family.startswith("qwen2")):
            others += q + 2 * kv
        if family.startswith(("qwen3", "gemma3")):  # norms of queries and keys
            others += 2 * head_dim
        stored = (bits.attention, bits.rate_bits)
        return cls(
            (
                Matrix(hidden, qkv, count, Split.COLUMNS, *stored),
                Matrix(q, hidden, count, Split.ROWS, *stored),
            ),
            params=hidden * (qkv + q) + others,
            width=q,
            kv_values=2 * kv,
            kv_shards=kv_heads,
            decode_flops=4 * q,
        )

    @classmethod
    def _latent(cls, config: Config, count: int, bits: WeightBits) -> AttentionMatrices:
        """Multi-head latent attention (DeepSeek-V2, section 2.1)."""
        hidden = integer(config, "hidden_size")
        heads = integer(config, "num_attention_heads")
        latent = integer(config, "kv_lora_rank")
        rope = integer(config, "qk_rope_head_dim")
        nope = integer(config, "qk_nope_head_dim")
        value = integer(config, "v_head_dim")
        q = heads * (nope + rope)
        q_rank = config.get("q_lora_rank")
        stored = (bits.attention, bits.rate_bits)
        down = latent + rope + (q_rank or 0)
        matrices = [
            Matrix(hidden, down, count, Split.WHOLE, *stored),
            Matrix(q_rank or hidden, q, count, Split.COLUMNS, *stored),
            Matrix(latent, heads * (nope + value), count, Split.COLUMNS, *stored),
            Matrix(heads * value, hidden, count, Split.ROWS, *stored),
        ]
        params = sum(matrix.inputs * matrix.outputs for matrix in matrices)
        return cls(
            tuple(matrices),
            params=params + latent + (q_rank or 0),
            width=heads * (nope + rope + value) // 2,
            kv_values=latent + rope,
            kv_shards=1,
            # Queries and values are moved into the latent space, so that each head reads
            # the whole of it twice.
            decode_flops=2 * heads * (2 * latent + rope),
        )


@dataclass(frozen=True, slots=True)
class FeedForward:
    """All layers' feed-forward networks.

    params: all parameters, with biases.
    idle_params: those that a token leaves unused.
    expert_layers: layers with a mixture of experts.
    """

    matrices: tuple[Matrix, ...]
    params: int
    idle_params: int
    expert_layers: int

    @classmethod
    def of(cls, config: Config, num_layers: int, bits: WeightBits) -> FeedForward:
        hidden = integer(config, "hidden_size")
        family = str(config.get("model_type", ""))
        gated = 1 if family in _UNGATED else 2
        experts = (
            first_number(config, "n_routed_experts", "num_local_experts", "num_experts")
            or 0
        )
        sparse = 0
        if experts > 1:
            sparse = sum(_has_experts(config, layer) for layer in range(num_layers))
        dense = num_layers - sparse
        stored = (bits.feed_forward, bits.rate_bits)
        matrices: list[Matrix] = []
        others = idle = 0

        def add(width: int, count: int, experts: int = 0, chosen: int = 0) -> None:
            mixture = (experts, chosen)
            up = Matrix(hidden, gated * width, count, Split.COLUMNS, *stored, *mixture)
            down = Matrix(width, hidden, count, Split.ROWS, *stored, *mixture)
            matrices.extend((up, down))

        if dense:
            width = config.get("intermediate_size_mlp")  # Llama 4's dense layers
            if not experts:  # Granite 4 calls it a shared expert
                width = width or first_number(config, "shared_intermediate_size")
            width = width or integer(config, "intermediate_size")
            add(width, dense)
            if config.get("mlp_bias"):
                others += dense * (2 * width + hidden)
        if sparse:
            chosen = first_number(config, "num_experts_per_token")
            chosen = chosen or integer(config, "num_experts_per_tok")
            width = config.get("moe_intermediate_size") or integer(
                config, "intermediate_size"
            )
            add(width, sparse, experts, min(chosen, experts))
            matrices.append(Matrix(hidden, experts, sparse, Split.WHOLE))
            shared, gate = _shared_experts(config, width)
            if shared:
                add(shared, sparse)
                others += sparse * gate * hidden
            idle = sparse * max(0, experts - chosen) * (gated + 1) * hidden * width
        params = sum(matrix.params for matrix in matrices)
        return cls(tuple(matrices), params + others, idle, sparse)


def _shared_experts(config: Config, width: int) -> tuple[int, int]:
    """Width of what every token uses in addition to its experts, and whether it has a
    gate."""
    family = str(config.get("model_type", ""))
    if own_width := first_number(config, "shared_expert_intermediate_size"):
        return own_width, 1
    if family.startswith("llama4"):
        return width, 0
    if own_width := first_number(config, "shared_intermediate_size"):
        return own_width, 0
    number = first_number(config, "n_shared_experts", "num_shared_experts") or 0
    return width * number, 0


def _has_experts(config: Config, layer: int) -> bool:
    if types := config.get("mlp_layer_types"):
        return bool(types[layer] == "sparse")
    every = first_number(config, "decoder_sparse_step", "interleave_moe_layer_step")
    return (
        layer >= (config.get("first_k_dense_replace") or 0)
        and layer % (config.get("moe_layer_freq") or 1) == 0
        and (layer + 1) % (every or 1) == 0
        and layer not in (config.get("mlp_only_layers") or ())
    )
