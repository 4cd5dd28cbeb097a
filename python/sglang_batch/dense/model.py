"""A transformers model as the dense engine calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)
from transformers.cache_utils import Cache

from ..errors import ConfigError
from .slab import ATTENTION, register_attention

# Where configurations keep the longest sequence.
_CONTEXT_FIELDS = (
    *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    *("seq_length", "max_sequence_length", "max_length_tokens", "context_length"),
)
# Positions are relative or there is no limit in the configuration.
DEFAULT_CONTEXT = 2048
# How far numbers may differ by rounding, as a share of the largest.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_LOW_PRECISION = 5e-2


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, and its properties that the engine needs.

    model: in evaluation mode.
    parameters: the names that its ``forward`` takes.
    context_len: most tokens of a prompt and its answer.
    eos_token_ids: tokens that end an answer.
    decoder_start: of an encoder-decoder, the decoder's first token: the prompt is the
        encoder's. None for others.
    learned: position embeddings that would count columns, None where there are none.
    """

    model: PreTrainedModel
    parameters: frozenset[str]
    context_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    decoder_start: int | None
    learned: LearnedPositions | None = field(default=None, kw_only=True)

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether prompts are the encoder's."""
        return self.decoder_start is not None

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def logits(
        self,
        input_ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: Cache,
        last: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """One forward pass of tokens behind those in a cache.

        Args:
            input_ids, positions: int64 ``[rows, tokens]``.
            mask: int64 ``[rows, tokens in the cache and new ones]``, 1 for real tokens.
            last: the token of each row whose logits are wanted. None for all tokens.

        Returns:
            float32 ``[rows, vocab]``, or ``[rows, tokens, vocab]`` if ``last`` is None.
        """
        inputs: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": mask,
            "position_ids": positions,
            "past_key_values": cache,
            "use_cache": True,
        }
        wanted = None
        if last is not None and "logits_to_keep" in self.parameters:
            wanted = sorted(set(last))
            inputs["logits_to_keep"] = torch.tensor(wanted, device=input_ids.device)
        logits = self.run(inputs, positions)
        if last is not None:
            places = last if wanted is None else [wanted.index(token) for token in last]
            logits = logits[torch.arange(len(places)), places]
        return logits.float()

    def run(self, inputs: Mapping[str, Any], positions: torch.Tensor) -> torch.Tensor:
        """Logits ``[rows, tokens, vocab]`` of a forward pass.

        Args:
            inputs: by name. Those that the model does not take are left out.
            positions: int64 ``[rows, tokens]``.
        """
        known = {name: each for name, each in inputs.items() if name in self.parameters}
        given = nullcontext() if self.learned is None else self.learned.given(positions)
        with given:
            logits: torch.Tensor = self.model(**known).logits
        return logits


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model is loaded by transformers.

    path: a directory, or a name on the Hugging Face hub.
    dtype: a name, or ``auto``: the checkpoint's, or float32 on a CPU that lacks it.
    device: of torch. None: the accelerator if there is one.
    attention: ``eager``, ``sdpa`` or another of transformers. None: ours where the model
        takes it.
    context_len: most tokens of a prompt and its answer, instead of the model's.
    is_embedding: it makes embeddings, even if it could generate.
    """

    path: str
    dtype: str = "auto"
    device: str | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    attention: str | None = None
    context_len: int | None = None
    is_embedding: bool = False

    def config(self) -> Any:
        """The model's configuration.

        Raises:
            ConfigError: it cannot be read.
        """
        return self._loaded(AutoConfig)

    def weights(self, kind: Any, config: Any, **others: Any) -> Any:
        """What ``kind.from_pretrained`` makes of the model, with ``others`` for arguments.

        Raises:
            ConfigError: it cannot be loaded.
        """
        dtype, own = self.dtype, config.get_text_config().dtype
        if dtype == "auto" and self._device == "cpu" and own and not is_multiplied(own):
            dtype = "float32"
        return self._loaded(kind, config=config, dtype=dtype, **others)

    def placed(self, model: PreTrainedModel) -> PreTrainedModel:
        return model.to(self._device)

    @property
    def _device(self) -> str:
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    def _loaded(self, kind: Any, **others: Any) -> Any:
        try:
            return kind.from_pretrained(
                self.path,
                revision=self.revision,
                trust_remote_code=self.trust_remote_code,
                **others,
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(
                f"--model-path {self.path} cannot be loaded by transformers: {error}"
            ) from error


def is_multiplied(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for matrix products of a dtype."""
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return True


