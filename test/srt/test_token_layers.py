"""Norms, activations and rotary embeddings on a CPU, against SGLang's in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding

from sgl_kernel_ext import host_kernels
from sgl_kernel_ext import token_layers as kernels
from sglang_batch.srt.cpu import token_layers

PLATFORM = "of a test"
DTYPES = [torch.float32, torch.bfloat16]
# A result of ours is rounded once, one of SGLang's after each of its operators.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 3e-2}


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    token_layers.use(PLATFORM)
    yield
    del BaseFusedOp._oot_forward_registry[PLATFORM]


@pytest.fixture(params=[1, 2])
def threads(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    monkeypatch.setattr(kernels, "_PART", 100)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def ours(layer: Any) -> Any:
    """The forward that SGLang gives a layer of this class on our platform."""
    forward = BaseFusedOp._oot_forward_registry[PLATFORM][type(layer)]
    return forward.__get__(layer)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(*shape, generator=made)).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    limit = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, rtol=limit, atol=limit)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 5, 700])
def test_silu_and_mul(rows: int, dtype: torch.dtype) -> None:
    x = random(rows, 2 * 321, dtype=dtype)
    kept = x.clone()
    layer = SiluAndMul()
    assert_close(ours(layer)(x), layer.forward_native(kept))
    assert torch.equal(x, kept)
    views = random(rows, 4 * 321, dtype=dtype)[:, : 2 * 321]  # left to PyTorch
    assert_close(ours(layer)(views), layer.forward_native(views))


@pytest.mark.usefixtures("threads")
def test_a_machine_without_openmp_runs_kernels_on_one_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(number: int) -> None:
        raise ValueError("No threading layer could be loaded.")

    monkeypatch.setattr(host_kernels.numba, "set_num_threads", refuse)
    host_kernels._most_threads.cache_clear()
    try:
        x = random(700, 2 * 321, dtype=torch.float32)
        for _ in range(2):
            assert_close(ours(SiluAndMul())(x), SiluAndMul().forward_native(x))
        said = "Install libgomp1"
        assert caplog.text.count(said) == (torch.get_num_threads() > 1)
    finally:
        host_kernels._most_threads.cache_clear()


def test_silu_of_values_at_the_ends() -> None:
    ends = [-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30, float("inf")]
    x = torch.tensor([[*ends, *[1.0] * len(ends)]])
    layer = SiluAndMul()
    assert_close(ours(layer)(x), layer.forward_native(x))
    unknown = torch.full((2, 6), float("nan"), dtype=torch.bfloat16)
    assert ours(layer)(unknown).isnan().all()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 5, 700])
def test_rms_norm_with_and_without_a_residual(rows: int, dtype: torch.dtype) -> None:
    layer = RMSNorm(321, eps=1e-5, weight_dtype=dtype)
    layer.weight.copy_(random(321, dtype=dtype, seed=1))
    x, residual = (random(rows, 321, dtype=dtype, seed=seed) for seed in (2, 3))
    kept, other = x.clone(), residual.clone()
    assert_close(ours(layer)(x), layer.forward_native(kept))
    assert torch.equal(x, kept)
    expected, total = layer.forward_native(kept, other)
    found, added = ours(layer)(x, residual)
    assert_close(found, expected)
    assert torch.equal(added, total)  # rounded once by both


@pytest.mark.parametrize(
    "options",
    [
        {"var_hidden_size": 16},
        {"cast_x_before_out_mul": True},
        {"fp32_residual": True},
        {"override_orig_dtype": torch.float32},
        {"weight_dtype": torch.float32},
    ],
)
def test_other_norms_are_left_to_sglang(options: dict[str, Any]) -> None:
    layer = RMSNorm(32, **{"weight_dtype": torch.bfloat16, **options})
    for dtype in (torch.bfloat16, torch.float16):
        x, residual = (random(3, 32, dtype=dtype, seed=seed) for seed in (2, 3))
        expected = layer.forward_native(x.clone(), residual.clone())
        found = ours(layer)(x.clone(), residual.clone())
        assert all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("rotated", [64, 24])
@pytest.mark.parametrize("rows", [1, 300])
def test_rotary_embedding_of_parts_of_wider_rows(
    rows: int, rotated: int, halves: bool, dtype: torch.dtype
) -> None:
    for layer in (
        RotaryEmbedding(64, rotated, 512, 10_000, halves, dtype),
        Llama3RotaryEmbedding(64, rotated, 512, 10_000, halves, dtype, 8, 1, 4, 256),
    ):
        qkv = random(rows, (6 + 2 + 2) * 64, dtype=dtype)
        kept = qkv.clone()
        q, k, v = qkv.split([6 * 64, 2 * 64, 2 * 64], -1)
        at = torch.randint(512, (rows,), generator=torch.Generator().manual_seed(4))
        expected = layer.forward_native(at, q.clone(), k.clone())
        assert_close(torch.cat(ours(layer)(at, q, k), 1), torch.cat(expected, 1))
        assert torch.equal(v, kept[:, -2 * 64 :])


@pytest.mark.usefixtures("threads")
def test_a_position_outside_of_the_table_is_an_error() -> None:
    layer = RotaryEmbedding(64, 64, 512, 10_000, True, torch.float32)
    for wrong in (-1, 512):
        q, k = (random(400, 64, dtype=torch.float32) for _ in range(2))
        with pytest.raises(IndexError):
            ours(layer)(torch.tensor([*[3] * 399, wrong]), q, k)
