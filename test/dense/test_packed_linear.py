"""Packed linear layers compute what plain ones do, and come back as they were."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from sglang_batch.dense.model import PackedLinear, pack_linears, unpack_linears, wrap
from sglang_batch.dense.row_request import DenseSettings
from sglang_batch.dense.rows import rows_for


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_packed_layer_computes_what_a_plain_one_does(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 33, bias=bias))
    inputs = torch.randn(2, rows, 70)
    with torch.inference_mode():
        expected = model(inputs)
        pack_linears(model)
        assert isinstance(model[0], PackedLinear)
        assert model[0].weight.shape == (33, 70)
        torch.testing.assert_close(model(inputs), expected)


def test_unpacked_layers_are_as_before() -> None:
    model = nn.ModuleDict({"one": nn.Linear(5, 7), "low": nn.Linear(5, 7).half()})
    model["again"] = model["one"]
    before = copy.deepcopy(model.state_dict())
    pack_linears(model)
    assert model["again"] is model["one"]
    assert type(model["low"]) is nn.Linear
    unpack_linears(model)
    assert type(model["one"]) is nn.Linear
    assert model["again"] is model["one"]
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])


@pytest.mark.parametrize(("name", "packed"), [("llama", True), ("jamba", False)])
def test_a_model_that_computes_with_its_weights_is_not_packed(
    name: str, packed: bool
) -> None:
    model = wrap(tiny_model(name))
    rows_for(model, DenseSettings())
    found = any(isinstance(each, PackedLinear) for each in model.model.modules())
    assert found == packed
