"""What FlashInfer is told of a step, carried out in PyTorch; FlashInfer needs a GPU."""

from __future__ import annotations

import inspect
import itertools
import sys
import warnings
from typing import Any

import pytest
import torch
from attention_cases import (
    FORESTS,
    Batch,
    assert_attention_close,
    make_batch,
    make_planner,
)
from partial_attention import attend_span, merge_two

from sgl_kernel_ext.shared_prefix_attention import AttentionPlan
from sglang_batch.errors import ConfigError, EngineError
from sglang_batch.srt.attention.cascade import Cascade

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from flashinfer import MultiLevelCascadeAttentionWrapper as Real
    from flashinfer import get_seq_lens

TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 2e-2}


def bound(method: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments by the names that FlashInfer's own method has for them."""
    found = inspect.signature(method).bind(*args, **kwargs)
    found.apply_defaults()
    return found.arguments


class StandIn:
    """FlashInfer's cascade in PyTorch; every call must fit FlashInfer's signature."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        told = bound(Real.__init__, self, *args, **kwargs)
        self.num_levels = told["num_levels"]
        self.workspace = told["float_workspace_buffer"]
        assert told["kv_layout"] == "NHD"
        assert not told["use_cuda_graph"]
        self.told: dict[str, Any] = {}

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self.told = told = bound(Real.plan, self, *args, **kwargs)
        names = "qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_last_page_len"
        for name in names:
            assert all(array.device.type == "cpu" for array in told[name])
        for name in (*names, "paged_kv_indices_arr"):
            assert len(told[name]) == self.num_levels
            for array in told[name]:
                assert array.dtype == torch.int32
                assert array.dim() == 1
                assert array.is_contiguous()
        assert told["pos_encoding_mode"] == "NONE"
        assert told["window_left"] == -1
        assert not told["logits_soft_cap"]
        assert told["q_data_type"] == told["kv_data_type"]

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = bound(Real.run, self, *args, **kwargs)
        q, (k_cache, v_cache) = given["q"], given["paged_kv_cache"]
        heads, dim = self.told["num_kv_heads"], self.told["head_dim"]
        assert q.dtype == k_cache.dtype == self.told["q_data_type"]
        assert q.shape[1:] == (self.told["num_qo_heads"], dim)
        assert k_cache.shape[1:] == (self.told["page_size"], heads, dim)
        assert k_cache.stride() == v_cache.stride()
        out, lse = self.level(self.num_levels - 1, q, k_cache, v_cache)
        for level in range(self.num_levels - 1):
            part, part_lse = self.level(level, q, k_cache, v_cache)
            out, lse = merge_two(out, lse, part, part_lse)
        return out.to(q.dtype)

    def level(
        self, i: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        told = self.told
        indptr, last = told["paged_kv_indptr_arr"][i], told["paged_kv_last_page_len"][i]
        # What FlashInfer's planning counts, and what its kernels do.
        lengths = get_seq_lens(indptr, last, told["page_size"])
        assert torch.equal(lengths == 0, indptr.diff() == 0)
        causal = told["causal"] and i == self.num_levels - 1
        tokens = itertools.pairwise(told["qo_indptr_arr"][i].tolist())
        pages = itertools.pairwise(indptr.tolist())
        parts = []
        assert told["qo_indptr_arr"][i][-1] == len(q)
        assert len(told["paged_kv_indices_arr"][i]) == indptr[-1]
        for (start, stop), (first, end), length in zip(
            tokens, pages, lengths.tolist(), strict=True
        ):
            read = told["paged_kv_indices_arr"][i][first:end].long()
            k = k_cache[read].flatten(0, 1)[:length]
            v = v_cache[read].flatten(0, 1)[:length]
            scale = told["sm_scale"]
            parts.append(attend_span(q[start:stop], k, v, scale, causal))
        out, lse = (torch.cat(each) for each in zip(*parts, strict=True))
        return out, lse


def cascade_of(batch: Batch, **changes: Any) -> Cascade:
    arguments: dict[str, Any] = {
        "num_q_heads": batch.q.shape[1],
        "num_kv_heads": batch.k_cache.shape[1],
        "head_dim": batch.q.shape[2],
        "dtype": batch.q.dtype,
        "scale": batch.scale,
        "device": batch.q.device,
        "make_wrapper": StandIn,
    }
    return Cascade(**(arguments | changes))


def case(name: str, **changes: Any) -> Batch:
    """A known forest in a shape that FlashInfer has kernels for."""
    shape: dict[str, Any] = {"head_dim": 64, "dtype": torch.bfloat16}
    return make_batch(**(FORESTS[name] | shape | changes))  # type: ignore[arg-type]


def prepare(cascade: Cascade, batch: Batch, plan: AttentionPlan) -> None:
    cascade.prepare(
        plan, batch.q_len, batch.kv_len, batch.table_row, batch.node_end, batch.table
    )


def run(
    cascade: Cascade, batch: Batch, plan: AttentionPlan, out: torch.Tensor, scale: float
) -> None:
    q, k_cache, v_cache, table, kv_len = batch.tensors()
    # As of a batch with padding: rows of q that belong to no request.
    padded = torch.cat([q, torch.full_like(q[:3], torch.nan)])
    cascade.run(plan, padded, k_cache, v_cache, table, kv_len, out, scale)


def check(cascade: Cascade, batch: Batch, plan: AttentionPlan) -> None:
    """One step: attention for its tokens, and nothing written for padding."""
    prepare(cascade, batch, plan)
    out = torch.full_like(torch.cat([batch.q, batch.q[:3]]), 7)
    run(cascade, batch, plan, out, batch.scale)
    assert_attention_close(batch, out, tolerance=TOLERANCES[batch.q.dtype])
    assert (out[batch.num_tokens :] == 7).all()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", FORESTS)
def test_a_step(name: str, dtype: torch.dtype) -> None:
    batch = case(name, dtype=dtype)
    plan = make_planner(batch).plan(*batch.planned())
    check(cascade_of(batch), batch, plan)


def test_a_step_that_keeps_its_plan() -> None:
    batch = case("two-groups", room=16)
    plan = make_planner(batch).plan(*batch.planned())
    cascade = cascade_of(batch)
    for tokens in ([0] * 7, [1] * 7, [0, 3, 16, 1, 2, 0, 16]):
        grown = batch.grown(tokens)
        assert plan.still_valid(grown.kv_len)
        check(cascade, grown, plan)


def test_a_wrapper_is_made_once_per_number_of_levels() -> None:
    made: list[StandIn] = []

    def make(*args: Any) -> StandIn:
        made.append(StandIn(*args))
        return made[-1]

    batches = {name: case(name) for name in FORESTS}
    planner = make_planner(batches["chunks"])
    cascade = cascade_of(batches["chunks"], make_wrapper=make)
    for name in [*FORESTS, *FORESTS]:
        check(cascade, batches[name], planner.plan(*batches[name].planned()))
    assert [each.num_levels for each in made] == [1, 2, 4]
    assert len({each.workspace.data_ptr() for each in made}) == 1


def test_what_a_run_refuses() -> None:
    batch = case("one-root")
    cascade, planner = cascade_of(batch), make_planner(batch)
    plan, out = planner.plan(*batch.planned()), torch.empty_like(batch.q)
    with pytest.raises(EngineError, match=r"of 4 tokens runs before .* prepared"):
        run(cascade, batch, plan, out, batch.scale)
    prepare(cascade, batch, plan)
    run(cascade, batch, plan, out, batch.scale)
    with pytest.raises(
        EngineError, match=r"by 0\.5, and FlashInfer was set up with 0\.125"
    ):
        run(cascade, batch, plan, out, 0.5)
    another = planner.plan(*batch.planned())
    with pytest.raises(EngineError, match="prepared"):
        run(cascade, batch, another, out, batch.scale)
    paged = case("one-root", page_size=16)
    with pytest.raises(EngineError, match="pages of 16 tokens"):
        prepare(cascade, paged, make_planner(paged).plan(*paged.planned()))


def test_what_flashinfer_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = case("one-root")
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"dtype": torch.float32}, 'runs in float32; set "auto"'),
        ({"head_dim": 80}, 'of this model have 80; set "auto"'),
        ({"make_wrapper": None}, 'this is a cpu device; set "auto"'),
    ]
    for changes, message in refusals:
        with pytest.raises(ConfigError, match=message):
            cascade_of(batch, **changes)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"cannot be imported \(.*pip install"):
        cascade_of(batch, make_wrapper=None, device="cuda")
