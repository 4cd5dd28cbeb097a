"""A :class:`~.slab.Slab` as the cache of a transformers model that decodes."""

from __future__ import annotations

from typing import NoReturn

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .slab import Slab


class SlabCache(Cache):  # type: ignore[misc]
    """Takes one token of each row per forward pass, and gives attention views of the slab."""

    def __init__(self, slab: Slab) -> None:
        layers = [SlabLayer(slab, number) for number in range(len(slab.layers))]
        super().__init__(layers=layers)


class SlabLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer. Also for layers with a sliding window, whose mask is all they need."""

    is_sliding = False

    def __init__(self, slab: Slab, number: int) -> None:
        super().__init__()
        self._slab = slab
        self._number = number
        self.is_initialized = True

    def lazy_initialization(self, key_states: object, value_states: object) -> None:
        """The slab has the tensors already."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new token of each row, ``[rows, heads, 1, head_dim]``.

        Returns:
            Keys and values of all columns in use, ``[rows, heads, width + 1, head_dim]``.
        """
        slab = self._slab
        keys, values = slab.layers[self._number]
        rows, at = len(slab), slab.column
        keys[:rows, :, at : at + 1] = key_states
        values[:rows, :, at : at + 1] = value_states
        used = slice(slab.front, at + 1)
        return keys[:rows, :, used], values[:rows, :, used]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of the mask, and the first of them."""
        return self._slab.width + query_length, 0

    def get_seq_length(self) -> int:
        """Columns in use before this step."""
        return self._slab.width

    def get_max_length(self) -> int:
        """No limit: the slab makes room before the step."""
        return -1


class EncodedCache(Cache):  # type: ignore[misc]
    """The KV of encoded prompts in a slab, which decoding only reads."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        super().__init__(
            layers=[EncodedLayer(slab, n) for n in range(len(slab.layers))]
        )

    def refresh(self) -> None:
        """Show the columns that are in use now."""
        slab = self._slab
        rows, used = slice(len(slab)), slice(slab.front, slab.column)
        for layer, (keys, values) in zip(self.layers, slab.layers, strict=True):
            layer.keys, layer.values = keys[rows, :, used], values[rows, :, used]


class EncodedLayer(SlabLayer):
    """One layer, whose keys and values are ``[rows, heads, width, head_dim]``."""

    def update(self, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError("The prompts of running rows are encoded already.")
