"""The rows that decode together: in a slab, or each with a cache of its own.

Those of encoder-decoders in slabs are in :mod:`.encoded_rows`.

Call them in torch's inference mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .kv.slab import RowKv, Slab
from .kv.slab_cache import SlabCache
from .model import LoadedModel
from .prefill import Prefill, Prefilled
from .row_request import DenseRequest


class Rows(Protocol):
    """What the decode loop needs of a batch. Rows are numbered from 0, without gaps.

    are_padded: whether a step takes as long for every row as for the longest.
    """

    are_padded: bool

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of KV of each row."""
        ...

    @property
    def cells(self) -> int:
        """Rows times columns in use."""
        ...

    @property
    def allocated_cells(self) -> int:
        """Rows times columns in memory."""
        ...

    def prefill(
        self, requests: Sequence[DenseRequest], following: DenseRequest | None
    ) -> Iterator[Prefilled]:
        """Compute prompts. ``following`` is the request after these, if it is known."""
        ...

    def allow(self, max_rows: int, max_cells: int) -> None:
        """Memory may be allocated ahead for so many rows, and rows times columns."""
        ...

    def join(self, kvs: Sequence[Any]) -> None:
        """Add rows at the end, each from a prefill or from :meth:`take`."""
        ...

    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        """One step: the last token of each row in, float32 ``[rows, vocab]`` out."""
        ...

    def take(self, row: int) -> Any:
        """A copy of a row's KV, in host memory."""
        ...

    def to_host(self, kv: Any) -> Any:
        """The KV of a prefill, in host memory."""
        ...

    def leave(self, row: int, *, wipe: bool = False) -> None:
        """Remove a row; the last one takes its place. ``wipe``: its KV is not finite."""
        ...

    def forget(self) -> None:
        """Release what is only kept to compute less of the next prompts."""
        ...


class SlabRows:
    """Rows in one slab: one forward pass for all."""

    are_padded = True

    def __init__(self, model: LoadedModel, max_tokens: int, shortest: int) -> None:
        self._model = model
        self._prefill = Prefill(model, max_tokens, shortest)
        self._slab = Slab()
        self._cache: SlabCache | None = None

    @property
    def lengths(self) -> Sequence[int]:
        return self._slab.lengths

    @property
    def cells(self) -> int:
        return len(self._slab) * self._slab.width

    @property
    def allocated_cells(self) -> int:
        return self._slab.allocated_cells

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return self._prefill.computed_tokens

    @property
    def num_resized(self) -> int:
        """How often all rows were copied to tensors of another size."""
        return self._slab.num_resized

    def prefill(
        self, requests: Sequence[DenseRequest], following: DenseRequest | None
    ) -> Iterator[Prefilled]:
        return self._prefill.compute(requests, following)

    def allow(self, max_rows: int, max_cells: int) -> None:
        self._slab.max_rows, self._slab.max_cells = max_rows, max_cells

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

    def to_host(self, kv: RowKv) -> RowKv:
        return kv.to("cpu")

    def leave(self, row: int, *, wipe: bool = False) -> None:
        self._slab.remove(row, wipe=wipe)

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


class SeparateRows:
    """Rows one at a time, with the cache that the model makes for itself.

    Slower, and right for every model: states of recurrent layers, positions that count
    from the beginning of the tensor, and prompts that cannot be padded.
    """

    are_padded = False
    computed_tokens = 0

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._rows: list[OwnState] = []

    @property
    def lengths(self) -> Sequence[int]:
        return [int(row.ids.shape[1]) for row in self._rows]

    @property
    def cells(self) -> int:
        return sum(self.lengths)

    @property
    def allocated_cells(self) -> int:
        return self.cells

    def prefill(
        self, requests: Sequence[DenseRequest], following: DenseRequest | None
    ) -> Iterator[Prefilled]:
        for request in requests:
            state = self._begin(request.input_ids)
            logits = self._forward(state)
            self.computed_tokens += len(request.input_ids)
            start = None if request.logprobs is None else request.logprobs.prompt_from
            prompt = None if start is None else logits[start:]
            yield Prefilled(request, state, logits[-1], prompt, 0)

    def allow(self, max_rows: int, max_cells: int) -> None:
        """Nothing is allocated ahead."""

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

    def forget(self) -> None:
        """Nothing is kept."""

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
        """What a forward pass of all tokens of a row, and one more, begins with."""
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
