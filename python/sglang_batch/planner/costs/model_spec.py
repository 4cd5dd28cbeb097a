"""Size of a model, counted from its ``config.json``.

Its layers differ in how they see the past: all tokens, a window, or a state. A recurrent layer
folds all tokens into a state of fixed size, which a decode step reads and writes. Gated delta
nets (Yang et al., "Gated Delta Networks", 2024, equation 10) keep a matrix ``S`` of
``d_k x d_v`` for each value head::

    S <- a S + b k (v - a S^T k)^T,   o = S^T q

Kimi Delta Attention ("Kimi Linear", 2025, equation 1) has a decay ``a`` of its own for each
channel of ``k``. Mamba-2 (Dao and Gu, "Transformers are SSMs", 2024, equation 1) keeps one
of ``d_state x d_head``::

    S <- a S + B x^T,                 y = S^T C

All pass their inputs through a short causal convolution, whose last ``kernel - 1`` inputs
are part of the state.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError
from .weights import (
    AttentionMatrices,
    Config,
    FeedForward,
    Matrix,
    ModelShape,
    Split,
    UnknownQuantisation,
    WeightBits,
    dtype_bits,
    integer,
    weight_bits,
)

logger = logging.getLogger(__name__)

FULL, WINDOW, RECURRENT = "full", "window", "recurrent"
_KINDS = {
    "full_attention": FULL,
    "attention": FULL,
    "chunked_attention": FULL,  # chunks are as long as most prompts
    "sliding_attention": WINDOW,
    "linear_attention": RECURRENT,
    "mamba": RECURRENT,
}
# Models whose configuration may name the layers by their period alone.
_PERIODIC = ("qwen3_next", "qwen3_5")
_PERIOD = 4
# SGLang keeps the last inputs of convolutions in 16 bits.
_CONV_BITS = 16


def layer_kinds(config: Config, num_layers: int) -> list[str]:
    """The kind of each layer. Raises ConfigError if one is unknown, or there is no KV."""
    types = config.get("layer_types")
    if delta := config.get("linear_attn_config"):  # numbers layers from 1
        recurrent = delta["kda_layers"]
        types = [
            "linear_attention" if layer + 1 in recurrent else "full_attention"
            for layer in range(num_layers)
        ]
    if types is None and str(config.get("model_type")).startswith(_PERIODIC):
        period = config.get("full_attention_interval") or _PERIOD
        return [
            FULL if (layer + 1) % period == 0 else RECURRENT
            for layer in range(num_layers)
        ]
    types = types or ["full_attention"] * num_layers
    unknown = sorted(set(types) - set(_KINDS))
    if unknown:
        raise ConfigError(
            f"model_type={config.get('model_type')!r} has layers that cannot be counted "
            f"from its configuration ({', '.join(unknown)}); give ModelSpec its numbers."
        )
    kinds = [_KINDS[each] for each in types[:num_layers]]
    if not config.get("sliding_window") or set(kinds) == {WINDOW}:
        # Without KV of all tokens there is no unit to count reads in.
        kinds = [FULL if kind == WINDOW else kind for kind in kinds]
    if FULL not in kinds:
        raise ConfigError(
            f"model_type={config.get('model_type')!r} has no layer with attention, so "
            "there is no KV to plan."
        )
    return kinds


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """One recurrent layer: its parameters, the size of one request's state, and the FLOPs of the
    recurrence for each token, besides the matrices."""

    params: int
    state_bytes: int
    flops_per_token: int

    @classmethod
    def of(cls, config: Config) -> RecurrentLayer:
        if config.get("linear_num_value_heads"):
            return cls._gated_delta_net(config)
        if config.get("linear_attn_config") or config.get("linear_num_heads"):
            return cls._kimi_delta_attention(config)
        return cls._mamba2(config)

    @classmethod
    def _gated_delta_net(cls, config: Config) -> RecurrentLayer:
        hidden = integer(config, "hidden_size")
        heads = integer(config, "linear_num_value_heads")
        d_k = integer(config, "linear_key_head_dim")
        d_v = integer(config, "linear_value_head_dim")
        kernel = integer(config, "linear_conv_kernel_dim")
        keys, values = integer(config, "linear_num_key_heads") * d_k, heads * d_v
        channels = 2 * keys + values
        params = hidden * (channels + values + 2 * heads)  # and gates
        params += channels * kernel + 2 * heads + d_v + values * hidden
        # Decay, S^T k, the update and S^T q.
        flops = heads * d_k * d_v * (1 + 2 + 2 + 2)
        return cls(
            params, _state_bytes(config, heads * d_k * d_v, channels, kernel), flops
        )

    @classmethod
    def _kimi_delta_attention(cls, config: Config) -> RecurrentLayer:
        hidden = integer(config, "hidden_size")
        if delta := config.get("linear_attn_config"):
            heads, dim = integer(delta, "num_heads"), integer(delta, "head_dim")
            kernel = integer(delta, "short_conv_kernel_size")
        else:  # in transformers
            heads = integer(config, "linear_num_heads")
            dim = integer(config, "linear_head_dim")
            kernel = integer(config, "linear_conv_kernel_dim")
        inner = heads * dim
        params = 4 * hidden * inner + 3 * inner * kernel
        # The decay and the output's gate are of rank ``dim``; beta, biases, A and a norm.
        params += 2 * dim * (hidden + inner)
        params += hidden * heads + inner + heads + dim
        # Decay, S^T k, the update and S^T q.
        flops = inner * dim * (1 + 2 + 2 + 2)
        return cls(params, _state_bytes(config, inner * dim, 3 * inner, kernel), flops)

    @classmethod
    def _mamba2(cls, config: Config) -> RecurrentLayer:
        hidden = integer(config, "hidden_size")
        heads = integer(config, "mamba_n_heads")
        head_dim = integer(config, "mamba_d_head")
        state = integer(config, "mamba_d_state")
        kernel = integer(config, "mamba_d_conv")
        inner = heads * head_dim
        channels = inner + 2 * integer(config, "mamba_n_groups") * state
        params = hidden * (inner + channels + heads) + inner * hidden
        params += channels * kernel + 3 * heads + inner
        if config.get("mamba_conv_bias", True):
            params += channels
        if config.get("mamba_proj_bias"):
            params += inner + channels + heads + hidden
        # Decay, the update and S^T C.
        flops = inner * state * (1 + 2 + 2)
        return cls(params, _state_bytes(config, inner * state, channels, kernel), flops)


def _state_bytes(config: Config, matrix: int, channels: int, kernel: int) -> int:
    bits = dtype_bits(config.get("mamba_ssm_dtype") or "float32")
    conv = channels * (kernel - 1) * _CONV_BITS // 8
    return int(matrix * bits // 8 + conv)


# Compute of the encoder that turns images or sounds into embeddings of placeholders.
#
# A placeholder of a prompt stands for several patches of an image (or positions of a sound), each of
# which passes all layers of the encoder: attention's four matrices and those of the feed-forward
# network. Attention among the patches, the first convolution and the projection to the language
# model are left out.

# By the name of a configuration's part, the names that models give to a number.
_WIDTH = ("embed_dim", "d_model", "hidden_size")
_DEPTH = ("depth", "encoder_layers", "num_hidden_layers")
_FEED_FORWARD = ("intermediate_size", "encoder_ffn_dim")
_FEED_FORWARD_BY_WIDTH = 4
# Whose feed-forward networks have a gate, a third matrix.
_GATED = ("pixtral", "qwen2_5_vl")
# Qwen2-Audio joins each two positions.
_POSITIONS_PER_SOUND_TOKEN = 2


def encoder_flops_per_token(config: Config) -> float:
    """FLOPs of the encoder for one placeholder of a prompt, by a ``config.json``: those of
    images, of a model that takes sounds, too. 0.0 without an encoder, or for one that is
    not counted."""
    config = config.get("thinker_config") or config
    vision = config.get("vision_config") or {}
    if vision:
        return 2.0 * _params(vision) * _patches_per_token(config, vision)
    return 2.0 * _params(config.get("audio_config") or {}) * _POSITIONS_PER_SOUND_TOKEN


def _params(part: Config) -> int:
    """Parameters of all layers. 0 where they differ from layer to layer."""
    width, depth = _number(part, *_WIDTH), _number(part, *_DEPTH)
    by_width = _number(part, "mlp_ratio") or _FEED_FORWARD_BY_WIDTH
    inner = _number(part, *_FEED_FORWARD) or width * by_width
    gated = str(part.get("model_type", "")).startswith(_GATED)
    matrices = 3 if gated else 2
    return int(depth * (4 * width * width + matrices * width * inner))


def _patches_per_token(config: Config, vision: Config) -> float:
    merge = "spatial_merge_size"
    if side := _number(vision, merge) or _number(config, merge):
        return float(side**2)
    # InternVL and Llama 4 name the factor of each side, Gemma 3 the tokens of an image.
    shrink = _number(config, "downsample_ratio")
    if shrink := shrink or _number(vision, "pixel_shuffle_ratio"):
        return float(shrink**-2)
    tokens = _number(config, "mm_tokens_per_image")
    size, patch = _number(vision, "image_size"), _number(vision, "patch_size")
    if tokens and size and patch:
        return float((size // patch) ** 2 / tokens)
    return 1.0


def _number(part: Config, *names: str) -> float:
    """The first of these that a configuration has as a number, or 0."""
    values = (part.get(name) for name in names)
    return next((x for x in values if isinstance(x, int | float) and x), 0)


# Keys of a multimodal model's configuration that have its language model's.
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")

# Keys of models with parts that this module cannot count: layers of kinds that are not in
# ``layer_kinds``, KV shared by layers, sparse reads of the KV, embeddings per layer, an
# encoder.
_UNCOUNTED = (
    *("attn_layer_period", "ssm_cfg", "layers_block_type"),
    *("hybrid_override_pattern", "attn_layer_indices"),
    *("num_kv_shared_layers", "index_topk", "hidden_size_per_layer_input"),
    "is_encoder_decoder",
)
# A model has one of these if its recurrent layers can be counted.
_COUNTED_STATES = (
    *("linear_num_value_heads", "linear_num_heads", "mamba_n_heads"),
    "linear_attn_config",
)
# Families whose sliding-window layers SGLang gives a pool of their own.
_OWN_WINDOW_POOL = ("gpt_oss", "llama4", "gemma4", "mimo_v2", "step3p5")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model's size, for the cost model (BlendServe, section 2.3).

    num_params: P, all parameters of the language model.
    num_active_params: parameters used for one token: without the experts that are not chosen,
        and with the embedding table, as in the paper.
    num_layers: L, layers whose attention reads all tokens.
    hidden: H, width of attention over all heads. With latent attention, the mean of
        the widths of keys and values.
    kv_bytes_per_token: one token's KV in all layers that have attention, those with a
        sliding window included.
    weight_bytes: size of all weights in memory.
    kv_shards: number of devices among which one token's KV can be divided: the KV
        heads, 1 for latent attention. None: any number.
    in_8_bits: whether matrices can be multiplied at a device's rate for 8 bits.
    state_bytes: a request's recurrent states in all layers.
    window: tokens that sliding-window layers read at most, 0 without such layers. Layers
        with chunked attention count as full ones.
    window_kv_bytes_per_token: the part of ``kv_bytes_per_token`` in these layers.
    own_window_pool: whether SGLang keeps it in a pool of its own.
    other_flops_per_token: compute of recurrences and windows: 4 W H for each window layer, as if
        all windows were full.
    encoder_flops_per_token: compute of the encoder for each placeholder of images or sounds.
    shape: the operators of a forward pass. None: not counted.

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
    state_bytes: int = 0
    window: int = 0
    window_kv_bytes_per_token: float = 0.0
    own_window_pool: bool = False
    other_flops_per_token: int = 0
    encoder_flops_per_token: float = 0.0
    shape: ModelShape | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default or field.name == "shape":
                continue
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{field.name}={value!r} must be a positive number.")
        if self.num_active_params > self.num_params:
            raise ConfigError(
                f"num_active_params={self.num_active_params} is more than "
                f"num_params={self.num_params}."
            )

    @property
    def full_kv_bytes_per_token(self) -> float:
        """One token's KV in the layers that read all tokens."""
        return self.kv_bytes_per_token - self.window_kv_bytes_per_token

    def kv_replicas(self, tp: int) -> float:
        """Copies of a token's KV that ``tp`` devices have: more than 1 with more devices
        than KV heads."""
        return 1.0 if self.kv_shards is None else max(1.0, tp / self.kv_shards)

    @classmethod
    def from_hf_config(
        cls,
        config: Config,
        *,
        kv_dtype: str | None = None,
        quantization: str | None = None,
        quantised: bool = True,
    ) -> ModelSpec:
        """Count a decoder-only model from its Hugging Face ``config.json``.

        Dense models and mixtures of experts with multi-head, grouped-query or latent
        attention are supported, also between gated delta nets, Kimi Delta Attention or
        Mamba-2 layers. Matrices are counted exactly, norms and biases as in the common
        families. In a multimodal model the language model and the compute of its encoder are
        counted.

        Args:
            config: the parsed ``config.json``, or ``PretrainedConfig.to_dict()``, which
                also has the keys that a file may leave at their defaults.
            kv_dtype: dtype of the KV cache. None or ``"auto"``: that of the activations.
            quantization: SGLang's ``--quantization``, for a checkpoint that is not.
            quantised: False: weights have the bits of those that no method quantises.
                float32 counts as 16 bits, as engines load it.

        Raises:
            ConfigError: a key is missing, or the kind of model is unknown
                (UnknownQuantisation: the size of a weight).
        """
        encoder_flops = encoder_flops_per_token(config)
        config = text_config(config)
        _refuse_uncounted(config)
        stored = dtype_bits(
            config.get("torch_dtype") or config.get("dtype") or "bfloat16"
        )
        plain = min(stored, 16)
        bits = WeightBits(plain, plain, plain)
        if quantised:
            bits = weight_bits(config, plain, quantization)
        kv_bits = bits.plain if kv_dtype in (None, "auto") else dtype_bits(kv_dtype)
        return _count(config, bits, kv_bits, encoder_flops)


