"""The rows that decode together, and the choice of those that a model can have.

:class:`SlabRows` and, for encoder-decoders, :class:`EncodedRows` share each forward pass.
:class:`SeparateRows` run one at a time, each with a cache of its own. :func:`rows_for` tries
whether a model's rows can share a batch. All are called in torch's inference mode.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from ..errors import ConfigError
from .model import LoadedModel, nearly_equal, packed_if_possible
from .prefill import Prefill, Prefilled, padded_batches, prompt_from, row_of
from .row_request import DenseRequest, DenseSettings, Stopping
from .slab import EncodedCache, RowKv, Slab, SlabCache

logger = logging.getLogger(__name__)


class Rows(ABC):
    """A batch as the decode loop sees it. Rows are numbered from 0, without gaps.

    Attributes:
        are_padded: whether a step takes as long for every row as for the longest.
        computed_tokens: prompt tokens that were computed.
    """

    are_padded = True
    computed_tokens = 0

    @property
    @abstractmethod
    def lengths(self) -> Sequence[int]:
        """Tokens of KV of each row."""

    @property
    @abstractmethod
    def allocated_cells(self) -> int:
        """Rows times columns in memory."""

    @abstractmethod
    def prefill(
        self, requests: Sequence[DenseRequest], following: DenseRequest | None
    ) -> Iterator[Prefilled]:
        """Compute prompts. ``following`` is the request after these, if it is known."""

    def allow(self, max_rows: int, max_cells: int) -> None:
        """Memory may be allocated ahead for so many rows, and rows times columns."""

    @abstractmethod
    def join(self, kvs: Sequence[Any]) -> None:
        """Add rows at the end, each from a prefill or from :meth:`take`."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        """One step: the last token of each row in, float32 ``[rows, vocab]`` out."""

    @abstractmethod
    def take(self, row: int) -> Any:
        """A copy of a row's KV, in host memory."""

    def to_host(self, kv: Any) -> Any:
        """The KV of a prefill, in host memory."""
        return kv.to("cpu")

    @abstractmethod
    def leave(self, row: int, *, wipe: bool = False) -> None:
        """Remove a row; the last one takes its place. ``wipe``: its KV is not finite."""

    def forget(self) -> None:
        """Release KV that is kept for prefixes of the next prompts."""


class _InSlabs(Rows):
    """Rows whose KV is in slabs, each with a part of every row."""

    def __init__(self, model: LoadedModel, *slabs: Slab) -> None:
        self._model = model
        self._slabs = slabs

    @property
    def lengths(self) -> Sequence[int]:
        parts = zip(*(slab.lengths for slab in self._slabs), strict=True)
        return [sum(lengths) for lengths in parts]

    @property
    def allocated_cells(self) -> int:
        return sum(slab.allocated_cells for slab in self._slabs)

    def allow(self, max_rows: int, max_cells: int) -> None:
        for slab in self._slabs:
            slab.max_rows, slab.max_cells = max_rows, max_cells

    def leave(self, row: int, *, wipe: bool = False) -> None:
        for slab in self._slabs:
            slab.remove(row, wipe=wipe)


class SlabRows(_InSlabs):
    """Rows in one slab: one forward pass for all."""

    def __init__(self, model: LoadedModel, max_tokens: int, shortest: int) -> None:
        self._slab = Slab()
        super().__init__(model, self._slab)
        self._prefill = Prefill(model, max_tokens, shortest)
        self._cache: SlabCache | None = None

    @property
    def computed_tokens(self) -> int:  # type: ignore[override]
        return self._prefill.computed_tokens

    def prefill(
        self, requests: Sequence[DenseRequest], following: DenseRequest | None
    ) -> Iterator[Prefilled]:
        return self._prefill.compute(requests, following)

    def join(self, kvs: Sequence[RowKv]) -> None:
        device = self._model.device
        self._slab.insert([kv.to(device) for kv in kvs])

    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        slab, device = self._slab, self._model.device
        slab.make_room()
        if self._cache is None or len(self._cache.layers) != len(slab.layers):
            self._cache = SlabCache(slab)
        positions = torch.tensor(slab.lengths, device=device)[:, None]
        new = torch.tensor(tokens, device=device)[:, None]
        last = [0] * len(tokens)
        logits = self._model.logits(new, slab.mask(), positions, self._cache, last)
        slab.advance()
        return logits

    def take(self, row: int) -> RowKv:
        return self._slab.row(row)

    def forget(self) -> None:
        self._prefill.forget()


