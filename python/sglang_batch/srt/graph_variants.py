"""Two CUDA graphs for each size of a decode batch: one that shares prefixes, one not.

SGLang captures a decode graph for each label that an object like :class:`ShareVariants`
has, and asks it before each replay which one to take.
"""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError

SHARED, ALONE = "shared", "alone"


class ShareVariants:
    """SGLang's ``AttentionGraphVariants`` for one shared-prefix backend."""

    capture_labels = (ALONE, SHARED)

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def select(self, forward_batch: Any) -> str:
        """The graph for a batch that is about to decode; the backend is told, too."""
        backend = self._backend
        pays = backend.plans.pays(backend.groups, forward_batch)
        backend.graph = SHARED if pays else ALONE
        return str(backend.graph)


def variants_for(
    original: Any, model_runner: Any, capture_forward_mode: Any, *args: Any, **kw: Any
) -> Any:
    """AROUND hook where SGLang asks which variants a model's decode graphs have.

    Raises:
        ConfigError: prefixes are shared by what no graph can hold.
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


def _sharing_backend(backend: Any) -> Any:
    """The backend that decodes, if it shares; SGLang may have put two into one."""
    # FlashInfer's has something else by that name.
    for each in (backend, getattr(backend, "decode_backend", None)):
        if getattr(each, "shares_prefixes", False):
            return each
    return None