def _count(
    config: Config, bits: WeightBits, kv_bits: float, encoder_flops: float
) -> ModelSpec:
    """Count a language model by its part of a ``config.json``."""
    num_layers = integer(config, "num_hidden_layers")
    kinds = layer_kinds(config, num_layers)
    recurrent = RecurrentLayer.of(config) if RECURRENT in kinds else _NO_STATES
    num_full, num_recurrent, num_windows = map(kinds.count, (FULL, RECURRENT, WINDOW))
    attention = AttentionMatrices.of(_full_attention(config), num_full, bits)
    windowed = AttentionMatrices.of(_window_attention(config), num_windows, bits)
    full_kv = attention.kv_values * num_full * kv_bits / 8
    window_kv = windowed.kv_values * num_windows * kv_bits / 8
    window = integer(config, "sliding_window") if num_windows else 0
    feed_forward = FeedForward.of(config, num_layers, bits)
    hidden, vocab = integer(config, "hidden_size"), integer(config, "vocab_size")
    family = str(config.get("model_type", ""))
    # Whether one table is both the embedding and the output matrix.
    tied = config.get("tie_word_embeddings", family.startswith(("gemma", "cohere")))
    embedding = vocab * hidden * (1 if tied else 2)
    norms = (_norms(config) * num_layers + 1) * hidden
    mixers = attention.params * num_full + windowed.params * num_windows
    mixers += recurrent.params * num_recurrent
    num_params = embedding + norms + mixers + feed_forward.params
    stored_bits = (
        (embedding + norms) * bits.plain
        + mixers * bits.attention
        + feed_forward.params * bits.feed_forward
    )
    shape = ModelShape(
        mixers=(
            *attention.matrices,
            *(windowed.matrices if num_windows else ()),
            *_recurrent_matrices(recurrent, num_recurrent, hidden, bits),
        ),
        feed_forward=feed_forward.matrices,
        head=Matrix(hidden, vocab, 1, Split.COLUMNS, bits.plain),
        residual=hidden,
        num_layers=num_layers,
        expert_layers=feed_forward.expert_layers,
        decode_flops_per_kv_token=attention.decode_flops * num_full,
    )
    return ModelSpec(
        num_params=num_params,
        num_active_params=num_params - feed_forward.idle_params,
        num_layers=num_full,
        hidden=attention.width,
        kv_bytes_per_token=full_kv + window_kv,
        weight_bytes=math.ceil(stored_bits / 8),
        kv_shards=attention.kv_shards,
        in_8_bits=bits.rate_bits == 8,
        state_bytes=recurrent.state_bytes * num_recurrent,
        window=window,
        window_kv_bytes_per_token=window_kv,
        own_window_pool=bool(num_windows) and family.startswith(_OWN_WINDOW_POOL),
        other_flops_per_token=recurrent.flops_per_token * num_recurrent
        + 4 * window * windowed.width * num_windows,
        encoder_flops_per_token=encoder_flops,
        shape=shape,
    )


