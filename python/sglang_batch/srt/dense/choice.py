"""Whether SGLang can run a model."""

from __future__ import annotations

from typing import Any

import transformers
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.utils.hf_transformers_utils import get_config

from ...dense.embedding.embedding_loading import embedding_reason
from ...errors import ConfigError


def why_not_sglang(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> str | None:
    """Why SGLang cannot run a model, or None if it can.

    It runs models that it has a class for, and those of transformers whose attention it
    can replace.

    Raises:
        ConfigError: the model's configuration cannot be read.
    """
    try:
        config: Any = get_config(
            path, trust_remote_code=trust_remote_code, revision=revision
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--model-path {path}: {error}") from error
    names = config.architectures or []
    if not names:
        return f"the configuration of {path} names no architecture"
    if any(ModelRegistry.is_arch_supported(name) for name in names):
        return None
    embeds = embedding_reason(
        path, revision=revision, trust_remote_code=trust_remote_code
    )
    if embeds is not None:  # SGLang pools those of transformers in its own way
        return f"SGLang has no {names[0]}, and {embeds}"
    remote = "AutoModel" in (getattr(config, "auto_map", None) or {})
    for name in names:
        kind = getattr(transformers, name, None)
        if kind is None and remote:
            continue  # SGLang decides when it has loaded the code
        if kind is None or not kind.is_backend_compatible():
            return f"SGLang has no {name}, and cannot run that of transformers"
    return None
