"""How the states of a text's tokens become one vector, as its checkpoint declares.

Results are those of sentence-transformers, which is not used itself. It brings scikit-learn,
which transformers imports wherever it finds it: every process of SGLang would start 1.4 s
of processor time later.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import normalize
from transformers.utils import cached_file

from ..errors import ConfigError

logger = logging.getLogger(__name__)

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


class UnitLength(torch.nn.Module):  # type: ignore[misc]
    """Makes vectors, ``[rows, dims]``, of length 1."""

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return normalize(vectors, dim=-1)


class DenseLayer(torch.nn.Module):  # type: ignore[misc]
    """A linear layer with an activation, on vectors.

    Args:
        residual: a vector is added to its result; by a matrix if their sizes differ.
    """

    def __init__(
        self,
        sizes: tuple[int, int],
        activation: torch.nn.Module,
        *,
        bias: bool,
        residual: bool,
    ) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(*sizes, bias=bias)
        self.activation = activation
        self.adds = residual
        if residual and sizes[0] != sizes[1]:
            self.residual = torch.nn.Linear(*sizes, bias=False)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """``[rows, in_features]`` to ``[rows, out_features]``."""
        found: torch.Tensor = self.activation(self.linear(vectors))
        if self.adds:
            found = found + getattr(self, "residual", torch.nn.Identity())(vectors)
        return found


@dataclass(frozen=True, slots=True)
class SentencePooling:
    """Pooling, and the steps after it.

    modes: of :data:`MODES`; their vectors are concatenated.
    steps: applied to the vectors in turn, in float32.
    source: where this is from, for the log.
    """

    modes: tuple[str, ...]
    steps: torch.nn.Sequential = field(default_factory=torch.nn.Sequential)
    source: str = ""

    @property
    def normalizes(self) -> bool:
        """Whether vectors have length 1."""
        return len(self.steps) > 0 and isinstance(self.steps[-1], UnitLength)

    def __call__(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The vectors of texts, float32 ``[rows, dims]``.

        Args:
            states: ``[rows, tokens, width]``, of any floating dtype.
            mask: int64 ``[rows, tokens]``, 1 for tokens and 0 for padding, which is behind them.
                Each row has a token.
        """
        states = states.float()
        pooled = [_pooled(mode, states, mask) for mode in self.modes]
        found: torch.Tensor = self.steps(torch.cat(pooled, -1))
        return found

    def __str__(self) -> str:
        steps = [type(step).__name__ for step in self.steps]
        return f"{' and '.join(self.modes)}{''.join(f', {name}' for name in steps)}"


