"""merge_state against its reference, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from partial_attention import merge_two

from sgl_kernel_ext.merge_state import merge_parts, merge_parts_ref

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


def merged(
    *parts: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """As many parts of each token, merged by the kernel."""
    outs, lses = (torch.stack(each, 1) for each in zip(*parts, strict=True))
    num_tokens = len(outs)
    out = torch.empty(num_tokens, *outs.shape[2:], dtype=dtype)
    lse = torch.empty(num_tokens, outs.shape[2])
    merge_parts(
        outs.flatten(0, 1),
        lses.flatten(0, 1),
        torch.arange(0, len(parts) * (num_tokens + 1), len(parts), dtype=torch.int32),
        torch.arange(num_tokens, dtype=torch.int32),
        torch.tensor([num_tokens], dtype=torch.int32),
        out,
        lse,
        num_programs=4,
    )
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "head_dim"),
    [(1, 1, 16), (17, 4, 64), (5, 6, 80), (3, 32, 128), (2, 5, 192)],
)
def test_two_parts(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    a = make_part(num_tokens, num_heads, head_dim, torch.float32, 0)
    b = make_part(num_tokens, num_heads, head_dim, torch.float32, 1)
    out, lse = merged(a, b, dtype=dtype)
    wanted, wanted_lse = merge_two(*a, *b)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out, wanted.to(dtype), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-6, rtol=1e-6)


def test_two_halves_of_an_attention_are_the_whole() -> None:
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 2, 20, generator=random) * 4
    values = torch.randn(3, 2, 20, 16, generator=random)

    def attend(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        weights = logits[..., part].softmax(-1)[..., None]
        return (weights * values[..., part, :]).sum(-2), logits[..., part].logsumexp(-1)

    whole, whole_lse = attend(slice(0, 20))
    out, lse = merged(attend(slice(0, 7)), attend(slice(7, 20)))
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)


def test_an_empty_part_is_the_identity() -> None:
    a, lse_a = make_part(4, 3, 32, torch.float32, 0)
    b = torch.full_like(a, torch.nan), torch.full_like(lse_a, -torch.inf)
    seen = lse_a > -torch.inf
    for out, lse in (merged((a, lse_a), b), merged(b, (a, lse_a))):
        assert torch.equal(out[seen], a[seen])
        assert torch.equal(lse, lse_a)
        assert torch.equal(out[~seen], torch.zeros_like(out[~seen]))


@pytest.mark.parametrize("num_programs", [1, 4, 9], ids="grid{}".format)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("sinks", [None, torch.linspace(-9, 9, 6)], ids=["", "sinks"])
def test_any_number_of_parts(
    sinks: torch.Tensor | None, dtype: torch.dtype, num_programs: int
) -> None:
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
    merge_parts_ref(o_parts, lse_parts, indptr, rows, wanted, wanted_lse, sinks)
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
        sinks=sinks,
    )
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out, wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, wanted_lse)
    assert (out[[1, 3]] == 7).all()
    nothing = -torch.inf if sinks is None else sinks[1]
    assert (lse[5, 1] == nothing) and (out[5, 1] == 0).all()


def test_sinks_are_one_more_part_without_values() -> None:
    o_parts, lse_parts = make_part(6, 2, 16, torch.float32, 5)
    indptr, rows = torch.tensor([0, 2, 4, 6]).int(), torch.arange(3).int()
    out, lse = torch.empty(3, 2, 16), torch.empty(3, 2)
    merge_parts_ref(o_parts, lse_parts, indptr, rows, out, lse)
    sinks = torch.tensor([-1.0, 2.0])
    wanted = merge_two(out, lse, torch.zeros_like(out), sinks.expand(3, 2))
    merge_parts_ref(o_parts, lse_parts, indptr, rows, out, lse, sinks)
    torch.testing.assert_close((out, lse), wanted)


def test_the_reference_merges_like_a_chain_of_two() -> None:
    o_parts, lse_parts = make_part(3, 2, 16, torch.float32, 5)
    out, lse = torch.empty(1, 2, 16), torch.empty(1, 2)
    indptr = torch.tensor([0, 3], dtype=torch.int32)
    merge_parts_ref(
        o_parts, lse_parts, indptr, torch.zeros(1, dtype=torch.int32), out, lse
    )
    chain, chain_lse = o_parts[:1], lse_parts[:1]
    for i in (1, 2):
        chain, chain_lse = merge_two(
            chain, chain_lse, o_parts[i : i + 1], lse_parts[i : i + 1]
        )
    torch.testing.assert_close(
        out, torch.where((lse > -torch.inf)[..., None], chain, 0)
    )
    torch.testing.assert_close(lse, chain_lse)


def test_what_is_refused() -> None:
    parts, lse = torch.zeros(2, 3, 16), torch.zeros(2, 3)
    one = torch.zeros(1, dtype=torch.int32)
    two = torch.zeros(2, dtype=torch.int32)

    def merge(
        o_parts: torch.Tensor, lses: torch.Tensor, **others: torch.Tensor
    ) -> None:
        given = {"indptr": two, "rows": one, "num_tokens": one, "out": parts, **others}
        merge_parts(o_parts, lses, **given, num_programs=1)

    with pytest.raises(ValueError, match="indptr has 1 rows; this batch needs 2"):
        merge(parts, lse, indptr=one)
    with pytest.raises(ValueError, match="o_parts is torch"):
        merge(parts.half(), lse)
    with pytest.raises(ValueError, match=r"out has shape \[2, 3, 8\]"):
        merge(parts, lse, out=parts[..., :8])
    with pytest.raises(ValueError, match="lse_parts is torch"):
        merge(parts, lse.half())
    with pytest.raises(ValueError, match="out is torch"):
        merge(parts, lse, out=parts.int())
    with pytest.raises(ValueError, match=r"sinks has shape \[2\]; expected \[3\]"):
        merge(parts, lse, sinks=torch.ones(2))
    with pytest.raises(ValueError, match="lse_parts is not contiguous"):
        merge(parts, lse.T.contiguous().T)
    with pytest.raises(ValueError, match="out has stride 2 in its last dimension"):
        merge(parts, lse, out=torch.zeros(2, 3, 32)[..., ::2])


def test_no_tokens_at_all() -> None:
    nothing = torch.zeros(0, 3, 16), torch.zeros(0, 3)
    out, lse = merged(nothing, nothing)
    assert out.shape == (0, 3, 16)
    assert lse.shape == (0, 3)
