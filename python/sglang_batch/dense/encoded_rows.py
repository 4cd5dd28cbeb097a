"""Rows of an encoder-decoder in shared batches.

Each row has two parts, of which all rows end at one column: the KV of its answer, which
grows, and that of its encoded prompt, to which the decoder attends and which stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from .kv.slab import RowKv, Slab
from .kv.slab_cache import EncodedCache, SlabCache
from .model import LoadedModel
from .prefill import Prefilled, padded_batches, prompt_from, row_of
from .row_request import DenseRequest


@dataclass(frozen=True, slots=True)
class EncodedKv:
    """The KV of one row: of its answer, with the decoder's first token, and its prompt."""

    answer: RowKv
    prompt: RowKv

    def to(self, device: torch.device | str) -> EncodedKv:
        """A copy on another device, or this one if it is there."""
        return EncodedKv(self.answer.to(device), self.prompt.to(device))


class EncodedRows:
    """The :class:`.rows.Rows` of an encoder-decoder in two slabs.

    Both slabs have as many rows. Together they are as wide as the longest prompt and the
    longest answer, which may be those of different rows: a batch can have more cells than
    the rows times the longest one that admission counts.

    Args:
        max_tokens: of a batch that is encoded, padding included.
    """

    are_padded = True

    def __init__(self, model: LoadedModel, max_tokens: int) -> None:
        self._model = model
        self._max_tokens = max_tokens
        self._answers, self._prompts = Slab(), Slab()
        self._cache: tuple[SlabCache, EncodedCache] | None = None
        # The last output of the encoder: only its shape is looked at once the KV is there.
        self._encoded: Any = None
        self.computed_tokens = 0

    @property
    def lengths(self) -> Sequence[int]:
        both = zip(self._prompts.lengths, self._answers.lengths, strict=True)
        return [prompt + answer for prompt, answer in both]

    @property
    def cells(self) -> int:
        return len(self._answers) * (self._answers.width + self._prompts.width)

    @property
    def allocated_cells(self) -> int:
        return self._answers.allocated_cells + self._prompts.allocated_cells

    def prefill(
        self, requests: Sequence[DenseRequest], following: DenseRequest | None
    ) -> Iterator[Prefilled]:
        for batch in padded_batches(requests, self._model.device, self._max_tokens):
            yield from self._encode(batch)

    def allow(self, max_rows: int, max_cells: int) -> None:
        for slab in (self._answers, self._prompts):
            slab.max_rows, slab.max_cells = max_rows, max_cells

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

    def to_host(self, kv: EncodedKv) -> EncodedKv:
        return kv.to("cpu")

    def leave(self, row: int, *, wipe: bool = False) -> None:
        self._answers.remove(row, wipe=wipe)
        self._prompts.remove(row, wipe=wipe)

    def forget(self) -> None:
        """Nothing is kept: an encoder sees whole prompts, so prefixes are not shared."""

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
        """What the encoder would answer, in its shape alone: of any numbers."""
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
