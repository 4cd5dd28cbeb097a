"""Embedding models of transformers: how they are recognized, loaded and run."""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModel, PreTrainedModel
from transformers.models.auto import modeling_auto

from ..errors import ConfigError
from .model import (
    LoadedModel,
    ModelOptions,
    context_length,
    differ_by,
    nearly_equal,
    packed_if_possible,
)
from .pooling import (
    CheckpointFiles,
    SentencePooling,
    declared_pooling,
    declares_pooling,
    usual_pooling,
)
from .row_request import DenseAnswer, DenseRequest, DenseSettings, OnAnswer

logger = logging.getLogger(__name__)

# Prompts of two lengths. The first two differ in the last token.
_PROBE = ((11, 0), (11, 1), (4, 0))
# A state that differs by less than this share does not depend on a later token.
_UNCHANGED = 1e-5
# Cells of a batch on a CPU, where many rows cost no less than few, and padding costs.
_CPU_CELLS = 1024


@dataclass(frozen=True, slots=True)
class EmbeddingModel(LoadedModel):
    """A model whose rows become vectors.

    pooling: its weights are on the model's device.
    dims: numbers of a vector.
    pads: whether rows of different lengths can share a batch.
    """

    pooling: SentencePooling
    dims: int
    pads: bool

    def vectors(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """The vectors of prompts, computed in one batch that is padded behind.

        Args:
            prompts: token ids, at least one of each. Of one length unless the model ``pads``.

        Returns:
            float32 ``[rows, dims]`` on the CPU.
        """
        with torch.inference_mode():
            states = _states(self.model, self.parameters, prompts)
            return self.pooling(*states).cpu()


def wrap_embedding(
    model: PreTrainedModel,
    pooling: SentencePooling | None = None,
    context_len: int | None = None,
) -> EmbeddingModel:
    """A model that is already loaded. It is tried with a few tokens.

    Args:
        pooling: None for the usual one of the architecture.

    Raises:
        ConfigError: it cannot run.
    """
    model.eval()
    name = type(model).__name__
    parameters = frozenset(inspect.signature(model.forward).parameters)
    try:
        vocab = int(model.get_input_embeddings().weight.shape[0])
        with torch.inference_mode():
            if pooling is None:
                pooling = packed_if_possible(
                    model, lambda: _usual(model, parameters, vocab)
                )
            pooling.steps.to(model.device)
            _, *prompts = _prompts(vocab)
            # Vectors of two rows that run alone and together.
            one, other, together = packed_if_possible(
                model,
                lambda: [
                    pooling(*_states(model, parameters, batch))
                    for batch in (prompts[:1], prompts[1:], prompts)
                ],
            )
            alone = torch.cat([one, other])
    except Exception as error:
        raise ConfigError(
            f"{name} cannot make embeddings with the transformers backend: "
            f"{type(error).__name__}: {error}"
        ) from error
    pads = nearly_equal(alone, together, model.dtype)
    dims = int(alone.shape[1])
    logger.info("Embeddings of %s: %s (%s), %d numbers.",
                name, pooling, pooling.source, dims)  # fmt: skip
    if not pads:
        logger.warning("Only texts of one length share a batch: padding changes them.")
    return EmbeddingModel(
        model=model,
        parameters=parameters,
        context_len=context_len or _longest(model),
        vocab_size=vocab,
        eos_token_ids=frozenset(),
        decoder_start=None,
        pooling=pooling,
        dims=dims,
        pads=pads,
    )


def _states(
    model: PreTrainedModel, parameters: frozenset[str], prompts: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last layer's states, ``[rows, longest, width]``, and the mask of tokens, int64
    ``[rows, longest]``. All tokens are of the first type.
    """
    longest = max(map(len, prompts))
    # Some models number positions by which tokens are no padding.
    filler = getattr(model.config.get_text_config(), "pad_token_id", None) or 0
    ids = torch.full((len(prompts), longest), max(0, filler))
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        mask[row, : len(prompt)] = 1
    ids, mask = ids.to(model.device), mask.to(model.device)
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    found = model(**{key: value for key, value in inputs.items() if key in parameters})
    return found[0], mask


def _prompts(vocab: int) -> list[list[int]]:
    ids = [3 + 7 * place % (vocab - 4) for place in range(max(_PROBE)[0])]
    return [[*ids[: length - 1], ids[length - 1] + add] for length, add in _PROBE]


def _usual(
    model: PreTrainedModel, parameters: frozenset[str], vocab: int
) -> SentencePooling:
    one, other, _ = _prompts(vocab)
    states = _states(model, parameters, [one, other])[0].float()
    config = model.config.get_text_config()
    mean = (
        type(model).__name__.endswith("EncoderModel")
        or getattr(config, "use_bidirectional_attention", False)
        or "Contriever" in (config.architectures or ())
    )
    causal = differ_by(states[0, 0], states[1, 0]) <= _UNCHANGED
    return usual_pooling(causal=causal, mean=mean)


def _longest(model: PreTrainedModel) -> int:
    """Most tokens of a prompt."""
    found = context_length(model.config.get_text_config())
    for name, part in model.named_modules():
        padding = getattr(part, "padding_idx", None)
        if name.endswith("position_embeddings") and isinstance(padding, int):
            # Positions of RoBERTa and its like begin behind the one of padding.
            return min(found, int(part.weight.shape[0]) - padding - 1)
    return found


# Ends of the names of classes that generate, also of those that bring their own code.
_GENERATING = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_AUTO_GENERATING = {"AutoModelForCausalLM", "AutoModelForSeq2SeqLM"}
# Heads that training left behind. All others make something else than embeddings.
_TRAINING_HEADS = ("ForMaskedLM", "ForPreTraining")


def embedding_reason(options: ModelOptions) -> str | None:
    """Why a model makes embeddings, or None if it generates.

    Raises:
        ConfigError: its configuration cannot be read, or it makes neither.
    """
    if options.is_embedding:
        return "--is-embedding"
    config = options.config()
    if declares_pooling(CheckpointFiles(options.path, options.revision)):
        return "its checkpoint declares a pooling"
    names: list[str] = config.architectures or []
    own_code = getattr(config, "auto_map", None) or {}
    if not names or _AUTO_GENERATING & own_code.keys() or any(map(_generates, names)):
        return None
    for name in names:
        _, head, kind = name.partition("For")
        if head and head + kind not in _TRAINING_HEADS:
            raise ConfigError(
                f"--model-path {options.path} is a {name}, which neither generates nor "
                "makes embeddings; --is-embedding makes them without its head."
            )
    return f"{', '.join(names)} does not generate"


def load_embedding_model(options: ModelOptions) -> EmbeddingModel:
    """Load an embedding model.

    Raises:
        ConfigError: the model or its pooling cannot be loaded, or cannot run.
    """
    config = options.config()
    kind = _class_of(options.path, config)
    others: dict[str, Any] = {"output_loading_info": True}
    if options.attention is not None:
        others["attn_implementation"] = options.attention
    model, info = options.weights(kind, config, **others)
    # BERT's own pooler, which only its classifiers use, is often not there.
    missing = [name for name in info["missing_keys"] if "pooler" not in name]
    if missing:
        raise ConfigError(
            f"--model-path {options.path} has no {', '.join(sorted(missing)[:3])}"
        )
    pooling = declared_pooling(CheckpointFiles(options.path, options.revision))
    return wrap_embedding(options.placed(model), pooling, options.context_len)


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


class EmbeddingLoop:
    """Answers requests with vectors, one batch at a step. All calls come from one thread.

    Rows of the highest priority are sorted by length. Their places in the plan are ignored:
    no prefix is shared.

    Args:
        settings: ``max_cells`` are most rows times the longest one's tokens, by default 1024
            on a CPU and ``prefill_tokens`` elsewhere. ``max_rows`` is for rows that decode.

    Attributes:
        batches: that have run.
    """

    def __init__(
        self, model: EmbeddingModel, settings: DenseSettings, on_answer: OnAnswer
    ) -> None:
        self._model = model
        self._on_answer = on_answer
        on_cpu = model.device.type == "cpu"
        usual = _CPU_CELLS if on_cpu else settings.prefill_tokens
        self._max_cells = settings.max_cells or usual
        self._waiting: dict[str, DenseRequest] = {}
        # Batches of the highest priority that are formed and have not run, as ids.
        self._formed: deque[list[str]] = deque()
        self._priority = 0
        self.batches = 0

    @property
    def can_step(self) -> bool:
        return bool(self._waiting)

    def running(self) -> list[str]:
        """Ids of the rows that the next step computes."""
        return [row.rid for row in self._next_rows()]

    def add(self, request: DenseRequest) -> None:
        """Open a request. Only its id, tokens and priority matter."""
        ids, size = request.input_ids, self._model.vocab_size
        # Another token would end the work of an accelerator, and all rows with it.
        if len(ids) > 0 and min(ids) >= 0 and max(ids) < size:
            self._waiting[request.rid] = request
        else:
            found = _failed(f"It needs tokens, all of them less than {size}.")
            self._on_answer(request, found)

    def abort(self, rid: str) -> None:
        if (request := self._waiting.pop(rid, None)) is not None:
            self._on_answer(request, _failed("The request was aborted."))

    def revise(self, revised: Callable[[DenseRequest], DenseRequest]) -> None:
        """Change open requests, as :meth:`.DecodeLoop.revise`."""
        self._waiting = {rid: revised(row) for rid, row in self._waiting.items()}
        self._formed.clear()

    def step(self) -> None:
        """Compute the vectors of one batch."""
        rows, cells = self._next_rows(), self._max_cells
        vectors = self._vectors(rows)
        if self._max_cells < cells:
            self._formed.clear()
        for row, vector in zip(rows, vectors, strict=True):
            del self._waiting[row.rid]
            self._on_answer(row, _answer(vector))

    def _next_rows(self) -> list[DenseRequest]:
        """The rows of the next batch, empty if none waits."""
        waiting = self._waiting
        highest = max((row.priority for row in waiting.values()), default=0)
        if highest > self._priority:
            self._formed.clear()
        while self._formed:
            if rows := [waiting[rid] for rid in self._formed[0] if rid in waiting]:
                return rows
            self._formed.popleft()
        self._priority = highest
        rows = [row for row in waiting.values() if row.priority == highest]
        lengths = [len(row.input_ids) for row in rows]
        pads = self._model.pads
        for batch in length_batches(lengths, self._max_cells, pads=pads):
            self._formed.append([rows[index].rid for index in batch])
        return [waiting[rid] for rid in self._formed[0]] if self._formed else []

    def _vectors(self, rows: Sequence[DenseRequest]) -> list[torch.Tensor | None]:
        """A vector ``[dims]`` of each row, None for one that does not fit into memory."""
        try:
            found = self._model.vectors([row.input_ids for row in rows])
            self.batches += 1
            return list(found)
        except torch.OutOfMemoryError:
            pass  # until here the error holds tensors
        if len(rows) == 1:
            return [None]
        half = len(rows) // 2
        self._max_cells = half * max(len(row.input_ids) for row in rows)
        logger.warning("Out of memory with %d rows: %d cells at most from now on.",
                       len(rows), self._max_cells)  # fmt: skip
        return [*self._vectors(rows[:half]), *self._vectors(rows[half:])]


def length_batches(
    lengths: Sequence[int], max_cells: int, *, pads: bool = True
) -> Iterator[list[int]]:
    """Batches of prompts, longest first, as indices of their lengths.

    Args:
        max_cells: most rows times the longest one's tokens. A longer prompt is alone.
        pads: whether prompts of different lengths share a batch.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while order:
        longest = lengths[order[0]]
        batch = order[: max(1, max_cells // max(1, longest))]
        if not pads:
            batch = [index for index in batch if lengths[index] == longest]
        yield batch
        order = order[len(batch) :]


def _answer(vector: torch.Tensor | None) -> DenseAnswer:
    if vector is None:
        return _failed("The text does not fit into memory.")
    if not bool(vector.isfinite().all()):
        return _failed("The model's vector is not finite.")
    return DenseAnswer((), "length", vector=vector.tolist())


def _failed(error: str) -> DenseAnswer:
    return DenseAnswer((), "abort", error=error)
