"""Size of a model, counted from its ``config.json``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import ConfigError
from .weight_bits import Config, dtype_bits, weight_bits

# Keys of a multimodal model's configuration that have its language model's.
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")

# Keys of models with parts that this module cannot count: layers whose state is no KV
# cache, KV shared by layers, sparse reads of the KV, embeddings per layer, an encoder.
_UNCOUNTED = (
    *("attn_layer_period", "mamba_d_state", "ssm_cfg", "layers_block_type"),
    *("hybrid_override_pattern", "linear_attn_config", "linear_num_value_heads"),
    *("num_kv_shared_layers", "index_topk", "hidden_size_per_layer_input"),
    *("global_head_dim", "is_encoder_decoder"),
)
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}

# Models whose feed-forward network has two matrices, without a gate.
_UNGATED = {"phi", "gpt_neox", "starcoder2", "nemotron"}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model's size, for the cost model (BlendServe, section 2.3).

    num_params: P, all parameters of the language model.
    num_active_params: parameters used for one token. All of them for a dense model, as
        in the paper (including the embedding table: 8e9 for Llama-3.1-8B). For a
        mixture of experts, without the experts that are not chosen.
    num_layers: L.
    hidden: H, width of attention over all heads. With latent attention, the mean of
        the widths of keys and values.
    kv_bytes_per_token: one token's KV in all layers. Layers with a sliding window
        count as full ones.
    weight_bytes: size of all weights in memory.
    kv_shards: number of devices among which one token's KV can be divided: the KV
        heads, 1 for latent attention. None: any number.
    in_8_bits: whether weights and activations have 8 bits, so that matrices can be
        multiplied at a device's rate for these.

    Raises:
        ConfigError: a figure is not positive, or ``num_active_params`` is more than
            ``num_params``.
    """

    num_params: int
    num_active_params: int
    num_layers: int
    hidden: int
    kv_bytes_per_token: float
    weight_bytes: int
    kv_shards: int | None = None
    in_8_bits: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "in_8_bits" or (
                field.name == "kv_shards" and value is None
            ):
                continue
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{field.name}={value!r} must be a positive number.")
        if self.num_active_params > self.num_params:
            raise ConfigError(
                f"num_active_params={self.num_active_params} is more than "
                f"num_params={self.num_params}."
            )

    def kv_replicas(self, tp: int) -> float:
        """The number of copies of a token's KV that ``tp`` devices store and read.

        With more devices than KV heads, some devices hold copies of a head.
        """
        return 1.0 if self.kv_shards is None else max(1.0, tp / self.kv_shards)

    @classmethod
    def from_hf_config(
        cls,
        config: Config,
        *,
        kv_dtype: str | None = None,
        weight_dtype: str | None = None,
        quantization: str | None = None,
    ) -> ModelSpec:
        """Count a decoder-only model from its Hugging Face ``config.json``.

        Dense models and mixtures of experts with multi-head, grouped-query or latent
        attention are supported. Matrices are counted exactly, norms and biases as in
        the common families. In a multimodal model the language model is counted, and
        in a model with extra layers for multi-token prediction those for the next
        token.

        Args:
            config: the parsed ``config.json``, or ``PretrainedConfig.to_dict()``, which
                also has the keys that a file may leave at their defaults.
            kv_dtype: dtype of the KV cache. None or ``"auto"``: that of the
                activations.
            weight_dtype: dtype of all weights, instead of the one in ``config``. With
                fewer than 16 bits, only of the matrices inside the layers. None or
                ``"auto"``: as stored, with float32 counted as 16 bits, as engines load
                it.
            quantization: SGLang's ``--quantization``, for a checkpoint that is not.

        Raises:
            ConfigError: a key is missing, or the kind of model is unknown.
        """
        config = _text_config(config)
        _refuse_uncounted(config)
        num_layers = _integer(config, "num_hidden_layers")
        attention = _Attention.of(config)
        feed_forward = _FeedForward.of(config, num_layers)
        embedding = _integer(config, "vocab_size") * _integer(config, "hidden_size")
        if not _tied(config):
            embedding *= 2
        norms = _layer_norms(config) * num_layers + _integer(config, "hidden_size")
        in_layers = attention.params * num_layers + feed_forward.params
        num_params = embedding + norms + in_layers

        stored = dtype_bits(
            config.get("torch_dtype") or config.get("dtype") or "bfloat16"
        )
        bits = weight_bits(config, weight_dtype, min(stored, 16), quantization)
        kv_bits = bits.plain if kv_dtype in (None, "auto") else dtype_bits(kv_dtype)
        stored_bits = (
            (embedding + norms) * bits.plain
            + attention.params * num_layers * bits.attention
            + feed_forward.params * bits.feed_forward
        )
        return cls(
            num_params=num_params,
            num_active_params=num_params - feed_forward.idle_params,
            num_layers=num_layers,
            hidden=attention.width,
            kv_bytes_per_token=attention.kv_values * num_layers * kv_bits / 8,
            weight_bytes=math.ceil(stored_bits / 8),
            kv_shards=attention.kv_shards,
            in_8_bits=bits.in_8_bits,
        )


# Stands for a model whose parameters cannot be counted: an 8B model, 8 KV heads.
TYPICAL_MODEL = ModelSpec(
    num_params=8_030_261_248,
    num_active_params=8_030_261_248,
    num_layers=32,
    hidden=4096,
    kv_bytes_per_token=131_072,
    weight_bytes=16_060_522_496,
)


