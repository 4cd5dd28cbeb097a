"""Which models make embeddings, and how they are loaded."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel
from transformers.models.auto import modeling_auto

from ...errors import ConfigError
from .declared_pooling import CheckpointFiles, declared_pooling, declares_pooling
from .embedding_model import EmbeddingModel, wrap_embedding

# Ends of the names of classes that generate, also of those that bring their own code.
_GENERATING = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_AUTO_GENERATING = {"AutoModelForCausalLM", "AutoModelForSeq2SeqLM"}
# Heads that training left behind. All others make something else than embeddings.
_TRAINING_HEADS = ("ForMaskedLM", "ForPreTraining")


def embedding_reason(
    path: str,
    *,
    asked: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> str | None:
    """Why a model makes embeddings, or None if it generates.

    Args:
        asked: the user says that it makes embeddings.

    Raises:
        ConfigError: its configuration cannot be read, or it makes neither.
    """
    if asked:
        return "--is-embedding"
    config = _config(path, revision, trust_remote_code)
    if declares_pooling(CheckpointFiles(path, revision)):
        return "its checkpoint declares a pooling"
    names: list[str] = config.architectures or []
    own_code = getattr(config, "auto_map", None) or {}
    if not names or _AUTO_GENERATING & own_code.keys() or any(map(_generates, names)):
        return None
    for name in names:
        _, head, kind = name.partition("For")
        if head and head + kind not in _TRAINING_HEADS:
            raise ConfigError(
                f"--model-path {path} is a {name}, which neither generates nor makes "
                "embeddings; --is-embedding makes them without its head."
            )
    return f"{', '.join(names)} does not generate"


def load_embedding_model(
    path: str,
    *,
    dtype: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    attention_kind: str | None = None,
    context_len: int | None = None,
) -> EmbeddingModel:
    """Load an embedding model; arguments are those of :func:`..model.load_model`.

    Raises:
        ConfigError: the model or its pooling cannot be loaded, or cannot run.
    """
    given: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    given["revision"] = revision
    config = _config(path, revision, trust_remote_code)
    kind = _class_of(path, config)
    if attention_kind is not None:
        given["attn_implementation"] = attention_kind
    try:
        model, info = kind.from_pretrained(
            path, config=config, dtype=dtype, output_loading_info=True, **given
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"--model-path {path} cannot be loaded by transformers: {error}"
        ) from error
    # BERT's own pooler, which only its classifiers use, is often not there.
    missing = [name for name in info["missing_keys"] if "pooler" not in name]
    if missing:
        raise ConfigError(
            f"--model-path {path} has no {', '.join(sorted(missing)[:3])}"
        )
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    pooling = declared_pooling(CheckpointFiles(path, revision))
    return wrap_embedding(model.to(device), pooling, context_len)


def _config(path: str, revision: str | None, trust_remote_code: bool) -> Any:
    try:
        return AutoConfig.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"--model-path {path} cannot be loaded by transformers: {error}"
        ) from error


def _generates(name: str) -> bool:
    tables = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )
    known: set[str] = set()
    for names in (names for table in tables for names in table.values()):
        known.update([names] if isinstance(names, str) else names)
    return name.endswith(_GENERATING) or name in known


def _class_of(path: str, config: Any) -> Any:
    """The class without a head; of an encoder-decoder, its encoder."""
    encoder = modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.get(config.model_type)
    for name in (*(config.architectures or ()), encoder):
        if name and name.endswith("EncoderModel") and hasattr(transformers, name):
            config.is_encoder_decoder = False  # some of these classes want it so
            return getattr(transformers, name)
    if config.is_encoder_decoder:
        raise ConfigError(
            f"--model-path {path} has an encoder and a decoder; embeddings are made by "
            "encoders that transformers has as a model, such as T5EncoderModel."
        )
    return AutoModel