def _pooled(mode: str, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """float32 ``[rows, width]``. States of padding may be anything, even NaN."""
    if mode == "cls":
        return states[:, 0]
    counts = mask.sum(1)
    if mode == "lasttoken":
        return states[torch.arange(len(counts), device=states.device), counts - 1]
    padding = mask[..., None] == 0
    if mode == "max":
        return states.masked_fill(padding, -torch.inf).amax(1)
    weights = mask.float()
    if mode == "weightedmean":
        places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        weights = weights * places
    total = weights.sum(1, keepdim=True)
    if mode == "mean_sqrt_len_tokens":
        total = total.sqrt()
    kept = states.masked_fill(padding, 0.0)
    return (kept * weights[..., None]).sum(1) / total


def usual_pooling(*, causal: bool, mean: bool) -> SentencePooling:
    """That of models which declare none, normalized as SGLang does.

    Args:
        causal: a token sees those before it only.
        mean: the model has no token that was trained to stand for a text.
    """
    mode, kind = ("lasttoken", "a causal model") if causal else ("cls", "an encoder")
    if mean:
        mode, kind = "mean", "an encoder without a first token of its own"
    steps = torch.nn.Sequential(UnitLength())
    return SentencePooling((mode,), steps, f"usual for {kind}")


# Before there was `pooling_mode`, one flag for each mode, in the order of their vectors.
_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
_VECTOR = "sentence_embedding"


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """Files of a model.

    path: a directory, or a name on the Hugging Face hub.
    """

    path: str
    revision: str | None = None

    def find(self, name: str) -> Path | None:
        """A file, downloaded if need be, or None if there is none. Raises ConfigError if it
        cannot be downloaded.
        """
        try:
            found = cached_file(
                Path(self.path).expanduser(),
                name,
                revision=self.revision,
                _raise_exceptions_for_missing_entries=False,
            )
        except OSError as error:
            raise ConfigError(f"{name} of {self.path}: {error}") from error
        return None if found is None else Path(found)

    def json(self, name: str) -> Any:
        """A file's JSON value, or None if there is no such file. Raises ConfigError if it
        cannot be read.
        """
        found = self.find(name)
        try:
            return None if found is None else json.loads(found.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{name} of {self.path}: {error}") from error


def declares_pooling(files: CheckpointFiles) -> bool:
    """Whether a checkpoint says how texts become vectors, known to us or not."""
    modules = files.json("modules.json")
    if isinstance(modules, list):
        return any(_kind(module) == "Pooling" for module in modules)
    return files.find("1_Pooling/config.json") is not None


def declared_pooling(files: CheckpointFiles) -> SentencePooling | None:
    """The pooling that a checkpoint declares, None if none. Raises ConfigError if it is not
    known.
    """
    modules = files.json("modules.json")
    if modules is None:
        config = files.json("1_Pooling/config.json")
        if config is None:
            return None
        steps = torch.nn.Sequential(UnitLength())
        return SentencePooling(_modes(files, config), steps, "1_Pooling/config.json")
    if not isinstance(modules, list):
        raise ConfigError(f"modules.json of {files.path} is no list of modules.")
    kinds = [_kind(module) for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise ConfigError(
            f"modules.json of {files.path} has {', '.join(kinds) or 'no modules'}; "
            "known are those that begin with Transformer and Pooling."
        )
    of_transformer = files.json("sentence_bert_config.json") or {}
    task = of_transformer.get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        raise ConfigError(f"{files.path} is a model for {task}, not for embeddings.")
    if of_transformer.get("do_lower_case"):
        logger.warning("%s wants texts in lower case: write them so.", files.path)
    config = files.json(f"{modules[1].get('path')}/config.json")
    steps = torch.nn.Sequential()
    for kind, module in zip(kinds[2:], modules[2:], strict=True):
        try:
            steps.append(_step(files, kind, str(module.get("path"))))
        except (LookupError, TypeError, AttributeError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{kind} of {files.path}: {reason}") from error
    if config is None:
        raise ConfigError(f"{files.path} does not say how it pools.")
    return SentencePooling(_modes(files, config), steps, "modules.json")


def _kind(module: Any) -> str:
    """The name of a module's class, with its package if that is not the library's."""
    name = str(module.get("type")) if isinstance(module, dict) else ""
    package, _, last = name.rpartition(".")
    return last if package.partition(".")[0] == "sentence_transformers" else name


def _modes(files: CheckpointFiles, config: Any) -> tuple[str, ...]:
    config = config if isinstance(config, dict) else {}
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for mode, flag in _FLAGS.items() if config.get(flag)]
    modes = [modes] if isinstance(modes, str) else list(modes)
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise ConfigError(
            f"{files.path} declares the pooling {unknown[0]!r}; known are "
            f"{', '.join(MODES)}."
        )
    return tuple(modes) or ("mean",)


def _step(files: CheckpointFiles, kind: str, folder: str) -> torch.nn.Module:
    """A module after the pooling."""
    config = files.json(f"{folder}/config.json") or {}
    named = {config.get(f"module_{end}_name") or _VECTOR for end in ("input", "output")}
    if named != {_VECTOR}:
        kind += f" of {', '.join(sorted(named))}"
    match kind:
        case "Normalize":
            return UnitLength()
        case "Dropout":
            return torch.nn.Identity()
        case "LayerNorm":
            layer = torch.nn.LayerNorm(config["dimension"])
            weights = _weights(files, folder)
            layer.load_state_dict(
                {name.removeprefix("norm."): value for name, value in weights.items()}
            )
            return layer
        case "Dense":
            return _dense(files, folder, config)
        case _:
            raise ConfigError(
                f"modules.json of {files.path} has {kind} after the pooling; known are "
                "Dense, Normalize, LayerNorm and Dropout."
            )


def _dense(files: CheckpointFiles, folder: str, config: dict[str, Any]) -> DenseLayer:
    name = config.get("activation_function") or "torch.nn.Tanh"
    kind: Any = getattr(torch.nn, name.rpartition(".")[2], None)
    # The file must not choose what code runs.
    if not name.startswith("torch.nn.") or not _is_activation(kind):
        raise ConfigError(
            f"Dense of {files.path} has the activation {name}; known are the classes "
            "of torch.nn that take no arguments."
        )
    layer = DenseLayer(
        (config["in_features"], config["out_features"]),
        kind(),
        bias=config.get("bias", True),
        residual=config.get("use_residual", False),
    )
    layer.load_state_dict(_weights(files, folder))
    return layer


def _is_activation(kind: Any) -> bool:
    modules = (torch.nn.modules.activation, torch.nn.modules.linear)
    return isinstance(kind, type) and kind.__module__ in {m.__name__ for m in modules}


def _weights(files: CheckpointFiles, folder: str) -> dict[str, torch.Tensor]:
    """float32 weights of a module by name."""
    found: dict[str, torch.Tensor]
    if path := files.find(f"{folder}/model.safetensors"):
        from safetensors.torch import load_file

        found = load_file(path)
    elif path := files.find(f"{folder}/pytorch_model.bin"):
        found = torch.load(path, map_location="cpu", weights_only=True)
    else:
        raise ConfigError(f"{folder} of {files.path} has no weights.")
    return {name: value.float() for name, value in found.items()}
