"""Whether a model can be there, before SGLang is imported to load it."""

from __future__ import annotations

import argparse
import json
import os
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from ..batch_api.lines import ModelLimits
from ..errors import ConfigError
from ..inputs import urls
from ..planner.costs.model_spec import text_config

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
# The module of SGLang that names its own chat templates.
_TEMPLATES = "srt/parser/conversation.py"
# Keys of a model's configuration that SGLang reads for the length of its context.
_CONTEXT_KEYS = (
    "max_sequence_length", "seq_length", "max_seq_len", "model_max_length",
    "max_position_embeddings",
)  # fmt: skip
_LONGER_CONTEXT = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"


def check_model(known: argparse.Namespace) -> None:
    """Look for the model, and all files of one, that options name.

    Args:
        known: SGLang's arguments, as far as they are known without SGLang. It gets
            ``limits``, what the model allows in a request.

    Raises ConfigError if one of them cannot be there, or its configuration be read.
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
    adapters = dict(map(_adapter, getattr(known, "lora_paths", None) or ()))
    for path in adapters.values():
        check_model_path(path, "--lora-paths", files=_ADAPTER_FILES)
    if (template := getattr(known, "chat_template", "")) and not os.path.isfile(
        template
    ):
        package = Path(str(metadata.distribution("sglang").locate_file("sglang")))
        if f'"{template}"' not in (package / _TEMPLATES).read_text("utf-8"):
            raise ConfigError(
                f"--chat-template {template}: there is no such file, nor a template of "
                "SGLang's with this name."
            )
    loader = getattr(known, "model_loader_extra_config", None)
    _object("--model-loader-extra-config", loader)
    known.limits = _limits(known, frozenset(adapters))


def _limits(known: argparse.Namespace, adapters: frozenset[str]) -> ModelLimits:
    config = text_config(model_config(known))
    found = map(config.get, _CONTEXT_KEYS)
    longest = max((int(x) for x in found if isinstance(x, int | float)), default=0)
    for rope in map(config.get, ("rope_parameters", "rope_scaling")):
        if not isinstance(rope, dict) or "llama3" in rope.values():
            continue
        factor = rope.get("factor")
        if "original_max_position_embeddings" not in rope and isinstance(
            factor, int | float
        ):
            longest = int(longest * factor)
    given = getattr(known, "context_length", None) or longest
    if 0 < longest < given and os.environ.get(_LONGER_CONTEXT, "0") == "0":
        raise ConfigError(
            f"--context-length {given} is more than the model's, {longest}; lower it, or "
            f"set {_LONGER_CONTEXT}=1."
        )
    cuts = getattr(known, "allow_auto_truncate", False)
    return ModelLimits(
        model=served_name(known),
        context_len=None if cuts or not given else given,
        vocab_size=config.get("vision_vocab_size") or config.get("vocab_size"),
        adapters=adapters,
    )


def served_name(known: argparse.Namespace) -> str:
    """The model's name in requests, with these options of an engine."""
    return str(getattr(known, "served_model_name", None) or known.model_path)


def model_config(known: argparse.Namespace) -> dict[str, Any]:
    """The model's ``config.json`` with the overrides of the options, as far as it is here.

    Raises ConfigError if one of them is not an object.
    """
    file = Path(known.model_path).expanduser() / "config.json"
    if not file.is_file():
        revision = getattr(known, "revision", None)
        file = Path(cached_snapshot(known.model_path, revision) or os.devnull)
    override = getattr(known, "json_model_override_args", None)
    flag = "--json-model-override-args"
    return _object(file, file.read_bytes()) | _object(flag, override)


def _object(name: object, text: str | bytes | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name} must be a JSON object.")
    return found


def _adapter(given: str | dict[str, str]) -> tuple[str, str]:
    """The name and the place of an adapter of ``--lora-paths``."""
    if isinstance(given, str) and given.startswith("{"):
        given = _object("--lora-paths", given)
    if isinstance(given, dict):
        return given.get("lora_name", ""), given.get("lora_path", "")
    name, _, path = given.partition("=")
    return name, path or name


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
