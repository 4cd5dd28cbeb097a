"""The weight matrices of a model, layer by layer, and the bits of its weights and KV values.

Both are counted from its ``config.json``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ...errors import ConfigError

Config = Mapping[str, Any]

_DTYPE_BITS: dict[str, float] = {
    **dict.fromkeys(("float32", "fp32", "float"), 32),
    **dict.fromkeys(("bfloat16", "bf16", "float16", "fp16", "half"), 16),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "int8"), 8),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), 8),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz"), 8),
    **dict.fromkeys(("int4", "fp4"), 4),
    # KV with scales of 8 bits, one for 32 or 16 values.
    "mxfp8": 8 + 8 / 32,
    **dict.fromkeys(("nvfp4", "fp4_mx_block16"), 4 + 8 / 16),
}


class UnknownQuantisation(ConfigError):
    """A configuration does not say the size of a quantised weight."""


@dataclass(frozen=True, slots=True)
class WeightBits:
    """Bits of a weight, with its share of the scales.

    plain: outside the layers, where nothing is quantised.
    attention, feed_forward: in the layers.
    rate_bits: of the operands that are multiplied, 16, 8 or 4: fewer than 16 where activations
        are quantised, too.
    """

    plain: float
    attention: float
    feed_forward: float
    rate_bits: int = 16


# Bits of attention, of the feed-forward network and of operands, for methods whose weights are
# of one kind. SGLang quantises with most of them while it loads.
_METHODS: dict[str, tuple[float, float, int]] = {
    **dict.fromkeys(("fp8", "fbgemm_fp8", "modelopt_fp8", "w8a8_fp8"), (8, 8, 8)),
    "w8a8_int8": (8, 8, 8),
    "mxfp8": (8.25, 8.25, 8),
    **dict.fromkeys(("modelopt_fp4", "nvfp4", "nvfp4_online"), (4.5, 4.5, 4)),
    "petit_nvfp4": (4.5, 4.5, 16),
    "quark_mxfp4": (4.25, 4.25, 16),
    "mxfp4": (16, 4.25, 16),  # the experts only
    "w4afp8": (8, 4 + 16 / 128, 8),
    "quark_int4fp8_moe": (8, 4, 8),
    "bitsandbytes": (4.25, 4.25, 16),
}
# Methods of which quantization_config has the bits and the size of a group.
_BY_GROUPS = {"awq", "awq_marlin", "gptq", "gptq_marlin", "auto-round", "moe_wna16"}


def dtype_bits(dtype: object) -> float:
    """Bits of one value, for a dtype's name in torch, SGLang or a ``config.json``. Raises
    ConfigError if it is unknown."""
    name = str(dtype).removeprefix("torch.").lower()
    if name not in _DTYPE_BITS:
        raise ConfigError(
            f"dtype={name!r} is not known; choose one of {', '.join(_DTYPE_BITS)}."
        )
    return _DTYPE_BITS[name]


def weight_bits(config: Config, plain: float, quantization: str | None) -> WeightBits:
    """How a model's weights are stored.

    Args:
        config: a ``config.json``, which may have a ``quantization_config``.
        plain: bits of a weight that is not quantised.
        quantization: SGLang's ``--quantization``, for a checkpoint that is not.

    Raises:
        UnknownQuantisation: the size of a weight is unknown.
    """
    stored = config.get("quantization_config") or {}
    method = str(stored.get("quant_method") or quantization or "").lower()
    if method in ("", "unquant"):
        return WeightBits(plain, plain, plain)
    algorithm = str(stored.get("quant_algo", "")).lower()
    if method == "modelopt" and algorithm in ("fp8", "nvfp4"):
        method = algorithm
    attention, feed_forward, rate_bits = _quantised(method, stored)
    return WeightBits(plain, min(attention, plain), feed_forward, rate_bits)


def _quantised(method: str, stored: Config) -> tuple[float, float, int]:
    if method in _BY_GROUPS and stored.get("bits"):
        each = _in_groups(stored["bits"], stored.get("group_size"))
        return each, each, 16
    if method == "compressed-tensors":
        groups: Config = stored.get("config_groups") or {}
        scheme: Config = next(iter(groups.values()), {})
        weights = scheme.get("weights") or {}
        bits, group = weights.get("num_bits"), weights.get("group_size")
        if not bits:
            raise UnknownQuantisation(
                "quantization_config with quant_method='compressed-tensors' does not say "
                "the bits of a weight."
            )
        each = _in_groups(bits, group)
        if weights.get("type") == "float" and group:
            each = bits + 8 / group
        inputs = scheme.get("input_activations") or {}
        return each, each, 8 if bits == inputs.get("num_bits") == 8 else 16
    if method == "quark":
        return _quark(stored)
    if method == "bitsandbytes" and stored and not stored.get("load_in_4bit"):
        return 8, 8, 16
    if method not in _METHODS:
        raise UnknownQuantisation(
            f"the bits of a weight are not known for quantization {method!r}, only for "
            f"{', '.join(sorted(_METHODS.keys() | _BY_GROUPS))}."
        )
    attention, feed_forward, rate_bits = _METHODS[method]
    if block := stored.get("weight_block_size"):
        scale = 32 / math.prod(block) if method == "fp8" else 0
        attention, feed_forward = attention + scale, feed_forward + scale
    return attention, feed_forward, rate_bits


def _in_groups(bits: float, group: int | None) -> float:
    """A group has a scale of 16 bits and a zero point."""
    return float(bits + ((16 + bits) / group if group and group > 0 else 0))


def _quark(stored: Config) -> tuple[float, float, int]:
    scheme = stored.get("global_quant_config") or {}
    weights = scheme.get("weight") or {}
    if isinstance(weights, list | tuple):  # a scheme in two stages
        weights = weights[-1]
    name = str(weights.get("dtype", "")).lower()
    inputs = scheme.get("input_tensors") or {}
    if name.startswith("fp8") or name == "int8":
        return 8, 8, 8 if inputs else 16
    if name == "fp4":
        each = 4 + 8 / (weights.get("group_size") or 32)
    elif name in ("int4", "uint4"):
        each = _in_groups(4, weights.get("group_size"))
    else:
        raise UnknownQuantisation(
            f"quantization_config with quant_method='quark' has weights of {name!r}; give "
            "weight_dtype."
        )
    return each, each, 16


def integer(config: Config, key: str) -> int:
    """A whole number of a configuration. Raises ConfigError if it is missing, or something else."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"The model's configuration has {key}={value!r}; a whole number is needed. A "
            "config.json may leave a key to its default: PretrainedConfig.to_dict() has "
            "them all."
        )
    return value


