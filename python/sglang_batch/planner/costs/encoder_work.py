"""Compute of the encoder that turns images or sounds into embeddings of placeholders.

A placeholder of a prompt stands for several patches of an image (or positions of a sound), each of
which passes all layers of the encoder: attention's four matrices and those of the feed-forward
network. Attention among the patches, the first convolution and the projection to the language
model are left out.
"""

from __future__ import annotations

from .weight_bits import Config

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
    """FLOPs of the encoder for one placeholder in a prompt.

    Args:
        config: a ``config.json``. One without ``vision_config`` and ``audio_config`` has no
            encoder.

    Returns:
        Those of images, of a model that takes sounds, too. 0.0 for a model without an
        encoder, or one that is not counted.
    """
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
