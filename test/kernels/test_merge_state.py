"""merge_state against its reference, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from sgl_kernel_ext.merge_state import (
    merge_parts,
    merge_parts_ref,
    merge_state,
    merge_state_ref,
)

# Triton 3.6's interpreter reads loop bounds in a way that numpy is about to end.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}


def make_part(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A part of which about a third is empty, with NaN as its output there."""
    random = torch.Generator().manual_seed(seed)
    out = torch.randn(num_tokens, num_heads, head_dim, generator=random).to(dtype)
    lse = torch.randn(num_tokens, num_heads, generator=random) * 5
    empty = torch.rand(num_tokens, num_heads, generator=random) < 0.3
    out[empty] = torch.nan
    lse[empty] = -torch.inf
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "head_dim"),
    [(1, 1, 16), (17, 4, 64), (5, 6, 80), (3, 32, 128), (2, 5, 192)],
)
def test_two_parts(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    a, lse_a = make_part(num_tokens, num_heads, head_dim, dtype, 0)
    b, lse_b = make_part(num_tokens, num_heads, head_dim, dtype, 1)
    out, lse = merge_state(a, lse_a, b, lse_b)
    wanted, wanted_lse = merge_state_ref(a, lse_a, b, lse_b)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out, wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-6, rtol=1e-6)


def test_two_halves_of_an_attention_are_the_whole() -> None:
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 2, 20, generator=random) * 4
    values = torch.randn(3, 2, 20, 16, generator=random)

    def attend(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        weights = logits[..., part].softmax(-1)[..., None]
        return (weights * values[..., part, :]).sum(-2), logits[..., part].logsumexp(-1)

    whole, whole_lse = attend(slice(0, 20))
    out, lse = merge_state(*attend(slice(0, 7)), *attend(slice(7, 20)))
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)


def test_an_empty_part_is_the_identity() -> None:
    a, lse_a = make_part(4, 3, 32, torch.float32, 0)
    b = torch.full_like(a, torch.nan)
    lse_b = torch.full_like(lse_a, -torch.inf)
    seen = lse_a > -torch.inf
    for out, lse in (merge_state(a, lse_a, b, lse_b), merge_state(b, lse_b, a, lse_a)):
        assert torch.equal(out[seen], a[seen])
        assert torch.equal(lse, lse_a)
        assert torch.equal(out[~seen], torch.zeros_like(out[~seen]))


def test_strides_and_in_place() -> None:
    a, lse_a = make_part(5, 6, 32, torch.float32, 0)
    b, lse_b = make_part(5, 6, 32, torch.float32, 1)
    wanted, wanted_lse = merge_state_ref(a, lse_a, b, lse_b)
    wide = torch.full((6, 5, 40), torch.nan)[..., :32].transpose(0, 1)
    wide.copy_(b)
    out, lse = merge_state(a, lse_a, wide, lse_b, out=a, lse=lse_a)
    assert out is a
    assert lse is lse_a
    torch.testing.assert_close(a, wanted)
    torch.testing.assert_close(lse_a, wanted_lse)


@pytest.mark.parametrize("num_programs", [1, 4, 9], ids="grid{}".format)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_any_number_of_parts(dtype: torch.dtype, num_programs: int) -> None:
    counts = torch.tensor([1, 0, 2, 9, 4, 5])
    o_parts, lse_parts = make_part(23, 6, 48, torch.float32, 2)
    lse_parts[3:12, 1] = -torch.inf  # of one token all parts of one head
    o_parts[3:12, 1] = torch.nan
    o_parts[21:] = torch.nan  # spare room
    indptr = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    rows = torch.tensor([6, 1, 0, 5, 2, 4], dtype=torch.int32)
    out = torch.full((7, 6, 48), 7.0).to(dtype)
    lse = torch.full((7, 6), 7.0)
    wanted, wanted_lse = out.clone(), lse.clone()
    merge_parts_ref(o_parts, lse_parts, indptr, rows, wanted, wanted_lse)
    # Room for more tokens than there are.
    indptr = torch.cat([indptr, torch.full((3,), 10**6, dtype=torch.int32)])
    rows = torch.cat([rows, torch.full((3,), 10**6, dtype=torch.int32)])
    num_tokens = torch.tensor([6], dtype=torch.int32)
    merge_parts(
        o_parts,
        lse_parts,
        indptr,
        rows,
        num_tokens,
        out,
        lse,
        num_programs=num_programs,
    )
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out, wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, wanted_lse)
    assert (out[[1, 3]] == 7).all()
    assert (lse[5, 1] == -torch.inf) and (out[5, 1] == 0).all()


def test_the_reference_merges_like_a_chain_of_two() -> None:
    o_parts, lse_parts = make_part(3, 2, 16, torch.float32, 5)
    out, lse = torch.empty(1, 2, 16), torch.empty(1, 2)
    indptr = torch.tensor([0, 3], dtype=torch.int32)
    merge_parts_ref(
        o_parts, lse_parts, indptr, torch.zeros(1, dtype=torch.int32), out, lse
    )
    chain, chain_lse = o_parts[:1], lse_parts[:1]
    for i in (1, 2):
        chain, chain_lse = merge_state_ref(
            chain, chain_lse, o_parts[i : i + 1], lse_parts[i : i + 1]
        )
    torch.testing.assert_close(
        out, torch.where((lse > -torch.inf)[..., None], chain, 0)
    )
    torch.testing.assert_close(lse, chain_lse)


def test_what_is_refused() -> None:
    a, lse = torch.zeros(2, 3, 16), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"b has shape \[2, 3, 8\]"):
        merge_state(a, lse, a[..., :8], lse)
    with pytest.raises(ValueError, match="lse_b is torch"):
        merge_state(a, lse, a, lse.half())
    with pytest.raises(ValueError, match="a is torch"):
        merge_state(a.int(), lse, a, lse)
    with pytest.raises(ValueError, match="lse_a is not contiguous"):
        merge_state(a, lse.T.contiguous().T, a, lse)
    with pytest.raises(ValueError, match="b has stride 2 in its last dimension"):
        merge_state(a, lse, torch.zeros(2, 3, 32)[..., ::2], lse)
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="indptr has 1 rows; this batch needs 2"):
        merge_parts(a, lse, one, one, one, a, num_programs=1)
    with pytest.raises(ValueError, match="o_parts is torch"):
        merge_parts(a.half(), lse, one, one, one, a, num_programs=1)


def test_no_tokens_at_all() -> None:
    out, lse = merge_state(
        torch.zeros(0, 3, 16),
        torch.zeros(0, 3),
        torch.zeros(0, 3, 16),
        torch.zeros(0, 3),
    )
    assert out.shape == (0, 3, 16)
    assert lse.shape == (0, 3)