def _norms(config: Config) -> int:
    """Norms of a layer: before (and after) its halves."""
    if config.get("enable_moe_block"):  # and those of Gemma 4's experts
        return 7
    family = str(config.get("model_type", ""))
    return 4 if family.startswith(("gemma2", "gemma3", "gemma4")) else 2


def _full_attention(config: Config) -> Config:
    """With the heads of layers that read all tokens, of which Gemma 4's are larger and fewer."""
    own = {"head_dim": config.get("global_head_dim")}
    if config.get("attention_k_eq_v"):
        own["num_key_value_heads"] = config.get("num_global_key_value_heads")
    # How transformers writes the same.
    layers: Mapping[Any, Config] = config.get("per_layer_config") or {}
    for layer, kind in enumerate(config.get("layer_types") or ()):
        if kind == "full_attention":
            own |= layers.get(layer) or layers.get(str(layer)) or {}
    return {**config, **{key: value for key, value in own.items() if value}}


_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")


def _window_attention(config: Config) -> Config:
    """With the heads of layers that have a window, of which MiMo-V2 names its own."""
    own = {key: config[f"swa_{key}"] for key in _HEADS if config.get(f"swa_{key}")}
    return {**config, **own, "attention_k_eq_v": False}


_NO_STATES = RecurrentLayer(0, 0, 0)


