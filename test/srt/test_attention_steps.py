"""Which steps read shared prefixes once, and which CUDA graph a decode step takes.

There is no GPU here: steps are planned without a forward, or attention is run by PyTorch.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import (
    SharedReadEnds,
)
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner_utils.capture_mode import (
    _set_capture_attention_variant,
)
from sharing_backend import (
    DIM,
    DRAFTS,
    HEADS,
    SLOTS,
    Sharing,
    Stock,
    attention,
    decode,
    groups,
    latent_layer,
    planner,
    sharing_backend,
    verify,
)

from sgl_kernel_ext.shared_prefix_attention import (
    AttentionPlanner,
    Features,
    attention_ref,
    run_reference,
)
from sglang_batch.errors import ConfigError, EngineError
from sglang_batch.srt.attention.attention_backend import (
    ALONE,
    SHARED,
    Implementation,
    Layers,
    ShareVariants,
    variants_for,
)
from sglang_batch.srt.attention.attention_plans import StepPlans, sharing_backends
from sglang_batch.srt.attention.prefix_forest import NO_GROUPS, PrefixForest


@pytest.fixture
def backend() -> Sharing:
    return sharing_backend()


def test_backends_that_share_are_found_within_others(backend: Sharing) -> None:
    halves = SimpleNamespace(decode_backend=Stock(), prefill_backend=backend)
    whole = SimpleNamespace(full_attn_backend=halves, linear_attn_backend=Stock())
    assert sharing_backends(whole) == [backend]
    assert sharing_backends(whole, ForwardMode.DECODE) == []
    # SGLang verifies drafts by one of the two.
    assert sharing_backends(whole, ForwardMode.TARGET_VERIFY) == [backend]
    halves.spec_attn_is_decode = True
    assert sharing_backends(whole, ForwardMode.TARGET_VERIFY) == []
    halves.decode_backend = halves.prefill_backend
    assert sharing_backends(whole, ForwardMode.DECODE) == [backend]
    assert sharing_backends(backend) == [backend]
    assert sharing_backends(Stock()) == []


def test_graphs_of_both_kinds_are_captured(backend: Sharing) -> None:
    found = variants_for(
        lambda *_: None, SimpleNamespace(attn_backend=backend), ForwardMode.DECODE, 1
    )
    assert isinstance(found, ShareVariants)
    assert set(found.capture_labels) == {SHARED, ALONE}
    for label, asked in ((ALONE, ["capture"]), (SHARED, ["capture"])):
        _set_capture_attention_variant(label)
        backend.init_forward_metadata_out_graph(decode(1, 1, 1), in_capture=True)
        assert backend.asked == asked
        assert (backend._step is not None) == (label == SHARED)
    _set_capture_attention_variant(None)
    assert backend.plans.counts["attention_steps"] == 0


def test_variants_of_other_runners_are_left_alone(backend: Sharing) -> None:
    def asks(attention: Any, mode: ForwardMode, found: Any = None) -> Any:
        runner = SimpleNamespace(attn_backend=attention)
        return variants_for(lambda *_: found, runner, mode, 1)

    assert asks(Stock(), ForwardMode.DECODE) is None
    assert asks(backend, ForwardMode.TARGET_VERIFY) is None
    assert asks(backend, ForwardMode.DECODE, "SGLang's") == "SGLang's"
    hybrid = SimpleNamespace(decode_backend=backend, prefill_backend=Stock())
    assert isinstance(asks(hybrid, ForwardMode.DECODE), ShareVariants)
    backend.implementation = Implementation("torch", run_reference)
    with pytest.raises(ConfigError, match="add --disable-cuda-graph"):
        asks(backend, ForwardMode.DECODE)


def test_each_step_replays_the_graph_that_pays(backend: Sharing) -> None:
    variants = ShareVariants(backend)
    same = groups(0, 0, 0)

    def step(now: PrefixForest, *kv_len: int, padded: int = 0) -> str:
        backend.groups = now
        label = variants.select(decode(*kv_len))
        assert variants.select(decode(*kv_len)) == label  # it may be asked again
        backend.asked.clear()
        backend.init_forward_metadata_out_graph(decode(*kv_len, *[1] * padded))
        assert backend.asked == ([] if label == SHARED else ["replay"])
        assert backend.groups is NO_GROUPS
        return label

    assert step(same, 1010, 1020, 1030, padded=1) == SHARED
    first = backend._step
    assert first is not None
    assert first.groups.request_node.tolist() == [0, 0, 0, -1]
    assert step(same, 1011, 1021, 1031, padded=1) == SHARED
    assert backend._step is not None and backend._step.plan is first.plan
    assert step(groups(-1, -1, -1), 1010, 1020, 1030) == ALONE
    assert step(groups(0, 0, 0, end=2), 30, 20, 10) == ALONE
    assert step(NO_GROUPS, 30, 20) == ALONE  # not the scheduler's, and not counted
    # What replays is what was selected, whatever would pay.
    backend.groups = same
    backend.asked.clear()
    backend.init_forward_metadata_out_graph(decode(1012, 1022, 1032))
    assert backend.asked == ["replay"] and backend._step is None
    assert backend.shared_read_ends(ForwardMode.DECODE) != SharedReadEnds.UNKNOWN
    counts = backend.plans.counts
    assert (counts["attention_steps"], counts["attention_steps_shared"]) == (5, 2)
    assert counts["kv_read_bytes_saved"] == 2 * 2 * 1000 * 256 * 3


def test_steps_without_a_graph(backend: Sharing) -> None:
    backend.groups = groups(0, 0, 0)
    backend.init_forward_metadata(decode(1010, 1020, 1030))
    assert not backend.asked and backend._step is not None
    # SGLang runs prompts beside decodes as prompts.
    mixed = decode(1010, 1020, 1030)
    mixed.forward_mode = ForwardMode.EXTEND
    mixed.extend_seq_lens_cpu = [10, 1, 1]
    backend.groups = groups(0, 0, 0)
    backend.init_forward_metadata(mixed)
    assert not backend.asked and backend._step is not None
    assert backend._step.plan.num_tokens == 12
    # Prompts alone: the scheduler has left no groups.
    backend.init_forward_metadata(mixed)
    assert backend.asked == ["eager"] and backend._step is None
    assert backend.plans.counts["attention_steps"] == 2


@pytest.fixture
def verifying(backend: Sharing) -> Sharing:
    backend.plans = StepPlans(planner(), planner(8 * DRAFTS), 3, DRAFTS)
    return backend


def test_drafts_in_a_row_are_verified_like_decodes(verifying: Sharing) -> None:
    """Also between steps of the same requests without drafts."""
    same, kept = groups(0, 0, 0), []
    for batch in (decode(1010, 1020, 1030), verify(1010, 1020, 1030), verify(30, 20)):
        verifying.groups = same
        verifying.init_forward_metadata(batch)
        kept.append(verifying._step)
    assert verifying.asked == ["eager"] and kept.pop() is None
    decodes, drafts = (step.plan for step in kept)
    assert (decodes.num_tokens, drafts.num_tokens) == (3, 3 * DRAFTS)
    assert drafts.kv_len.tolist() == [1014, 1024, 1034]
    # Trees of them are left to SGLang, and count as steps.
    verifying.plans = StepPlans(planner(), None, 3)
    verifying.groups = same
    verifying.init_forward_metadata(verify(1010, 1020, 1030))
    assert verifying.asked == ["eager"] * 2 and verifying._step is None
    assert verifying.plans.counts["attention_steps"] == 1
    assert verifying.plans.counts["kv_read_bytes"] == (3060 + 3 * DRAFTS) * 256 * 3


def test_graphs_of_drafts_in_a_row(verifying: Sharing) -> None:
    mode = ForwardMode.TARGET_VERIFY
    runner = SimpleNamespace(attn_backend=verifying)
    variants = variants_for(lambda *_: None, runner, mode, DRAFTS)
    assert isinstance(variants, ShareVariants)
    for label in variants.capture_labels:
        _set_capture_attention_variant(label)
        verifying.init_forward_metadata_out_graph(verify(1, 1, 1), in_capture=True)
    _set_capture_attention_variant(None)
    assert verifying.asked == ["capture"] and verifying._step is not None
    assert verifying._step.plan.num_tokens == 3 * DRAFTS
    assert verifying._grid == verifying._step.plan.planner.fixed_grid
    torch.manual_seed(0)
    verifying._slots = torch.randperm(SLOTS)[: 4 * 1000].view(4, 1000).int()
    verifying._slots[:3, :900] = verifying._slots[0, :900].clone()
    k, v = (torch.randn(SLOTS, HEADS, DIM) for _ in range(2))
    verifying._kv = SimpleNamespace(get_kv_buffer=lambda _: (k, v))
    verifying.groups = groups(0, 0, 0, end=900)
    batch = verify(910, 920, 930)
    assert variants.select(batch) == SHARED
    padded = verify(910, 920, 930, 1)
    padded.seq_lens = padded.seq_lens_cpu
    verifying.init_forward_metadata_out_graph(padded)
    # SGLang prepares drafts, and then asks again which graph to replay.
    batch.needs_forward_metadata_init = lambda: False
    assert variants.select(batch) == SHARED
    verifying._grid = None  # of the kernel's launch; PyTorch has none
    q = torch.randn(4 * DRAFTS, HEADS * DIM)
    layer = verifying._layers.shared[0]
    out = verifying.forward_extend(q, None, None, layer, padded)
    wanted, _ = attention_ref(
        q.view(-1, HEADS, DIM), k, v, verifying._slots, [DRAFTS] * 4,
        [914, 924, 934, 5], [0, 1, 2, 0], 1, 0.25,
    )  # fmt: skip
    torch.testing.assert_close(out.view_as(wanted), wanted, atol=1e-5, rtol=1e-5)
    assert verifying.plans.counts["attention_steps_shared"] == 1


def test_latents_come_whole_or_in_two_parts(backend: Sharing) -> None:
    """Four heads read them in two halves, as if there were two KV heads."""
    torch.manual_seed(0)
    layer = latent_layer(4)
    backend._layers = Layers([layer], [], latent=True)
    made = AttentionPlanner(
        num_q_heads=4, num_kv_heads=2, head_dim=24, v_head_dim=16, latent=True,
        dtype=torch.float32, page_size=1, device="cpu", max_requests=8, max_tokens=32,
        max_nodes=8,
    )  # fmt: skip
    backend.plans = StepPlans(made, None, num_layers=1)
    backend._slots = torch.arange(1000).view(1, 1000).expand(3, 1000).int()
    k = torch.randn(1000, 1, 24)
    written: list[Any] = []
    backend._kv = SimpleNamespace(
        get_kv_buffer=lambda _: (k, k[..., :16]),
        set_kv_buffer=lambda _, place, k, v: written.append(k),
        set_mla_kv_buffer=lambda _, place, k, rope: written.append((k, rope)),
    )
    batch = decode(910, 920, 930)
    batch.seq_lens, batch.out_cache_loc = batch.seq_lens_cpu, torch.tensor([1, 2, 3])
    q, own = torch.randn(3, 4, 24), torch.randn(3, 1, 24)
    wanted, _ = attention_ref(
        q, k, k[..., :16], backend._slots, [1] * 3, [910, 920, 930], [0, 1, 2], 1, 0.25
    )
    backend.groups = groups(0, 0, 0, end=900)
    backend.init_forward_metadata(batch)
    out = backend.forward_decode(q.flatten(1), own, own[..., :16], layer, batch)
    assert written.pop() is own
    torch.testing.assert_close(out.view_as(wanted), wanted, atol=2e-5, rtol=2e-5)
    parts = {"q_rope": q[..., 16:], "k_rope": own[..., 16:]}
    latent = own[..., :16]
    again = backend.forward_decode(q[..., :16], latent, latent, layer, batch, **parts)
    assert written.pop() == (latent, parts["k_rope"])
    assert torch.equal(again, out)


def test_layers_that_are_left_are_prepared_and_run_by_the_stock_backend(
    backend: Sharing,
) -> None:
    backend._layers.why_not.append("a sliding window of 32 tokens")
    backend.groups = groups(0, 0, 0)
    backend.init_forward_metadata(decode(1010, 1020, 1030))
    assert backend.asked == ["eager"] and backend._step is not None
    q = torch.randn(3, HEADS * DIM)
    window = attention(sliding_window_size=32)
    sinks = torch.ones(HEADS)
    out = backend.forward_decode(q, None, None, window, decode(1), sinks=sinks)
    assert out is q and backend.asked.pop() == "attend ['sinks']"
    backend.asked.clear()
    for label in (ALONE, SHARED):
        _set_capture_attention_variant(label)
        backend.init_forward_metadata_out_graph(decode(1, 1, 1), in_capture=True)
    _set_capture_attention_variant(None)
    assert backend.asked == ["capture", "capture"]
    backend.groups = groups(0, 0, 0)
    assert ShareVariants(backend).select(decode(1010, 1020, 1030)) == SHARED
    backend.init_forward_metadata_out_graph(decode(1010, 1020, 1030))
    assert backend.asked.pop() == "replay" and backend._step is not None


def test_both_graphs_of_a_size_read_one_plan_of_flashinfer(backend: Sharing) -> None:
    """FlashInfer makes a plan in every capture, and finds it by the size at a replay.
    Drafts have plans of their own.

    Its source is read: it cannot be imported without a GPU.
    """
    spec = importlib.util.find_spec("sglang.srt.layers.attention.flashinfer_backend")
    assert spec is not None and spec.origin is not None
    source = ast.unparse(ast.parse(Path(spec.origin).read_text()))
    for line in (
        "decode_wrappers = self._create_decode_wrappers(bs, num_tokens)",
        "self.decode_cuda_graph_metadata[bs] = decode_wrappers",
        "decode_wrappers=self.decode_cuda_graph_metadata[bs]",
        "prefill_wrappers = self._create_prefill_wrappers(bs, use_custom_mask)",
        "self.prefill_cuda_graph_metadata[bs] = prefill_wrappers",
        "prefill_wrappers=self.prefill_cuda_graph_metadata[bs]",
    ):
        assert line in source
    assert list(ShareVariants.capture_labels) == [ALONE, SHARED]
    first, drafts = [object()], [object()]
    backend.decode_cuda_graph_metadata = {3: first}
    backend.prefill_cuda_graph_metadata = {3: drafts}
    _set_capture_attention_variant(SHARED)
    found = backend._create_decode_wrappers(3, 3)
    assert backend._create_prefill_wrappers(3, True) is drafts
    _set_capture_attention_variant(None)
    assert found is first


def test_rows_of_padding_are_attended_for(backend: Sharing) -> None:
    torch.manual_seed(0)
    backend._slots = torch.randperm(SLOTS)[: 4 * 1000].view(4, 1000).int()
    backend._slots[:3, :900] = backend._slots[0, :900].clone()
    k, v = (torch.randn(SLOTS, HEADS, DIM) for _ in range(2))
    backend._kv = SimpleNamespace(get_kv_buffer=lambda _: (k, v))
    batch = decode(910, 920, 930, 1)
    batch.seq_lens = batch.seq_lens_cpu
    backend.groups = groups(0, 0, 0, end=900)
    assert ShareVariants(backend).select(decode(910, 920, 930)) == SHARED
    backend.init_forward_metadata_out_graph(batch)
    assert backend._step is not None
    # The row of padding has the table row 0.
    q = torch.randn(4, HEADS * DIM)
    layer = backend._layers.shared[0]
    backend._grid = None  # of the kernel's launch; PyTorch has none
    assert backend.shared_read_ends(ForwardMode.DECODE) == SharedReadEnds.UNKNOWN
    out = backend.forward_decode(q, None, None, layer, batch)
    wanted, _ = attention_ref(
        q.view(4, HEADS, DIM), k, v, backend._slots, [1] * 4, [910, 920, 930, 1],
        [0, 1, 2, 0], 1, 0.25,
    )  # fmt: skip
    assert out.shape == q.shape
    torch.testing.assert_close(out.view_as(wanted), wanted, atol=1e-5, rtol=1e-5)
    # Some models hand in heads apart; SGLang's backends answer alike.
    apart = backend.forward_decode(q.view(wanted.shape), None, None, layer, batch)
    assert torch.equal(apart, out)
    backend.forward_decode(q, None, None, layer, batch, q_rope=None)
    sinks = torch.tensor([3.0, -1.0])
    weighed = backend.forward_decode(q, None, None, layer, batch, sinks=sinks)
    wanted, _ = attention_ref(
        q.view(4, HEADS, DIM), k, v, backend._slots, [1] * 4, [910, 920, 930, 1],
        [0, 1, 2, 0], 1, 0.25, Features(sinks=sinks),
    )  # fmt: skip
    torch.testing.assert_close(weighed.view_as(wanted), wanted, atol=1e-5, rtol=1e-5)
    with pytest.raises(EngineError, match="attends with q_rope, which"):
        backend.forward_decode(q, None, None, layer, batch, q_rope=torch.ones(1))


def test_scales_of_fp8_are_written_and_read(backend: Sharing) -> None:
    fp8 = torch.float8_e4m3fn
    backend.plans = StepPlans(planner(32, fp8), None, num_layers=1)
    torch.manual_seed(0)
    backend._slots = torch.arange(1000).view(1, 1000).expand(3, 1000).int()
    k, v = (torch.randn(1000, HEADS, DIM).to(fp8) for _ in range(2))
    written: list[Any] = []
    backend._kv = SimpleNamespace(
        get_kv_buffer=lambda _: (k, v),
        set_kv_buffer=lambda *given: written.append(given),
    )
    layer = backend._layers.shared[0]
    layer.k_scale, layer.v_scale = torch.tensor(0.5), torch.tensor(3.0)
    layer.k_scale_float, layer.v_scale_float = 0.5, 3.0
    batch = decode(910, 920, 930)
    batch.seq_lens, batch.out_cache_loc = batch.seq_lens_cpu, torch.tensor([1, 2, 3])
    q, own = torch.randn(3, HEADS * DIM), torch.randn(3, HEADS, DIM)
    for scaled, scale, factor in ((True, 0.125, 3.0), (False, 0.25, 1.0)):
        backend._scaled = scaled  # not by SGLang's backend for a CPU
        backend.groups = groups(0, 0, 0, end=900)
        backend.init_forward_metadata(batch)
        assert backend._step is not None
        out = backend.forward_decode(q, own, own, layer, batch)
        assert written.pop()[4:] == ((0.5, 3.0) if scaled else ())
        wanted, _ = attention_ref(
            q.view(3, HEADS, DIM), k.float(), v.float() * factor, backend._slots,
            [1] * 3, [910, 920, 930], [0, 1, 2], 1, scale,
        )  # fmt: skip
        torch.testing.assert_close(out.view_as(wanted), wanted, atol=2e-5, rtol=2e-5)
