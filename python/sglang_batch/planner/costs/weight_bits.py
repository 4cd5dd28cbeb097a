"""Bits per weight and per KV value of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
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
    in_8_bits: whether activations are quantised, too, so that matrices are multiplied
        at the rate of 8 bits.
    in_4_bits: the same with 4 bits.
    """

    plain: float
    attention: float
    feed_forward: float
    in_8_bits: bool = False
    in_4_bits: bool = False

    @property
    def rate_bits(self) -> int:
        """Bits of the operands that are multiplied: 16, 8 or 4."""
        if self.in_4_bits:
            return 4
        return 8 if self.in_8_bits else 16


# Attention, feed-forward network, and whether activations have 8 bits, for methods whose
# weights are of one kind. SGLang quantises with most of them while it loads.
_METHODS: dict[str, tuple[float, float, bool]] = {
    **dict.fromkeys(("fp8", "fbgemm_fp8", "modelopt_fp8", "w8a8_fp8"), (8, 8, True)),
    "w8a8_int8": (8, 8, True),
    "mxfp8": (8.25, 8.25, True),
    **dict.fromkeys(
        ("modelopt_fp4", "nvfp4", "nvfp4_online", "petit_nvfp4"), (4.5, 4.5, False)
    ),
    "quark_mxfp4": (4.25, 4.25, False),
    "mxfp4": (16, 4.25, False),  # the experts only
    "w4afp8": (8, 4 + 16 / 128, True),
    "quark_int4fp8_moe": (8, 4, True),
    "bitsandbytes": (4.25, 4.25, False),
}
# Methods of 4-bit weights whose activations have 4 bits, too.
_IN_4_BITS = ("modelopt_fp4", "nvfp4", "nvfp4_online")
# Methods of which quantization_config has the bits and the size of a group.
_BY_GROUPS = {"awq", "awq_marlin", "gptq", "gptq_marlin", "auto-round", "moe_wna16"}


def dtype_bits(dtype: object) -> float:
    """Bits of one value, for a dtype's name in torch, SGLang or a ``config.json``.

    Raises:
        ConfigError: the name is unknown.
    """
    name = str(dtype).removeprefix("torch.").lower()
    if name not in _DTYPE_BITS:
        raise ConfigError(
            f"dtype={name!r} is not known; choose one of {', '.join(_DTYPE_BITS)}."
        )
    return _DTYPE_BITS[name]


def weight_bits(
    config: Config, weight_dtype: str | None, plain: float, quantization: str | None
) -> WeightBits:
    """How a model's weights are stored.

    Args:
        config: a ``config.json``, which may have a ``quantization_config``.
        weight_dtype: a dtype to use instead. None or ``"auto"``: as configured.
        plain: bits of a weight that is not quantised.
        quantization: SGLang's ``--quantization``, for a checkpoint that is not.

    Raises:
        ConfigError: the dtype is unknown.
        UnknownQuantisation: the size of a quantised weight is not known.
    """
    if weight_dtype not in (None, "auto"):
        given = dtype_bits(weight_dtype)
        if given >= 16:
            return WeightBits(given, given, given)
        return WeightBits(plain, given, given)
    stored = config.get("quantization_config") or {}
    method = str(stored.get("quant_method") or quantization or "").lower()
    if method in ("", "unquant"):
        return WeightBits(plain, plain, plain)
    algorithm = str(stored.get("quant_algo", "")).lower()
    if method == "modelopt" and algorithm in ("fp8", "nvfp4"):
        method = algorithm
    attention, feed_forward, in_8_bits = _quantised(method, stored)
    return WeightBits(
        plain, min(attention, plain), feed_forward, in_8_bits, method in _IN_4_BITS
    )


def _quantised(method: str, stored: Config) -> tuple[float, float, bool]:
    if method in _BY_GROUPS and stored.get("bits"):
        each = _in_groups(stored["bits"], stored.get("group_size"))
        return each, each, False
    if method == "compressed-tensors":
        return _compressed(stored)
    if method == "quark":
        return _quark(stored)
    if method == "bitsandbytes" and stored and not stored.get("load_in_4bit"):
        return 8, 8, False
    if method not in _METHODS:
        raise UnknownQuantisation(
            f"the bits of a weight are not known for quantization {method!r}, only for "
            f"{', '.join(sorted(_METHODS.keys() | _BY_GROUPS))}; give weight_dtype."
        )
    attention, feed_forward, in_8_bits = _METHODS[method]
    if block := stored.get("weight_block_size"):
        scale = 32 / math.prod(block) if method == "fp8" else 0
        attention, feed_forward = attention + scale, feed_forward + scale
    return attention, feed_forward, in_8_bits


def _in_groups(bits: float, group: int | None) -> float:
    """A group has a scale of 16 bits and a zero point."""
    return float(bits + ((16 + bits) / group if group and group > 0 else 0))


def _compressed(stored: Config) -> tuple[float, float, bool]:
    groups: Config = stored.get("config_groups") or {}
    scheme: Config = next(iter(groups.values()), {})
    weights = scheme.get("weights") or {}
    bits, group = weights.get("num_bits"), weights.get("group_size")
    if not bits:
        raise UnknownQuantisation(
            "quantization_config with quant_method='compressed-tensors' does not say the "
            "bits of a weight; give weight_dtype."
        )
    each = _in_groups(bits, group)
    if weights.get("type") == "float" and group:
        each = bits + 8 / group
    inputs = scheme.get("input_activations") or {}
    return each, each, bits == inputs.get("num_bits") == 8


def _quark(stored: Config) -> tuple[float, float, bool]:
    scheme = stored.get("global_quant_config") or {}
    weights = scheme.get("weight") or {}
    if isinstance(weights, list | tuple):  # a scheme in two stages
        weights = weights[-1]
    name = str(weights.get("dtype", "")).lower()
    inputs = scheme.get("input_tensors") or {}
    if name.startswith("fp8") or name == "int8":
        return 8, 8, bool(inputs)
    if name == "fp4":
        each = 4 + 8 / (weights.get("group_size") or 32)
    elif name in ("int4", "uint4"):
        each = _in_groups(4, weights.get("group_size"))
    else:
        raise UnknownQuantisation(
            f"quantization_config with quant_method='quark' has weights of {name!r}; give "
            "weight_dtype."
        )
    return each, each, False


def integer(config: Config, key: str) -> int:
    """A whole number of a configuration.

    Raises:
        ConfigError: it is missing, or something else.
    """
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
