"""Linear layers whose weights oneDNN has laid out for its kernels.

torch multiplies float32 matrices by MKL, which leaves AVX-512 unused on processors of other
makers. oneDNN uses it everywhere, and a weight that is laid out once need not be at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

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

    Layers of other classes than ``nn.Linear`` stay as they are, and all layers where torch
    has no oneDNN. A weight that the model uses elsewhere, too, is copied.
    """
    if torch.backends.mkldnn.is_available():
        _replace(model, _packed)


def packed_if_possible(model: nn.Module, run: Callable[[], T]) -> T:
    """Pack the linear layers of a model, and run it.

    Models that compute with the weights of their layers themselves fail. They are unpacked,
    and run again.
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
