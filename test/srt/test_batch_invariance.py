"""Arithmetic on a CPU that is the same for a token alone and among others."""

from __future__ import annotations

import struct
import sys

import preloaded
import pytest
import torch

from sglang_batch.srt.cpu.cpu_attention import (
    attend,
    attend_each,
    multiply,
    murmur_hash32,
)


def test_rows_are_the_same_alone() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(37, 96), torch.randn(50, 96).t()
    whole = multiply(a, b)
    assert torch.allclose(whole, a @ b, atol=1e-5)
    for i in range(len(a)):
        assert torch.equal(multiply(a[i : i + 1], b)[0], whole[i])
    assert multiply(a[:0], b).shape == (0, 50)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(
    ("has_sinks", "cap"), [(False, 0.0), (True, 0.0), (False, 0.5)]
)
def test_a_query_attends_the_same_in_a_prompt_and_alone(
    window: int | None, has_sinks: bool, cap: float
) -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(40, 4, 16), torch.randn(40, 2, 16)
    values = torch.randn(40, 2, 16)
    sinks = torch.randn(4) if has_sinks else None
    options = {"scale": 0.25, "window": window, "sinks": sinks, "cap": cap}
    whole = attend_each(queries, keys, values, **options)
    assert torch.allclose(whole, attend(queries, keys, values, **options), atol=1e-5)
    for cut in (1, 13, 39):
        first = attend_each(queries[:cut], keys[:cut], values[:cut], **options)
        rest = attend_each(queries[cut:], keys, values, **options)
        assert torch.equal(torch.cat([first, rest]), whole)


@pytest.mark.parametrize("window", [None, 7])
def test_a_draft_attends_as_if_no_other_were_there(window: int | None) -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(4, 4, 16), torch.randn(24, 2, 16)
    values = torch.randn(24, 2, 16)
    # Two branches of two: 0 - 1, 2 - 3.
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]).bool()
    options = {"scale": 0.25, "window": window, "sinks": None}
    found = attend_each(queries, keys, values, tree=tree, **options)
    expected = attend(queries, keys, values, tree=tree, **options)
    assert torch.allclose(found, expected, atol=1e-5)
    for first in (0, 2):
        at = [*range(20), 20 + first, 21 + first]
        alone = attend_each(queries[first : first + 2], keys[at], values[at], **options)
        assert torch.equal(found[first : first + 2], alone)


def test_the_hash_is_murmur() -> None:
    """Against the algorithm on bytes, of which two hashes are well known."""
    assert _murmur3(b"") == 0
    assert _murmur3(b"test") == 0xBA6BD213
    seed = torch.tensor([42, 2**40 + 7])
    positions, columns = torch.tensor([3, 2000]), torch.arange(5)
    found = murmur_hash32(seed, positions, columns)
    for i in range(2):
        for j in range(5):
            data = struct.pack("<QII", int(seed[i]), int(positions[i]), j)
            assert int(found[i, j]) == _murmur3(data)


def _murmur3(data: bytes) -> int:
    all_bits, hashed = 2**32 - 1, 0
    for (word,) in struct.iter_unpack("<I", data):
        word = word * 0xCC9E2D51 & all_bits
        word = (word << 15 | word >> 17) & all_bits
        hashed ^= word * 0x1B873593 & all_bits
        hashed = (hashed << 13 | hashed >> 19) & all_bits
        hashed = hashed * 5 + 0xE6546B64 & all_bits
    hashed ^= len(data)
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B & all_bits
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & all_bits
    return hashed ^ hashed >> 16


LINEAR = """
import torch
from sglang_batch.srt.cpu.cpu_attention import use_rows
torch.manual_seed(0)
layer, x = torch.nn.Linear(96, 50), torch.randn(33, 96)
plain = layer(x)
use_rows(); use_rows()
with torch.inference_mode():
    whole = layer(x)
    assert torch.allclose(whole, plain, atol=1e-5)
    for i in range(33):
        assert torch.equal(layer(x[i : i + 1])[0], whole[i])
        assert torch.equal((x[i : i + 1] @ layer.weight.t())[0], (x @ layer.weight.t())[i])
    a, b = torch.randn(3, 9, 8), torch.randn(3, 8, 7)
    assert torch.equal(torch.bmm(a[:, :1], b), torch.bmm(a, b)[:, :1])
print("equal")
"""


def test_layers_of_a_process_multiply_by_rows() -> None:
    done = preloaded.run([sys.executable, "-c", LINEAR])
    assert done.stdout == "equal\n", done.stderr[-2000:]
