"""Bits per weight and per KV value of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError

Config = Mapping[str, Any]

_DTYPE_BITS = {
    **dict.fromkeys(("float32", "fp32", "float"), 32),
    **dict.fromkeys(("bfloat16", "bf16", "float16", "fp16", "half"), 16),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "int8"), 8),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), 8),
    **dict.fromkeys(("int4", "fp4"), 4),
}


def dtype_bits(dtype: object) -> int:
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
    config: Config, weight_dtype: str | None, plain: int
) -> tuple[float, float, float]:
    """Bits of a weight outside the layers, in attention and in the feed-forward network.

    Args:
        config: a ``config.json``, which may have a ``quantization_config``.
        weight_dtype: a dtype to use instead. None or ``"auto"``: as configured.
        plain: bits of a weight that is not quantised.

    Raises:
        ConfigError: the dtype or the quantisation is unknown.
    """
    if weight_dtype not in (None, "auto"):
        given = dtype_bits(weight_dtype)
        return (given,) * 3 if given >= 16 else (plain, given, given)
    quantization = config.get("quantization_config")
    if not quantization:
        return plain, plain, plain
    bits = _quantised_bits(quantization)
    # Publishers of MXFP4 models quantise only the experts.
    mxfp4 = quantization.get("quant_method") == "mxfp4"
    return plain, plain if mxfp4 else bits, bits


def _quantised_bits(quantization: Config) -> float:
    """Bits of a quantised weight, including its share of the scales."""
    method = str(quantization.get("quant_method", "")).lower()
    algorithm = str(quantization.get("quant_algo", "")).lower()
    group = quantization.get("group_size")
    bits = quantization.get("bits")
    if "fp8" in method or "fp8" in algorithm:
        block = quantization.get("weight_block_size")
        return 8 + (32 / math.prod(block) if block else 0)
    if "fp4" in method or "fp4" in algorithm:
        return 4.25 if "mx" in method + algorithm else 4.5  # scales of 8 bits
    if method == "bitsandbytes":
        return 4 + 16 / 64 if quantization.get("load_in_4bit") else 8
    if method == "compressed-tensors":
        for scheme in (quantization.get("config_groups") or {}).values():
            weights = scheme.get("weights") or {}
            bits, group = weights.get("num_bits"), weights.get("group_size")
            break
    if not bits:
        raise ConfigError(
            f"quantization_config with quant_method={method!r} does not say the bits of a "
            "weight; give weight_dtype."
        )
    # A group has a scale of 16 bits and a zero point.
    return float(bits + ((16 + bits) / group if group and group > 0 else 0))
