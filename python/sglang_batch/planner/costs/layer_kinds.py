"""Layers of a model by how they see the past: all tokens, a window, or a state.

A recurrent layer folds all tokens into a state of fixed size, which a decode step reads and
writes. Gated delta nets (Yang et al., "Gated Delta Networks", 2024, equation 10) keep a
matrix ``S`` of ``d_k x d_v`` for each value head::

    S <- a S + b k (v - a S^T k)^T,   o = S^T q

Kimi Delta Attention ("Kimi Linear", 2025, equation 1) has a decay ``a`` of its own for each channel of
``k``. Mamba-2 (Dao and Gu, "Transformers are SSMs", 2024, equation 1) keeps one of ``d_state x d_head``::

    S <- a S + B x^T,                 y = S^T C

All pass their inputs through a short causal convolution, whose last ``kernel - 1`` inputs
are part of the state.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ConfigError
from .weight_bits import Config, dtype_bits, integer

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
    """The kind of each layer.

    Raises:
        ConfigError: one is unknown, or all keep states, so that there is no KV.
    """
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
    """One recurrent layer.

    params: its parameters.
    state_bytes: size of one request's state.
    flops_per_token: of the recurrence, besides the matrices.
    """

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
