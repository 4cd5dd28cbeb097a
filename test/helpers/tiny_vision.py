"""Tiny random vision models with a byte-level tokenizer and a processor, and images."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sglang_batch.run.demo_model import _byte_symbols

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
PIXTRAL_SPECIAL = (
    "<s>", "<|im_start|>", "<|im_end|>", "<pad>", "[IMG]", "[IMG_BREAK]", "[IMG_END]",
)  # fmt: skip
# Of the language models.
TINY_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
}
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


def image_of(url: str) -> Any:
    """The image of a data: URL."""
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def write_tiny_vision(folder: Path) -> None:
    """Write a Qwen2.5-VL, which has one run of placeholders per image."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLVideoProcessor,
    )
    from transformers.models.qwen2_vl import Qwen2VLImageProcessor

    tokenizer = byte_tokenizer(SPECIAL, pad="<|endoftext|>")
    ids = dict(zip(SPECIAL, range(256, 256 + len(SPECIAL)), strict=True))
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 272,
            **TINY_TEXT,
            "rope_scaling": {
                "type": "mrope",
                "rope_type": "default",
                "mrope_section": [2, 3, 3],
            },
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
    write_weights(Qwen2_5_VLForConditionalGeneration(config), folder)
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


def write_tiny_mistral3(folder: Path) -> None:
    """Write a Mistral 3, which has a run of placeholders for each row of an image."""
    from transformers import (
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        PixtralImageProcessor,
        PixtralProcessor,
    )

    tokenizer = byte_tokenizer(PIXTRAL_SPECIAL, pad="<pad>")
    ids = dict(zip(PIXTRAL_SPECIAL, range(256, 272), strict=False))
    config = Mistral3Config(
        text_config={
            "model_type": "mistral",
            "vocab_size": 256 + len(PIXTRAL_SPECIAL),
            **TINY_TEXT,
            "head_dim": 16,
            "eos_token_id": ids["<|im_end|>"],
            "sliding_window": None,
        },
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "head_dim": 16,
            "hidden_act": "silu",  # SGLang has no other
            "image_size": 224,
            "patch_size": 14,
        },
        image_token_index=ids["[IMG]"],
        vision_feature_layer=-1,
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    write_weights(Mistral3ForConditionalGeneration(config), folder)
    images = PixtralImageProcessor(
        patch_size={"height": 14, "width": 14}, size={"longest_edge": 224}
    )
    template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "[IMG]")
    PixtralProcessor(
        images, tokenizer, patch_size=14, spatial_merge_size=2, chat_template=template
    ).save_pretrained(folder)


def byte_tokenizer(special: Sequence[str], pad: str) -> Any:
    """Bytes have the ids 0 to 255, special tokens those that follow."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = Tokenizer(models.BPE(vocab=_byte_symbols(), merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        eos_token="<|im_end|>",
        pad_token=pad,
        additional_special_tokens=[special[1], *special[3:]],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def write_weights(model: Any, folder: Path) -> None:
    """Write a model with random weights in float32."""
    import torch

    torch.manual_seed(0)
    for weight in model.float().parameters():
        if weight.dim() >= 2:  # answers that change from token to token
            torch.nn.init.normal_(weight, 0.0, 1.5 * weight[0].numel() ** -0.5)
    model.save_pretrained(folder)
