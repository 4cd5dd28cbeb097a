"""Size of a model, counted from its ``config.json``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import ConfigError
from .encoder_work import encoder_flops_per_token
from .layer_kinds import FULL, RECURRENT, WINDOW, RecurrentLayer, layer_kinds
from .layer_matrices import AttentionMatrices, FeedForward, Matrix, ModelShape, Split
from .weight_bits import Config, WeightBits, dtype_bits, integer, weight_bits

# Keys of a multimodal model's configuration that have its language model's.
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")

# Keys of models with parts that this module cannot count: layers of kinds that are not in
# ``layer_kinds``, KV shared by layers, sparse reads of the KV, embeddings per layer, an
# encoder.
_UNCOUNTED = (
    *("attn_layer_period", "ssm_cfg", "layers_block_type"),
    *("hybrid_override_pattern", "attn_layer_indices"),
    *("num_kv_shared_layers", "index_topk", "hidden_size_per_layer_input"),
    *("global_head_dim", "is_encoder_decoder"),
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
    num_active_params: parameters used for one token. All of them for a dense model, as
        in the paper (including the embedding table: 8e9 for Llama-3.1-8B). For a
        mixture of experts, without the experts that are not chosen.
    num_layers: L, layers whose attention reads all tokens.
    hidden: H, width of attention over all heads. With latent attention, the mean of
        the widths of keys and values.
    kv_bytes_per_token: one token's KV in all layers that have attention, those with a
        sliding window included. Recurrent layers have none.
    weight_bytes: size of all weights in memory.
    kv_shards: number of devices among which one token's KV can be divided: the KV
        heads, 1 for latent attention. None: any number.
    in_8_bits: whether weights and activations have 8 bits, so that matrices can be
        multiplied at a device's rate for these.
    state_bytes: a request's recurrent states in all layers. A decode step reads and
        writes them, however long the request is.
    window: tokens that sliding-window layers read at most, 0 without such layers. Layers
        with chunked attention count as full ones.
    window_kv_bytes_per_token: the part of ``kv_bytes_per_token`` in these layers.
    own_window_pool: whether SGLang keeps it in a pool of its own.
    other_flops_per_token: compute of recurrences and windows, which does not grow with
        the prompt: 4 W H for each window layer, as if all windows were full.
    encoder_flops_per_token: compute of the encoder of images or sounds for each of their
        placeholders.
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
        attention are supported, also between gated delta nets, Kimi Delta Attention or
        Mamba-2 layers. Matrices are counted exactly, norms and biases as in the common
        families. In a multimodal model the language model and the compute of its encoder
        are counted, and in a model with extra layers for multi-token prediction those
        for the next token.

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
        encoder_flops = encoder_flops_per_token(config)
        config = _text_config(config)
        _refuse_uncounted(config)
        num_layers = integer(config, "num_hidden_layers")
        kinds = layer_kinds(config, num_layers)
        stored = dtype_bits(
            config.get("torch_dtype") or config.get("dtype") or "bfloat16"
        )
        bits = weight_bits(config, weight_dtype, min(stored, 16), quantization)
        recurrent = RecurrentLayer.of(config) if RECURRENT in kinds else _NO_STATES
        num_recurrent, num_windows = kinds.count(RECURRENT), kinds.count(WINDOW)
        num_attention = num_layers - num_recurrent
        attention = AttentionMatrices.of(config, num_attention, bits)
        window = integer(config, "sliding_window") if num_windows else 0
        feed_forward = FeedForward.of(config, num_layers, bits)
        hidden, vocab = integer(config, "hidden_size"), integer(config, "vocab_size")
        embedding = vocab * hidden
        if not _tied(config):
            embedding *= 2
        norms = _layer_norms(config) * num_layers + hidden
        mixers = attention.params * num_attention + recurrent.params * num_recurrent
        num_params = embedding + norms + mixers + feed_forward.params

        kv_bits = bits.plain if kv_dtype in (None, "auto") else dtype_bits(kv_dtype)
        stored_bits = (
            (embedding + norms) * bits.plain
            + mixers * bits.attention
            + feed_forward.params * bits.feed_forward
        )
        family = str(config.get("model_type", ""))
        return cls(
            num_params=num_params,
            num_active_params=num_params - feed_forward.idle_params,
            num_layers=kinds.count(FULL),
            hidden=attention.width,
            kv_bytes_per_token=attention.kv_values * num_attention * kv_bits / 8,
            weight_bytes=math.ceil(stored_bits / 8),
            kv_shards=attention.kv_shards,
            in_8_bits=bits.in_8_bits,
            state_bytes=recurrent.state_bytes * num_recurrent,
            window=window,
            window_kv_bytes_per_token=attention.kv_values * num_windows * kv_bits / 8,
            own_window_pool=bool(num_windows) and family.startswith(_OWN_WINDOW_POOL),
            other_flops_per_token=recurrent.flops_per_token * num_recurrent
            + 4 * window * attention.width * num_windows,
            encoder_flops_per_token=encoder_flops,
            shape=ModelShape(
                mixers=(
                    *attention.matrices,
                    *_recurrent_matrices(recurrent, num_recurrent, hidden, bits),
                ),
                feed_forward=feed_forward.matrices,
                head=Matrix(hidden, vocab, 1, Split.COLUMNS, bits.plain),
                residual=hidden,
                num_layers=num_layers,
                expert_layers=feed_forward.expert_layers,
                decode_flops_per_kv_token=attention.decode_flops * kinds.count(FULL),
            ),
        )


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


def _layer_norms(config: Config) -> int:
    """Parameters of the norms before (and after) a layer's two halves."""
    family = str(config.get("model_type", ""))
    norms = 4 if family.startswith(("gemma2", "gemma3")) else 2
    return norms * integer(config, "hidden_size")


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


# Stands for a model whose parameters cannot be counted: an 8B model, 8 KV heads.
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
