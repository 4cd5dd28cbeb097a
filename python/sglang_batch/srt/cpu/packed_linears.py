"""Linear layers on a CPU, with weights that oneDNN has laid out for its kernels.

torch multiplies float32 matrices by MKL, which leaves AVX-512 unused on processors of other
makers, and lays a bfloat16 weight out at each call. SGLang's own layers keep their weights,
which may be updated while the engine runs; the copies that oneDNN reads are made again then.
The head, which may be the embedding, too, has its copy from its first use on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization import unquant
from sglang.srt.model_executor.model_runner_components.weight_updater import (
    WeightUpdater,
)

from ...dense.model import is_multiplied

# Most memory for copies, as a share of the machine's. Layers beyond it are not packed.
_MOST_MEMORY = 1 / 8
# Methods of SGLang that change weights in place.
_UPDATES = (
    "update_weights_from_disk", "load_weights_from_distributed", "update_weights_from_tensor",
    "update_weights_from_ipc", "begin_weight_update", "end_weight_update",
)  # fmt: skip
_PACKED = "_sglang_batch_packed"


class _Copies:
    """The copies of this process, each kept with its layer.

    version: of the weights. A copy of an older one is stale, and one of other memory.
    num_bytes: of all copies.
    """

    def __init__(self) -> None:
        self.version = 0
        self.num_bytes = 0
        self.are_used = True

    def pack(self, layer: torch.nn.Module) -> torch.Tensor | None:
        """A layer's weight in oneDNN's layout, or None if it is not packed."""
        weight, packed = layer.weight, None
        if not hasattr(layer, _PACKED):
            most = _MOST_MEMORY * psutil.virtual_memory().total
            if _is_supported(weight) and self.num_bytes + weight.nbytes <= most:
                self.num_bytes += weight.nbytes
                packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        elif getattr(layer, _PACKED)[1] is not None:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        setattr(layer, _PACKED, ((self.version, weight.data_ptr()), packed))
        return packed

    def of(self, layer: torch.nn.Module) -> torch.Tensor | None:
        """The copy of a layer that was packed when it was loaded, if it was."""
        read, packed = getattr(layer, _PACKED, (None, None))
        if packed is not None and read != (self.version, layer.weight.data_ptr()):
            packed = self.pack(layer)
        return packed


_copies = _Copies()


def _is_supported(weight: torch.Tensor) -> bool:
    known = weight.dtype in (torch.float32, torch.bfloat16)
    on_cpu = weight.device.type == "cpu" and weight.dim() == 2
    return known and on_cpu and is_multiplied(weight.dtype)


def packed_weight(layer: torch.nn.Module) -> torch.Tensor | None:
    """A linear layer's weight in oneDNN's layout, or None if it is multiplied as it is."""
    return _copies.of(layer) if _copies.are_used else None


def multiply(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """A linear layer's output for ``[..., in_features]``, from its :func:`packed_weight`."""
    linear: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise
    return linear(x, packed, bias, "none", [], "")


def version() -> int:
    """Another number once weights may have changed in place."""
    return _copies.version


def _linear(
    layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    """The layer's output for ``[..., in_features]``, or None where it has no copy for it."""
    if torch.compiler.is_compiling() or not x.numel():
        return None
    packed = packed_weight(layer)
    if packed is None or x.dtype != packed.dtype:
        return None
    return multiply(x, packed, bias)


def leave_to_torch() -> None:
    """Compute the linear layers of this process by torch, as if nothing were packed."""
    _copies.are_used = False


def use() -> None:
    """Pack the linear layers of models that this process loads. Later calls do nothing."""
    method = unquant.UnquantizedLinearMethod
    if not torch.backends.mkldnn.is_available() or hasattr(method, _PACKED):
        return
    setattr(method, _PACKED, True)
    load, stock = method.process_weights_after_loading, method.apply

    @wraps(load)
    def process_weights_after_loading(method: Any, layer: torch.nn.Module) -> None:
        load(method, layer)
        _copies.pack(layer)

    @wraps(stock)
    def apply(
        method: Any,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        found = _linear(layer, x, bias)
        return stock(method, layer, x, bias) if found is None else found

    method.process_weights_after_loading = process_weights_after_loading
    method.apply = apply
    LogitsProcessor._compute_lm_head = _or_packed(LogitsProcessor._compute_lm_head)
    for name in _UPDATES:
        setattr(WeightUpdater, name, _then_stale(getattr(WeightUpdater, name)))


def _or_packed(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(original)
    def compute(
        processor: Any,
        hidden_states: torch.Tensor,
        lm_head: torch.nn.Module,
        embedding_bias: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        weight = getattr(lm_head, "weight", None)
        found = None
        if (
            isinstance(weight, torch.Tensor)
            and embedding_bias is None
            and not hasattr(lm_head, "set_lora")
            and processor.rl_on_policy_target is None
            and not (processor.use_fp32_lm_head and weight.dtype != torch.float32)
        ):
            if not hasattr(lm_head, _PACKED):
                _copies.pack(lm_head)
            found = _linear(lm_head, hidden_states.to(weight.dtype), None)
        if found is not None:
            return found
        return original(processor, hidden_states, lm_head, embedding_bias, **options)

    return compute


def _then_stale(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def update(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            _copies.version += 1

    return update