@dataclass(slots=True)
class OwnState:
    """The state of one row: what ``generate`` would pass from step to step.

    ids: its tokens, int64 ``[1, tokens]``. Of an encoder-decoder, the decoder's.
    logits: float32 ``[vocab]``, of a step that ran out of memory at a later row.
    """

    ids: torch.Tensor
    kwargs: dict[str, Any]
    logits: torch.Tensor | None = None


class SeparateRows(Rows):
    """Rows one at a time, with the cache that the model makes for itself.

    Slower, and right for every model: states of recurrent layers, positions that count
    from the beginning of the tensor, and prompts that cannot be padded.
    """

    are_padded = False

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._rows: list[OwnState] = []

    @property
    def lengths(self) -> Sequence[int]:
        return [int(row.ids.shape[1]) for row in self._rows]

    @property
    def allocated_cells(self) -> int:
        return sum(self.lengths)

    def prefill(
        self, requests: Sequence[DenseRequest], following: DenseRequest | None
    ) -> Iterator[Prefilled]:
        for request in requests:
            state = self._begin(request.input_ids)
            logits = self._forward(state)
            self.computed_tokens += len(request.input_ids)
            start = prompt_from(request)
            prompt = None if start is None else logits[start:]
            yield Prefilled(request, state, logits[-1], prompt, 0)

    def join(self, kvs: Sequence[OwnState]) -> None:
        self._rows += kvs

    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        for row, token in zip(self._rows, tokens, strict=True):
            if row.logits is None:
                self._step(row, token)
        found = torch.stack([row.logits for row in self._rows])
        for row in self._rows:
            row.logits = None
        return found

    def take(self, row: int) -> OwnState:
        return self._rows[row]

    def to_host(self, kv: OwnState) -> OwnState:
        """Its cache, which only the model knows, stays where it is."""
        return kv

    def leave(self, row: int, *, wipe: bool = False) -> None:
        self._rows[row] = self._rows[-1]
        self._rows.pop()

    def _step(self, row: OwnState, token: int) -> None:
        before = row.ids
        new = torch.tensor([[token]], device=before.device)
        row.ids = torch.cat([before, new], dim=1)
        try:
            row.logits = self._forward(row)[-1]
        except torch.OutOfMemoryError:
            # Some layers have the token and others have not: the next step begins anew.
            row.ids = before
            row.kwargs = self._restarted(row)
            raise

    def _restarted(self, row: OwnState) -> dict[str, Any]:
        """Arguments of a forward pass of all tokens of a row, and one more."""
        kwargs = {k: v for k, v in row.kwargs.items() if k not in _STATES}
        if not self._model.is_encoder_decoder:
            shape = (1, row.ids.shape[1] + 1)
            kwargs["attention_mask"] = torch.ones(
                shape, dtype=torch.int64, device=row.ids.device
            )
            if "position_ids" in kwargs:
                kwargs["position_ids"] = torch.arange(shape[1], device=row.ids.device)[
                    None
                ]
        return kwargs

    def _begin(self, prompt: Sequence[int]) -> OwnState:
        model = self._model.model
        ids = torch.tensor([list(prompt)], device=self._model.device)
        mask = torch.ones_like(ids)
        kwargs: dict[str, Any] = {"attention_mask": mask, "use_cache": True}
        if self._model.is_encoder_decoder:
            kwargs["encoder_outputs"] = model.get_encoder()(
                input_ids=ids, attention_mask=mask, return_dict=True
            )
            ids = torch.tensor([[self._model.decoder_start]], device=ids.device)
        elif "position_ids" in self._model.parameters:
            kwargs["position_ids"] = torch.arange(ids.shape[1], device=ids.device)[None]
        return OwnState(ids, kwargs)

    def _forward(self, row: OwnState) -> torch.Tensor:
        """float32 ``[tokens, vocab]``, of the new tokens or of all."""
        model = self._model.model
        # A model without a state reads all tokens in each step.
        begun = any(row.kwargs.get(name) is not None for name in _STATES)
        inputs = model.prepare_inputs_for_generation(
            row.ids,
            next_sequence_length=1 if begun else None,
            is_first_iteration=not begun,
            **row.kwargs,
        )
        out = model(**inputs, return_dict=True)
        row.kwargs = model._update_model_kwargs_for_generation(
            out, row.kwargs, is_encoder_decoder=self._model.is_encoder_decoder
        )
        logits: torch.Tensor = out.logits[0].float()
        return logits


