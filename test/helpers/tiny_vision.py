"""A tiny random Qwen2.5-VL with a byte-level tokenizer and a processor, and images."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np

from sglang_batch.demo_model import _byte_symbols

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{- part.text -}}
{%- else -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def image_url(seed: int, height: int = 84, width: int = 112) -> str:
    """A random image as a data: URL."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3))
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def write_tiny_vision(folder: Path) -> None:
    """Write the checkpoint. No file of another is needed."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLVideoProcessor,
    )
    from transformers.models.qwen2_vl import Qwen2VLImageProcessor

    tokens = Tokenizer(models.BPE(vocab=_byte_symbols(), merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[SPECIAL[1], *SPECIAL[3:]],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    ids = dict(zip(SPECIAL, range(256, 256 + len(SPECIAL)), strict=True))
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 272,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_scaling": {
                "type": "mrope",
                "rope_type": "default",
                "mrope_section": [2, 3, 3],
            },
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "use_sliding_window": False,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 56,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    for weight in model.parameters():
        if weight.dim() >= 2:  # answers that change from token to token
            torch.nn.init.normal_(weight, 0.0, 1.5 * weight[0].numel() ** -0.5)
    model.save_pretrained(folder)
    images = Qwen2VLImageProcessor(
        min_pixels=28 * 28,
        max_pixels=28 * 28 * 64,
        patch_size=14,
        merge_size=2,
        temporal_patch_size=2,
    )
    images.save_pretrained(folder)
    videos = Qwen2VLVideoProcessor(patch_size=14, merge_size=2, temporal_patch_size=2)
    processor = Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=TEMPLATE)
    processor.save_pretrained(folder)