def first_number(config: Config, *keys: str) -> int | None:
    """The first of these keys that a configuration has with a value other than 0."""
    return next((int(config[key]) for key in keys if config.get(key)), None)


# Models whose feed-forward network has two matrices, without a gate.
_UNGATED = {"phi", "gpt_neox", "starcoder2", "nemotron"}


class Split(StrEnum):
    """How tensor parallelism divides a matrix: by outputs, by inputs (so that sums are reduced over
    all devices), or not at all."""

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
    experts, chosen: experts of a layer and those that a token uses, 0 for other matrices.
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


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Operators of one forward pass.

    mixers: matrices of attention and of recurrent layers.
    feed_forward: those of feed-forward networks and mixtures of experts.
    head: the output matrix, which only tokens that are sampled pass.
    residual: width of the hidden state between layers.
    num_layers, expert_layers: all layers, and those with a mixture of experts.
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
        value_dim = config.get("v_head_dim") or head_dim
        q, kv = heads * head_dim, kv_heads * (head_dim + value_dim)
        qkv = q + kv
        if config.get("attention_k_eq_v"):  # one projection is both
            qkv -= kv_heads * value_dim
        if config.get("linear_num_value_heads"):  # its attention has a gate
            qkv += q
        family = str(config.get("model_type", ""))
        others = 0
        if config.get("attention_bias"):
            others += q + kv + hidden
        elif config.get("qkv_bias", family.startswith("qwen2")):
            others += q + kv
        # Norms of queries and keys.
        if family.startswith(("qwen3", "gemma3", "gemma4")):
            others += 2 * head_dim
        stored = (bits.attention, bits.rate_bits)
        return cls(
            (
                Matrix(hidden, qkv, count, Split.COLUMNS, *stored),
                Matrix(heads * value_dim, hidden, count, Split.ROWS, *stored),
            ),
            params=hidden * (qkv + heads * value_dim) + others,
            width=heads * (head_dim + value_dim) // 2,
            kv_values=kv,
            kv_shards=kv_heads,
            decode_flops=2 * heads * (head_dim + value_dim),
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
    """All layers' feed-forward networks: parameters with biases, those that a token leaves unused,
    and layers with a mixture of experts."""

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
        if experts > 1 and config.get("enable_moe_block", True):
            sparse = sum(_has_experts(config, layer) for layer in range(num_layers))
        # Gemma 4 has a dense network in addition to the experts.
        dense = num_layers if family.startswith("gemma4") else num_layers - sparse
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
            chosen = first_number(config, "num_experts_per_token", "top_k_experts")
            chosen = chosen or integer(config, "num_experts_per_tok")
            width = config.get("moe_intermediate_size") or integer(
                config, "intermediate_size"
            )
            add(width, sparse, experts, min(chosen, experts))
            matrices.append(Matrix(hidden, experts, sparse, Split.WHOLE))
            if family.startswith("gemma4"):  # scales of inputs and of experts
                others += sparse * (hidden + experts)
            shared, gate = _shared_experts(config, width)
            if shared:
                add(shared, sparse)
                others += sparse * gate * hidden
            idle = sparse * max(0, experts - chosen) * (gated + 1) * hidden * width
        params = sum(matrix.params for matrix in matrices)
        return cls(tuple(matrices), params + others, idle, sparse)


def _shared_experts(config: Config, width: int) -> tuple[int, int]:
    """Width of the part that every token uses in addition to its experts, and whether it has a
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