# Names under which models pass their state from step to step.
_STATES = ("past_key_values", "cache_params", "state", "mems", "past_buckets_states")


@dataclass(frozen=True, slots=True)
class EncodedKv:
    """The KV of one row: of its answer, with the decoder's first token, and its prompt."""

    answer: RowKv
    prompt: RowKv

    def to(self, device: torch.device | str) -> EncodedKv:
        """A copy on another device, or this one if it is there."""
        return EncodedKv(self.answer.to(device), self.prompt.to(device))


class EncodedRows(_InSlabs):
    """Rows of an encoder-decoder in two slabs: the KV of answers, which grows, and that of
    encoded prompts, to which the decoder attends.

    The longest prompt and answer may be those of different rows, so a batch can have more
    cells than admission counts. No prefix is kept: an encoder sees whole prompts.

    Args:
        max_tokens: of a batch that is encoded, padding included.
    """

    def __init__(self, model: LoadedModel, max_tokens: int) -> None:
        self._answers, self._prompts = Slab(), Slab()
        super().__init__(model, self._answers, self._prompts)
        self._max_tokens = max_tokens
        self._cache: tuple[SlabCache, EncodedCache] | None = None
        # The last output of the encoder: only its shape is looked at once the KV is there.
        self._encoded: Any = None

    def prefill(
        self, requests: Sequence[DenseRequest], following: DenseRequest | None
    ) -> Iterator[Prefilled]:
        for batch in padded_batches(requests, self._model.device, self._max_tokens):
            yield from self._encode(batch)

    def join(self, kvs: Sequence[EncodedKv]) -> None:
        on_device = [kv.to(self._model.device) for kv in kvs]
        self._prompts.insert([kv.prompt for kv in on_device])
        try:
            self._answers.insert([kv.answer for kv in on_device])
        except torch.OutOfMemoryError:
            for row in reversed(range(len(self._answers), len(self._prompts))):
                self._prompts.remove(row)
            raise

    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        answers, prompts, device = self._answers, self._prompts, self._model.device
        answers.make_room()
        if self._cache is None or len(self._cache[0].layers) != len(answers.layers):
            self._cache = SlabCache(answers), EncodedCache(prompts)
        own, encoded = self._cache
        encoded.refresh()
        logits = self._forward(
            torch.tensor(tokens, device=device)[:, None],
            answers.mask(),
            torch.tensor(answers.lengths, device=device)[:, None],
            EncoderDecoderCache(own, encoded),
            self._like_encoded(len(prompts), prompts.width),
            prompts.mask()[:, :-1],
        )
        answers.advance()
        return logits

    def take(self, row: int) -> EncodedKv:
        return EncodedKv(self._answers.row(row), self._prompts.row(row))

    def _encode(self, batch: Sequence[DenseRequest]) -> Iterator[Prefilled]:
        device = self._model.device
        all_ids = [list(request.input_ids) for request in batch]
        lengths = torch.tensor([len(ids) for ids in all_ids], device=device)
        longest = int(lengths.max())
        padded = [ids + ids[-1:] * (longest - len(ids)) for ids in all_ids]
        mask = (torch.arange(longest, device=device) < lengths[:, None]).long()
        encoder = self._model.model.get_encoder()
        encoded = encoder(
            input_ids=torch.tensor(padded, device=device),
            attention_mask=mask,
            return_dict=True,
        )
        hidden = encoded.last_hidden_state
        self._encoded = type(encoded)(last_hidden_state=hidden[:1, :1].clone())
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        start = torch.full((len(batch), 1), self._model.decoder_start, device=device)
        logits = self._forward(
            start, torch.ones_like(start), torch.zeros_like(start), cache, encoded, mask
        )
        self.computed_tokens += sum(map(len, all_ids))
        for row, request in enumerate(batch):
            kv = EncodedKv(
                row_of(cache.self_attention_cache, row, 1),
                row_of(cache.cross_attention_cache, row, len(all_ids[row])),
            )
            # The decoder has no logits of a prompt.
            prompt = None if prompt_from(request) is None else logits[:0]
            yield Prefilled(request, kv, logits[row], prompt, 0)

    def _like_encoded(self, rows: int, width: int) -> Any:
        """An output of the encoder's shape, with any numbers."""
        hidden = self._encoded.last_hidden_state.expand(rows, width, -1)
        return type(self._encoded)(last_hidden_state=hidden)

    def _forward(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: EncoderDecoderCache,
        encoded: Any,
        prompt_mask: torch.Tensor,
    ) -> torch.Tensor:
        """float32 ``[rows, vocab]`` behind the last token of each row."""
        inputs: dict[str, Any] = {
            "decoder_input_ids": tokens,
            "decoder_attention_mask": mask,
            "decoder_position_ids": positions,
            "attention_mask": prompt_mask,
            "encoder_outputs": encoded,
            "past_key_values": cache,
            "use_cache": True,
        }
        return self._model.run(inputs, positions)[:, -1].float()


