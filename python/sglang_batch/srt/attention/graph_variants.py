"""Two CUDA graphs for each size of a decode batch, with and without shared prefixes.

SGLang captures a decode graph for each label of an object like :class:`ShareVariants`,
and calls it before each replay to choose one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from ...errors import ConfigError

if TYPE_CHECKING:
    from ..compat.scheduler_types import (
        AttentionBackend,
        ForwardBatch,
        ForwardMode,
        ModelRunner,
    )
    from .attention_plans import SharingBackend

SHARED, ALONE = "shared", "alone"


class ShareVariants:
    """SGLang's ``AttentionGraphVariants`` for one shared-prefix backend."""

    capture_labels = (ALONE, SHARED)

    def __init__(self, backend: SharingBackend) -> None:
        self._backend = backend

    def select(self, forward_batch: ForwardBatch) -> str:
        """The graph for the next decode batch, which is also set on the backend."""
        backend = self._backend
        pays = backend.plans.pays(backend.groups, forward_batch)
        backend.graph = SHARED if pays else ALONE
        return backend.graph


def variants_for(
    original: Callable[..., object],
    model_runner: ModelRunner,
    capture_forward_mode: ForwardMode,
    *args: object,
    **kw: object,
) -> object:
    """AROUND hook on SGLang's choice of the variants of a model's decode graphs.

    Raises:
        ConfigError: the implementation of sharing cannot be captured in a graph.
    """
    found = original(model_runner, capture_forward_mode, *args, **kw)
    backend = _sharing_backend(model_runner.attn_backend)
    if found is not None or backend is None or not capture_forward_mode.is_decode():
        return found
    implementation = backend.implementation
    if not implementation.capturable:
        raise ConfigError(
            f'attention="{implementation.name}" cannot be captured in a CUDA graph; '
            "add --disable-cuda-graph."
        )
    return ShareVariants(backend)


def _sharing_backend(backend: AttentionBackend) -> SharingBackend | None:
    """The backend that decodes, if it shares. SGLang may have combined two in one."""
    # FlashInfer's has another attribute of that name.
    for each in (backend, getattr(backend, "decode_backend", None)):
        if getattr(each, "shares_prefixes", False):
            return cast("SharingBackend", each)
    return None