def load_model(options: ModelOptions) -> LoadedModel:
    """Load a model that generates.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    config = options.config()
    kind: Any = AutoModelForCausalLM
    if config.is_encoder_decoder:
        kind = AutoModelForSeq2SeqLM
    model = options.placed(options.weights(kind, config))
    return wrap(model, options.attention, options.context_len)


def wrap(
    model: PreTrainedModel,
    attention_kind: str | None = None,
    context_len: int | None = None,
) -> LoadedModel:
    """A model that is already loaded, for the engine.

    Raises:
        ConfigError: it knows no such attention.
    """
    model.eval()
    if attention_kind is not None:
        try:
            model.set_attn_implementation(attention_kind)
        except (ValueError, ImportError) as error:
            raise ConfigError(
                f"--attn-implementation {attention_kind}: {error}"
            ) from error
    elif (
        model.config._attn_implementation == "sdpa"
        and model._supports_attention_backend
    ):
        register_attention()
        model.set_attn_implementation(ATTENTION)
    config = model.config.get_text_config()
    ends = model.generation_config.eos_token_id
    ends = config.eos_token_id if ends is None else ends
    ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
    return LoadedModel(
        model,
        frozenset(inspect.signature(model.forward).parameters),
        context_len or context_length(config),
        int(config.vocab_size),
        frozenset(ends),
        _decoder_start(model) if config.is_encoder_decoder else None,
        learned=LearnedPositions.of(model),
    )


def _decoder_start(model: PreTrainedModel) -> int:
    for config in (model.generation_config, model.config):
        for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
            found = getattr(config, name, None)
            if found is not None:
                return int(found)
    return 0


def nearly_equal(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether results of a model of this dtype are equal but for rounding. NaN is equal to
    nothing.
    """
    return differ_by(one, other) <= _TOLERANCE.get(dtype, _LOW_PRECISION)