# Prompts of two lengths, which share a prefix of more tokens than this.
_LENGTHS, _SHARED = (11, 4), 3
# Tokens that the first row decodes alone, and then both: so the lengths of the answers
# differ too.
_ALONE, _BOTH = 3, 4


def rows_for(model: LoadedModel, settings: DenseSettings) -> tuple[Rows, str]:
    """The rows that a model can have.

    Its linear layers are packed, unless it computes with their weights itself. Two rows of
    different lengths in one slab must have the logits of rows that run alone.

    Returns:
        The rows, and why they are separate, which is empty if they are not.

    Raises:
        ConfigError: the model cannot run at all.
    """
    try:
        alone = packed_if_possible(model.model, lambda: _alone(model))
    except Exception as error:
        raise ConfigError(
            f"{type(model.model).__name__} cannot run with the transformers backend: "
            f"{type(error).__name__}: {error}"
        ) from error
    reason = _difference(model, settings, alone)
    if not reason:
        shortest = settings.shortest_shared
        return _shared_rows(model, settings.prefill_tokens, shortest), ""
    logger.warning("Rows run one at a time: %s.", reason)
    return SeparateRows(model), reason


def _alone(model: LoadedModel) -> list[torch.Tensor]:
    with torch.inference_mode():
        return _logits(SeparateRows(model), model)


def _shared_rows(model: LoadedModel, max_tokens: int, shortest: int) -> Rows:
    if model.is_encoder_decoder:
        return EncodedRows(model, max_tokens)
    return SlabRows(model, max_tokens, shortest)


def _difference(
    model: LoadedModel, settings: DenseSettings, alone: Sequence[torch.Tensor]
) -> str:
    """Why rows cannot share a slab, empty if they can."""
    if "past_key_values" not in model.parameters:
        return "it has no KV cache of transformers"
    shortest = min(_SHARED, settings.shortest_shared)
    shared = _shared_rows(model, settings.prefill_tokens, shortest)
    try:
        with torch.inference_mode():
            together = _logits(shared, model)
    except Exception as error:
        return f"its cache has another form ({type(error).__name__}: {error})"
    for one, other in zip(alone, together, strict=True):
        if not nearly_equal(one, other, model.model.dtype):
            return "its logits depend on the row's place in a batch"
    return ""


def _logits(rows: Rows, model: LoadedModel) -> list[torch.Tensor]:
    """The logits of each step, ``[rows, vocab]``. The second row joins later."""
    ids = [3 + 7 * place % (model.vocab_size - 3) for place in range(max(_LENGTHS))]
    requests = [
        DenseRequest(f"probe-{length}", ids[:length], Stopping(_ALONE + _BOTH))
        for length in _LENGTHS
    ]
    first, second = rows.prefill(requests, None)
    logits = [torch.stack([first.logits, second.logits])]
    rows.join([first.kv])
    logits += [rows.decode([ids[step]]) for step in range(_ALONE)]
    rows.join([second.kv])
    logits += [rows.decode([ids[_ALONE + step], ids[step]]) for step in range(_BOTH)]
    for row in reversed(range(len(requests))):
        rows.leave(row)
    return logits
