"""Position embeddings that count columns, made to count the tokens of each row.

Decoders such as those of BART, Pegasus and Whisper take no ``position_ids``. They count
from the length of the cache, which is the width of the batch and not the length of a row.
Most of their embeddings do take positions, so these are handed to them there. Those of
M2M100 and a few others do not, and are asked for each row alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_NAME = "embed_positions"
_POSITIONS, _COUNTED = "position_ids", "past_key_values_length"


class LearnedPositions:
    """Hands positions to a decoder's embeddings, see :meth:`given`.

    Otherwise the model is as it was. Calls come from one thread.
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
        """Forward passes in this block have these positions.

        Args:
            positions: int64 ``[rows, tokens]``, consecutive in each row.
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
            of_row = {name: _of_row(value, row) for name, value in asked.items()}
            one = module.forward(**{**of_row, _COUNTED: first})
            # LED's has no axis for the rows, and its shape is that of all.
            rows.append(one.reshape(-1, tokens, one.shape[-1])[:1])
        return torch.cat(rows)


def _parameters(module: torch.nn.Module) -> Any:
    return inspect.signature(module.forward).parameters


def _of_row(value: Any, row: int) -> Any:
    return value[row : row + 1] if isinstance(value, torch.Tensor) else value


def _is_of_a_decoder(name: str) -> bool:
    *owners, last = name.split(".")
    return last == _NAME and "encoder" not in owners