def _recurrent_matrices(
    layer: RecurrentLayer, count: int, hidden: int, bits: WeightBits
) -> tuple[Matrix, ...]:
    """Recurrent layers' projections as one matrix: they share the hidden state."""
    if not count:
        return ()
    outputs = layer.params // hidden
    return (
        Matrix(hidden, outputs, count, Split.COLUMNS, bits.attention, bits.rate_bits),
    )


def text_config(config: Config) -> Config:
    """The part of a ``config.json`` that has the language model's, or all of it."""
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
    types = config.get("layer_types") or ()
    # Attention and a recurrence in one layer, or a recurrence of another kind.
    recurrent = "mamba" in types or "linear_attention" in types
    if config.get("mamba_d_state") and not recurrent:
        parts.append("mamba_d_state")
    delta = config.get("linear_attn_config")
    if delta and "kda_layers" not in delta:
        parts.append("linear_attn_config")
    elif recurrent and not any(config.get(key) for key in _COUNTED_STATES):
        parts.append("layer_types")
    if parts:
        raise ConfigError(
            f"model_type={config.get('model_type')!r} has parts that cannot be counted "
            f"from its configuration ({', '.join(parts)}); give ModelSpec its numbers."
        )


# In place of a model whose parameters cannot be counted: an 8B model, 8 KV heads.
TYPICAL_MODEL = ModelSpec.from_hf_config(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "dtype": "bfloat16",
    }
)


def counted_model(
    config: Config, *, kv_dtype: str | None, quantization: str | None
) -> ModelSpec:
    """:meth:`ModelSpec.from_hf_config`; weights of unknown bits have 16, with a warning.

    Raises:
        ConfigError: a key is missing, or the kind of model is unknown.
    """
    count = ModelSpec.from_hf_config
    try:
        return count(config, kv_dtype=kv_dtype, quantization=quantization)
    except UnknownQuantisation as error:
        logger.warning("Planning with weights of 16 bits: %s", error)
        return count(config, kv_dtype=kv_dtype, quantised=False)
