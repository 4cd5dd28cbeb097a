"""Whether a model can be there, before SGLang is imported to load it."""

from __future__ import annotations

import argparse
import json
import os
from contextlib import suppress
from functools import partial
from pathlib import Path

from ..errors import ConfigError
from ..inputs import urls

# Files of which a directory with a model has one, also if it is a LoRA adapter.
_MODEL_FILES = (
    "config.json", "params.json", "model_index.json", "adapter_config.json", "*.gguf"
)  # fmt: skip
_ADAPTER_FILES = ("adapter_config.json",)
_KINDS = {_MODEL_FILES: "model's", _ADAPTER_FILES: "LoRA adapter's"}
_TOKENIZER_FILES = (
    *_MODEL_FILES, "tokenizer.json", "tokenizer_config.json", "tekken.json",
    "vocab.json", "vocab.txt", "*.model", "*.tiktoken",
)  # fmt: skip
HUB_TIMEOUT_S = 5.0


def check_model(known: argparse.Namespace) -> None:
    """Look for the model, and all files of one, that options name.

    Args:
        known: SGLang's arguments, as far as they are known without SGLang.

    Raises ConfigError if one of them cannot be there.
    """
    places = {
        "model_path": _MODEL_FILES,
        "tokenizer_path": _TOKENIZER_FILES,
        "speculative_draft_model_path": _MODEL_FILES,
    }
    for name, files in places.items():
        if name in known:
            flag = "--" + name.replace("_", "-")
            revision = getattr(known, "revision", None)
            check_model_path(getattr(known, name), flag, revision=revision, files=files)
    for adapter in getattr(known, "lora_paths", None) or ():
        if not adapter.startswith("{"):  # JSON
            path = adapter.partition("=")[2] or adapter
            check_model_path(path, "--lora-paths", files=_ADAPTER_FILES)
    template = getattr(known, "chat_template", "")
    if template.endswith((".jinja", ".json")) and not os.path.isfile(template):
        raise ConfigError(f"--chat-template {template}: there is no such file.")
    try:
        json.loads(getattr(known, "json_model_override_args", "{}"))
    except ValueError as error:
        raise ConfigError(f"--json-model-override-args is not JSON: {error}.") from None


def check_model_path(
    name: str,
    flag: str,
    *,
    revision: str | None = None,
    files: tuple[str, ...] = _MODEL_FILES,
) -> None:
    """Look for a model's files, here or on the Hugging Face hub.

    Args:
        name: a directory, a file, a URL, the name of a repository, or a GGUF file in a
            repository as ``owner/name:QUANT`` or ``owner/name/path/file.gguf``.
        flag: the option that gave it, for messages.
        files: names and patterns, one of which is in a directory.

    Raises ConfigError if it is in none of these places, or the hub does not answer.
    """
    if not name:
        raise ConfigError(f"{flag} has an empty value: name a model.")
    path = Path(name).expanduser()
    if os.path.isfile(path) or name in ("dummy", "none"):
        return
    if os.path.isdir(path):
        if not any(any(path.glob(pattern)) for pattern in files):
            kind = _KINDS.get(files, "tokenizer's")
            raise ConfigError(
                f"{flag} {name} has no {' or '.join(files)}: it is not a {kind} "
                "directory."
            )
        return
    if urls.is_url(name) or os.environ.get("SGLANG_USE_MODELSCOPE"):
        return  # SGLang fetches it
    _check_repository(name, flag, revision, files)


def _repository(name: str) -> tuple[str, str | None]:
    """The repository that a name is in, and the GGUF file there if it names one."""
    owner, _, rest = name.partition("/")
    if ":" in rest:
        return name.rpartition(":")[0], None
    repository, _, file = rest.partition("/")
    if file.endswith(".gguf"):
        return f"{owner}/{repository}", file
    return name, None


def cached_snapshot(name: str, revision: str | None) -> str | None:
    """The config.json of a repository in the Hugging Face cache. Its path has the commit."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):
        found = huggingface_hub.try_to_load_from_cache(
            _repository(name)[0], "config.json", revision=revision
        )
        return found if isinstance(found, str) else None
    return None


def _check_repository(
    name: str, flag: str, revision: str | None, files: tuple[str, ...]
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    repository, file = _repository(name)
    find = partial(
        huggingface_hub.try_to_load_from_cache, repository, revision=revision
    )
    ask = partial(huggingface_hub.HfApi().model_info, repository, revision=revision)
    try:
        found = map(find, files if file is None else (file,))
        if any(isinstance(path, str) for path in found):
            return
        reason: str | None = "HF_HUB_OFFLINE is set"
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            reason = urls.why_not_on_hub(partial(ask, timeout=HUB_TIMEOUT_S))
    except HFValidationError:
        raise ConfigError(
            f"{flag} {name}: there is no such directory, and {urls.NO_REPOSITORY}."
        ) from None
    if reason is not None:
        raise ConfigError(
            f"{flag} {name} is neither a directory here nor in the Hugging Face cache, "
            f"and {reason}."
        )