@dataclass(frozen=True, slots=True)
class _Attention:
    """One layer's attention."""

    params: int
    width: int
    kv_values: int
    kv_shards: int

    @classmethod
    def of(cls, config: Config) -> _Attention:
        if config.get("kv_lora_rank"):
            return cls._latent(config)
        hidden = _integer(config, "hidden_size")
        heads = _integer(config, "num_attention_heads")
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        q, kv = heads * head_dim, kv_heads * head_dim
        params = hidden * (2 * q + 2 * kv)
        family = str(config.get("model_type", ""))
        if config.get("attention_bias"):
            params += q + 2 * kv + hidden
        elif config.get("qkv_bias", family.startswith("qwen2")):
            params += q + 2 * kv
        if family.startswith(("qwen3", "gemma3")):  # norms of queries and keys
            params += 2 * head_dim
        return cls(params, width=q, kv_values=2 * kv, kv_shards=kv_heads)

    @classmethod
    def _latent(cls, config: Config) -> _Attention:
        """Multi-head latent attention (DeepSeek-V2, section 2.1)."""
        hidden = _integer(config, "hidden_size")
        heads = _integer(config, "num_attention_heads")
        latent = _integer(config, "kv_lora_rank")
        rope = _integer(config, "qk_rope_head_dim")
        nope = _integer(config, "qk_nope_head_dim")
        value = _integer(config, "v_head_dim")
        q = heads * (nope + rope)
        q_rank = config.get("q_lora_rank")
        params = hidden * q if not q_rank else (hidden + 1 + q) * q_rank
        params += hidden * (latent + rope) + latent
        params += latent * heads * (nope + value)
        params += heads * value * hidden
        return cls(
            params,
            width=heads * (nope + rope + value) // 2,
            kv_values=latent + rope,
            kv_shards=1,
        )


@dataclass(frozen=True, slots=True)
class _FeedForward:
    """All layers' feed-forward networks. A token leaves ``idle_params`` unused."""

    params: int
    idle_params: int

    @classmethod
    def of(cls, config: Config, num_layers: int) -> _FeedForward:
        hidden = _integer(config, "hidden_size")
        family = str(config.get("model_type", ""))
        matrices = 2 if family in _UNGATED else 3
        experts = (
            _first(config, "n_routed_experts", "num_local_experts", "num_experts") or 0
        )
        sparse = 0
        if experts > 1:
            sparse = sum(_has_experts(config, layer) for layer in range(num_layers))
        dense = num_layers - sparse
        params = idle = 0
        if dense:
            width = config.get("intermediate_size_mlp")  # Llama 4's dense layers
            width = width or _integer(config, "intermediate_size")
            params += dense * matrices * hidden * width
            if config.get("mlp_bias"):
                params += dense * (2 * width + hidden)
        if sparse:
            chosen = _integer(config, "num_experts_per_tok")
            width = config.get("moe_intermediate_size") or _integer(
                config, "intermediate_size"
            )
            expert = matrices * hidden * width
            params += sparse * (experts * (expert + hidden))
            params += sparse * _shared_expert(config, hidden, width, matrices)
            idle = sparse * max(0, experts - chosen) * expert
        return cls(params, idle)


def _shared_expert(config: Config, hidden: int, width: int, matrices: int) -> int:
    """Parameters that every token uses in addition to its experts."""
    family = str(config.get("model_type", ""))
    if own_width := _first(config, "shared_expert_intermediate_size"):
        return matrices * hidden * own_width + hidden  # and a gate
    if family.startswith("llama4"):
        return matrices * hidden * width
    if own_width := _first(config, "shared_intermediate_size"):
        return matrices * hidden * own_width
    return matrices * hidden * width * (_first(config, "n_shared_experts") or 0)


def _has_experts(config: Config, layer: int) -> bool:
    every = _first(config, "decoder_sparse_step", "interleave_moe_layer_step") or 1
    return (
        layer >= (config.get("first_k_dense_replace") or 0)
        and layer % (config.get("moe_layer_freq") or 1) == 0
        and (layer + 1) % every == 0
        and layer not in (config.get("mlp_only_layers") or ())
    )


def _layer_norms(config: Config) -> int:
    """Parameters of the norms before (and after) a layer's two halves."""
    family = str(config.get("model_type", ""))
    norms = 4 if family.startswith(("gemma2", "gemma3")) else 2
    return norms * _integer(config, "hidden_size")


def _tied(config: Config) -> bool:
    """Whether one table is both the embedding and the output matrix."""
    family = str(config.get("model_type", ""))
    by_default = family.startswith(("gemma", "cohere"))
    return bool(config.get("tie_word_embeddings", by_default))


def _text_config(config: Config) -> Config:
    for key in _TEXT_CONFIGS:
        text = config.get(key)
        if isinstance(text, Mapping):
            outer = (
                "tie_word_embeddings",
                "quantization_config",
                "torch_dtype",
                "dtype",
            )
            return {**{k: config[k] for k in outer if k in config}, **text}
    return config


def _refuse_uncounted(config: Config) -> None:
    parts = [key for key in _UNCOUNTED if config.get(key)]
    parts += sorted(set(config.get("layer_types") or ()) - _ATTENTION_LAYERS)
    if parts:
        raise ConfigError(
            f"model_type={config.get('model_type')!r} has parts that cannot be counted "
            f"from its configuration ({', '.join(parts)}); give ModelSpec its numbers."
        )


def _first(config: Config, *keys: str) -> int | None:
    return next((int(config[key]) for key in keys if config.get(key)), None)


def _integer(config: Config, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"The model's configuration has {key}={value!r}; a whole number is needed. A "
            "config.json may leave a key to its default: PretrainedConfig.to_dict() has "
            "them all."
        )
    return value