def differ_by(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, as a share of the largest number of ``one``."""
    scale = max(1e-6, float(one.abs().max()))
    return float((one - other).abs().max()) / scale


def context_length(config: Any) -> int:
    """Most tokens of a sequence, by a model's configuration of its text."""
    for name in _CONTEXT_FIELDS:
        found = getattr(config, name, None)
        if isinstance(found, int) and found > 0:
            return found
    return DEFAULT_CONTEXT


_EMBEDDINGS = "embed_positions"
_POSITIONS, _COUNTED = "position_ids", "past_key_values_length"


class LearnedPositions:
    """Position embeddings that count columns, made to count the tokens of each row.

    Decoders such as those of BART, Pegasus and Whisper take no ``position_ids``. They count from
    the length of the cache, which is the width of the batch and not the length of a row. Most
    of their embeddings do take positions, which :meth:`given` hands to them. Those of M2M100 and
    a few others do not, and are asked for each row alone. Calls come from one thread.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._positions: torch.Tensor | None = None
        for module in modules:
            if _POSITIONS in _parameters(module):
                module.register_forward_pre_hook(self._hand_over, with_kwargs=True)
                module.register_forward_hook(self._flatten)
            else:
                module.register_forward_hook(self._ask_for_each, with_kwargs=True)

    @classmethod
    def of(cls, model: torch.nn.Module) -> LearnedPositions | None:
        """Those of a model, or None if it takes positions itself or has none of these."""
        if _POSITIONS in _parameters(model):
            return None
        modules = [
            module
            for name, module in model.named_modules()
            if _is_of_a_decoder(name)
            and not _parameters(module).keys().isdisjoint((_POSITIONS, _COUNTED))
        ]
        return cls(modules) if modules else None

    @contextmanager
    def given(self, positions: torch.Tensor) -> Iterator[None]:
        """Forward passes in this block have these positions, int64 ``[rows, tokens]``,
        consecutive in each row.
        """
        self._positions = positions
        try:
            yield
        finally:
            self._positions = None

    def _hand_over(
        self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        if self._positions is None:
            return None
        return args, {**kwargs, _POSITIONS: self._positions}

    def _flatten(
        self, module: torch.nn.Module, args: Any, found: torch.Tensor
    ) -> torch.Tensor | None:
        # BART's and others expect the positions of one row, and add an axis.
        if self._positions is None or found.ndim <= self._positions.ndim + 1:
            return None
        return found[0]

    def _ask_for_each(
        self, module: Any, args: Any, kwargs: dict[str, Any], found: torch.Tensor
    ) -> torch.Tensor | None:
        if self._positions is None:
            return None
        asked = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        tokens = self._positions.shape[1]
        rows = []
        for row, first in enumerate(self._positions[:, 0].tolist()):
            of_row = {
                name: value[row : row + 1] if isinstance(value, torch.Tensor) else value
                for name, value in asked.items()
            }
            one = module.forward(**{**of_row, _COUNTED: first})
            # LED's has no axis for the rows, and its shape is that of all.
            rows.append(one.reshape(-1, tokens, one.shape[-1])[:1])
        return torch.cat(rows)


def _parameters(module: torch.nn.Module) -> Any:
    return inspect.signature(module.forward).parameters


def _is_of_a_decoder(name: str) -> bool:
    *owners, last = name.split(".")
    return last == _EMBEDDINGS and "encoder" not in owners


# Linear layers whose weights oneDNN has laid out for its kernels.
#
# torch multiplies float32 matrices by MKL, which leaves AVX-512 unused on processors of other
# makers. oneDNN uses it everywhere, and a weight that is laid out once need not be at each call.

T = TypeVar("T")


class PackedLinear(nn.Module):  # type: ignore[misc]
    """A linear layer on a CPU, in float32, without gradients.

    Attributes:
        weight: ``[out_features, in_features]``, in oneDNN's layout, which only oneDNN reads.
        bias: ``[out_features]`` or None.
    """

    def __init__(self, weight: torch.Tensor, bias: nn.Parameter | None) -> None:
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        outputs: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            inputs, self.weight, self.bias, "none", [], ""
        )
        return outputs


def pack_linears(model: nn.Module) -> None:
    """Pack the linear layers of a model, in place, that are float32 and on a CPU.

    Layers of other classes than ``nn.Linear`` stay as they are, and all where torch has no
    oneDNN. A weight that the model uses elsewhere, too, is copied.
    """
    if torch.backends.mkldnn.is_available():
        _replace(model, _packed)


def packed_if_possible(model: nn.Module, run: Callable[[], T]) -> T:
    """Pack the linear layers of a model, and run it. A model that fails, since it computes with
    their weights itself, is unpacked and run again.
    """
    pack_linears(model)
    try:
        return run()
    except Exception:
        unpack_linears(model)
    return run()


def unpack_linears(model: nn.Module) -> None:
    """Undo :func:`pack_linears`. Weights are as they were, but no longer shared."""
    _replace(model, _unpacked)


def _replace(model: nn.Module, other: Callable[[nn.Module], nn.Module | None]) -> None:
    found: dict[nn.Module, nn.Module | None] = {}  # some layers have several places
    for parent in list(model.modules()):
        # Unlike named_children(), this has all places of a layer.
        for name, child in list(parent._modules.items()):
            if child is None:
                continue
            if child not in found:
                found[child] = other(child)
            if (replacement := found[child]) is not None:
                setattr(parent, name, replacement)


def _packed(layer: nn.Module) -> nn.Module | None:
    if type(layer) is not nn.Linear:
        return None
    weight = layer.weight
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return None
    return PackedLinear(weight, layer.bias)


def _unpacked(layer: nn.Module) -> nn.Module | None:
    if not isinstance(layer, PackedLinear):
        return None
    out_features, in_features = layer.weight.shape
    linear = nn.Linear(in_features, out_features, bias=False)
    linear.weight = nn.Parameter(layer.weight.to_dense(), requires_grad=False)
    linear.bias = layer.bias
    return linear
