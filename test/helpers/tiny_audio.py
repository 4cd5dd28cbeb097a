"""A tiny random Qwen2-Audio with a byte-level tokenizer and a processor, and sounds."""

from __future__ import annotations

import base64
import io
import wave
from pathlib import Path

import numpy as np
from tiny_vision import TEMPLATE, TINY_TEXT, byte_tokenizer, write_weights

RATE = 16000
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|AUDIO|>",
    "<|audio_eos|>",
)  # fmt: skip


def sound(seed: int, seconds: float = 0.6) -> bytes:
    """A random sound as the bytes of a WAV file."""
    samples = np.random.default_rng(seed).normal(0, 8000, int(RATE * seconds))
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes(samples.clip(-32768, 32767).astype("<i2").tobytes())
    return file.getvalue()


def sound_url(seed: int, seconds: float = 0.6) -> str:
    """A random sound as a data: URL."""
    return "data:audio/wav;base64," + base64.b64encode(sound(seed, seconds)).decode()


def write_tiny_audio(folder: Path) -> None:
    """Write the checkpoint."""
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    tokenizer = byte_tokenizer(SPECIAL, pad="<|endoftext|>")
    ids = dict(zip(SPECIAL, range(256, 272), strict=False))
    config = Qwen2AudioConfig(
        audio_config={
            "num_mel_bins": 16,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "d_model": 32,
            "max_source_positions": 1500,
        },
        text_config={
            "model_type": "qwen2",
            "vocab_size": 256 + len(SPECIAL),
            **TINY_TEXT,
            "eos_token_id": ids["<|im_end|>"],
            "use_sliding_window": False,
        },
        audio_token_index=ids["<|AUDIO|>"],
        tie_word_embeddings=False,
    )
    write_weights(Qwen2AudioForConditionalGeneration(config), folder)
    _name_as_published(folder / "model.safetensors")
    template = TEMPLATE.replace(
        "<|vision_start|><|image_pad|><|vision_end|>",
        "<|audio_bos|><|AUDIO|><|audio_eos|>",
    )
    features = WhisperFeatureExtractor(feature_size=16, chunk_length=30)
    Qwen2AudioProcessor(features, tokenizer, chat_template=template).save_pretrained(
        folder
    )


def _name_as_published(file: Path) -> None:
    """Undo what ``transformers`` adds to names, for SGLang; both load the result."""
    from safetensors.torch import load_file, save_file

    prefix = "language_model.model."
    weights = {
        name.replace(f"{prefix}model.", prefix): weight
        for name, weight in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
