"""Who reads shared prefixes once, and which CUDA graph a decode step takes.

There is no GPU here: backends of SGLang are looked at, not run, and steps are planned
without a forward.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import (
    AttentionBackend,
    SharedReadEnds,
)
from sglang.srt.layers.attention.hybrid_linear_attn_backend import (
    HybridLinearAttnBackend,
)
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MLATokenToKVPool,
    MLATokenToKVPoolFP4,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_memory_pool import (
    UnifiedHybridLinearKVPool,
    UnifiedSWAKVPool,
)
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner_utils.capture_mode import (
    _set_capture_attention_variant,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sgl_kernel_ext.shared_prefix_attention import (
    AttentionPlanner,
    Features,
    attention_ref,
    run_reference,
)
from sglang_batch.config import OfflineBatchConfig
from sglang_batch.errors import ConfigError, EngineError
from sglang_batch.srt.attention import attention_backend, attention_choice
from sglang_batch.srt.attention.attention_backend import (
    ALONE,
    SHARED,
    Implementation,
    Layers,
    SharedPrefixMixin,
    ShareVariants,
    variants_for,
)
from sglang_batch.srt.attention.attention_plans import StepPlans, sharing_backends
from sglang_batch.srt.attention.prefix_forest import NO_GROUPS, PrefixForest
from sglang_batch.srt.compat import support

HEADS, DIM, SLOTS, DRAFTS = 2, 16, 4000, 4
MODULES = {
    "FlashAttentionBackend": "flashattention_backend",
    "FlashInferAttnBackend": "flashinfer_backend",
    "TritonAttnBackend": "triton_backend",
    "TorchNativeAttnBackend": "torch_native_backend",
}


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


# --- the backends that SGLang has


@pytest.mark.parametrize("name", attention_choice.CLASSES)
def test_a_backend_prepares_a_step_in_one_place(name: str) -> None:
    """What SGLang's backend does for a step that shares is left out as a whole.

    Its source is read: some backends cannot be imported without a GPU.
    """
    spec = importlib.util.find_spec(f"sglang.srt.layers.attention.{MODULES[name]}")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    kind = next(
        each
        for each in ast.parse(source).body
        if isinstance(each, ast.ClassDef) and each.name == name
    )
    assert [ast.unparse(base) for base in kind.bases] == ["AttentionBackend"]
    methods = {
        each.name: each for each in kind.body if isinstance(each, ast.FunctionDef)
    }
    eager = ast.unparse(methods["init_forward_metadata"])
    assert "init_forward_metadata_out_graph(" not in eager
    # Such a backend would get its steps ready in a third place.
    assert "use_captured_forward_metadata_for_breakable" not in ast.unparse(kind)


# --- the choice


class Native:
    """Stands for an attention backend."""

    prefill_attention_backend_str = "native"


def attention(heads: int = HEADS, **given: Any) -> RadixAttention:
    return RadixAttention(2 * heads, DIM, 0.25, num_kv_heads=heads, layer_id=0, **given)


def model_runner(
    setting: str = "auto",
    device: str = "cuda",
    *,
    deterministic: bool = False,
    **arguments: str,
) -> SimpleNamespace:
    """As much of SGLang's model runner as the choice looks at."""
    pool = object.__new__(MHATokenToKVPool)
    pool.dtype = torch.float32
    named = dict.fromkeys(support.ATTENTION_ARGUMENTS) | arguments
    return SimpleNamespace(
        device=device,
        is_generation=True,
        dtype=torch.float32,
        model=attention(),
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(1)),
        attn_backend=type("TritonAttnBackend", (Native,), {})(),
        spec_algorithm=SpeculativeAlgorithm.NONE,
        server_args=SimpleNamespace(
            offline_config=OfflineBatchConfig(attention=setting),
            enable_torch_compile=False,
            enable_deterministic_inference=deterministic,
            rl_on_policy_target=None,
            **named,
        ),
    )


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Backends that were made to share, on a GPU that the kernel knows."""
    done: list[Any] = []
    one_rank = SimpleNamespace(tp_size=1, attn_tp_size=1)
    for module in (attention_choice, attention_choice):
        monkeypatch.setattr(module, "get_parallel", lambda: one_rank)
    monkeypatch.setattr(attention_backend, "share", lambda b, *_: done.append(b))
    monkeypatch.setattr(
        "sgl_kernel_ext.shared_prefix_attention.configs.device_family",
        lambda _: "hopper",
    )
    return done


def test_it_is_chosen_where_nobody_chose(shared: list[Any]) -> None:
    runner = model_runner()
    attention_choice.share_by_default(runner)
    assert shared == [runner.attn_backend]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"attention_backend": "fa3"}, "the choice of fa3"),
        ({"decode_attention_backend": "triton"}, "the choice of triton"),
        ({"device": "cpu"}, "a cpu, where"),
    ],
)
def test_it_is_not_chosen_where_somebody_chose(
    shared: list[Any],
    arguments: dict[str, str],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        attention_choice.share_by_default(model_runner(**arguments))
    assert not shared
    assert f"prefixes are not read once, because of {why}" in caplog.text


def test_unknown_devices_and_backends_and_models_are_left_alone(
    shared: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = model_runner()
    other.attn_backend = Native()
    attention_choice.share_by_default(other)
    crossed = model_runner()
    crossed.model = torch.nn.ModuleList(
        [attention(), attention(is_cross_attention=True)]
    )
    attention_choice.share_by_default(crossed)
    encoder = model_runner()
    encoder.is_generation = False
    attention_choice.share_by_default(encoder)
    monkeypatch.setattr(
        "sgl_kernel_ext.shared_prefix_attention.configs.device_family",
        lambda _: "default",
    )
    attention_choice.share_by_default(model_runner())
    attention_choice.share_by_default(model_runner("stock"))
    assert not shared


def test_deterministic_inference_has_no_shared_reads(shared: list[Any]) -> None:
    attention_choice.share_by_default(model_runner(deterministic=True))
    assert not shared


def test_who_asks_for_it_hears_why_not(shared: list[Any]) -> None:
    asked = model_runner("triton", attention_backend="fa3")
    attention_choice.share_by_default(asked)
    assert shared == [asked.attn_backend]
    asked.attn_backend = Native()
    with pytest.raises(ConfigError, match='"triton" does not work with SGLang\'s Nat'):
        attention_choice.share_by_default(asked)


def test_a_kernel_that_fails_its_trial_is_not_used(
    monkeypatch: pytest.MonkeyPatch, shared: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    def fails(backend: Any, runner: Any, layers: Any) -> None:
        raise EngineError("the kernel does not work on this device")

    monkeypatch.setattr(attention_backend, "share", fails)
    attention_choice.share_by_default(model_runner())
    assert "does not work on this device" in caplog.text
    with pytest.raises(EngineError):
        attention_choice.share_by_default(model_runner("triton"))


def test_ranks_share_only_together(
    monkeypatch: pytest.MonkeyPatch, shared: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    def makes_it_share(backend: Any, runner: Any, layers: Any) -> None:
        backend.__class__ = type("Shared", (type(backend),), {})

    runner = model_runner()
    kind = type(runner.attn_backend)
    monkeypatch.setattr(attention_backend, "share", makes_it_share)
    monkeypatch.setattr(attention_choice, "_by_all_ranks", lambda done: False)
    attention_choice.share_by_default(runner)
    assert type(runner.attn_backend) is kind
    assert "another rank cannot" in caplog.text


def test_a_backend_that_cannot_share_stays_what_it_was() -> None:
    backend = Stock()
    with pytest.raises(EngineError, match=r"\(AttributeError: .*\); choose another"):
        attention_backend.share(backend, SimpleNamespace(), Layers([attention()], []))
    assert type(backend) is Stock


def test_each_layer_shares_or_not(
    shared: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    runner = model_runner()
    window = attention(sliding_window_size=32)
    own_heads = attention(2 * HEADS)
    odd = attention(logit_cap=30.0, logit_capping_method="clamp")
    full = [attention(), attention(logit_cap=30.0)]
    runner.model = torch.nn.ModuleList([window, full[0], own_heads, odd, full[1]])
    found = attention_choice.find_layers(runner)
    assert found.shared == full
    assert found.why_not == [
        "a sliding window of 32 tokens",
        f"heads of their own ({(4 * HEADS, 2 * HEADS, DIM, DIM)})",
        "logits capped by clamp",
    ]
    attention_choice.share_by_default(runner)
    assert shared == [runner.attn_backend]
    beside = model_runner()
    beside.model = runner.model
    beside.attn_backend = type("FlashInferAttnBackend", (Native,), {})()
    attention_choice.share_by_default(beside)
    assert len(shared) == 1
    beside.server_args.offline_config = OfflineBatchConfig(attention="triton")
    attention_choice.share_by_default(beside)
    assert shared.pop() is beside.attn_backend
    runner.model = window
    with caplog.at_level("INFO"):
        attention_choice.share_by_default(runner)
    assert len(shared) == 1
    assert "because of a sliding window of 32 tokens." in caplog.text


def test_full_layers_beside_recurrent_ones_share(shared: list[Any]) -> None:
    runner = model_runner()
    full, linear = attention(), attention()
    linear.layer_id = 1
    runner.model = torch.nn.ModuleList([linear, full])
    runner.token_to_kv_pool = object.__new__(HybridLinearKVPool)
    runner.token_to_kv_pool.full_kv_pool = object.__new__(MHATokenToKVPool)
    runner.token_to_kv_pool.dtype = torch.float32
    runner.token_to_kv_pool.full_attention_layer_id_mapping = {0: 0}
    both = object.__new__(HybridLinearAttnBackend)
    both.full_attn_backend = runner.attn_backend
    runner.attn_backend = both
    assert attention_choice.find_layers(runner) == Layers([full], [])
    attention_choice.share_by_default(runner)
    assert shared == [both.full_attn_backend]
    runner.token_to_kv_pool.full_attention_layer_id_mapping = {}
    assert attention_choice.model_obstacle(runner) == "no attention layers"


def latent_layer(heads: int) -> RadixAttention:
    return RadixAttention(heads, 24, 0.25, num_kv_heads=1, layer_id=0, v_head_dim=16)


def test_latents_are_shared_where_somebody_asks(
    shared: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    runner, named = model_runner(), model_runner("triton")
    prompts, decodes = attention(), latent_layer(4)
    prompts.v_head_dim = 32
    for each in (runner, named):
        each.token_to_kv_pool = object.__new__(MLATokenToKVPool)
        each.token_to_kv_pool.kv_lora_rank = 16
        each.token_to_kv_pool.dtype = torch.float32
        each.model = torch.nn.ModuleList([decodes, prompts])
    assert attention_choice.find_layers(named) == Layers([decodes], [], latent=True)
    with caplog.at_level("INFO"):
        attention_choice.share_by_default(runner)
    assert not shared and "because of latents, with which" in caplog.text
    attention_choice.share_by_default(named)
    assert shared == [named.attn_backend]
    named.token_to_kv_pool.dtype = torch.float8_e4m3fn
    with pytest.raises(ConfigError, match="a KV cache of torch"):
        attention_choice.share_by_default(named)
    named.token_to_kv_pool = object.__new__(MLATokenToKVPoolFP4)
    named.token_to_kv_pool.kv_lora_rank = 16
    with pytest.raises(ConfigError, match="not work with a MLATokenToKVPoolFP4"):
        attention_choice.share_by_default(named)


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


def test_pools_with_plain_ones_for_full_layers(shared: list[Any]) -> None:
    plain, other = object.__new__(MHATokenToKVPool), object.__new__(MHATokenToKVPoolFP4)
    runner = model_runner()
    for kind, inner, found in (
        (SWAKVPool, plain, None),
        (SWAKVPool, other, "a SWAKVPool"),
        (UnifiedSWAKVPool, plain, "a UnifiedSWAKVPool"),
        (HybridLinearKVPool, plain, None),
        (HybridLinearKVPool, other, "a HybridLinearKVPool"),
        (UnifiedHybridLinearKVPool, plain, "a UnifiedHybridLinearKVPool"),
    ):
        runner.token_to_kv_pool = object.__new__(kind)
        runner.token_to_kv_pool.full_kv_pool = inner
        runner.token_to_kv_pool.dtype = torch.float32
        runner.token_to_kv_pool.full_attention_layer_id_mapping = {0: 0}
        assert attention_choice.model_obstacle(runner) == found


# --- steps


class Stock(AttentionBackend):  # type: ignore[misc]
    """One of SGLang's backends, which notes what it is asked for."""

    # As FlashInfer's has it; a backend of two parts has its part for decodes there.
    decode_backend = "fa2"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.asked.append("eager")

    def init_forward_metadata_out_graph(
        self, forward_batch: Any, in_capture: bool = False
    ) -> None:
        self.asked.append("capture" if in_capture else "replay")

    def forward_decode(self, q: torch.Tensor, *_: object, **options: object) -> Any:
        self.asked.append(f"attend {sorted(options)}")
        return q


class Sharing(SharedPrefixMixin, Stock):
    """What ``share`` makes of it."""


def planner(max_tokens: int = 32, kv_dtype: Any = None) -> AttentionPlanner:
    return AttentionPlanner(
        num_q_heads=HEADS, num_kv_heads=HEADS, head_dim=DIM, dtype=torch.float32,
        kv_dtype=kv_dtype, page_size=1, device="cpu", max_requests=8, max_tokens=max_tokens, max_nodes=8,
    )  # fmt: skip


@pytest.fixture
def backend() -> Sharing:
    made = Sharing()
    decodes = planner()
    made.plans = StepPlans(decodes, planner(64), num_layers=3)
    made.implementation = Implementation("ours", run_reference, capturable=True)
    own = RadixAttention(HEADS, DIM, 0.25, num_kv_heads=HEADS, layer_id=0)
    made._layers = Layers([own], [])
    return made


def decode(*kv_len: int) -> SimpleNamespace:
    lengths = torch.tensor(kv_len)
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(kv_len),
        seq_lens_cpu=lengths,
        needs_forward_metadata_init=lambda: True,
    )


def verify(*before: int) -> SimpleNamespace:
    """``DRAFTS`` tokens of each request, which SGLang's lengths do not count."""
    batch = decode(*before)
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    batch.spec_info = SimpleNamespace(draft_token_num=DRAFTS)
    return batch


def groups(*nodes: int, end: int = 1000) -> PrefixForest:
    return PrefixForest(
        np.arange(len(nodes), dtype=np.int32), ints(*nodes), ints(-1), ints(end)
    )


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
    """Also beside steps of the same requests without drafts."""
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


@pytest.mark.parametrize(
    ("drafts", "wanted"), [((None, None, None), 0), (("NGRAM", 1, 6), 6), (("EAGLE", 4, 6), 0), (("NGRAM", 1, 1), 0)]
)  # fmt: skip
def test_a_chain_of_drafts_has_a_planner(
    monkeypatch: pytest.MonkeyPatch, drafts: tuple[Any, ...], wanted: int
) -> None:
    names = "algorithm", "eagle_topk", "num_draft_tokens"
    spec = {
        f"speculative_{name}": value for name, value in zip(names, drafts, strict=True)
    }
    schedule = SimpleNamespace(enable_mixed_chunk=False)
    monkeypatch.setattr(attention_backend, "get_spec", lambda: SimpleNamespace(**spec))
    monkeypatch.setattr(attention_backend, "get_schedule", lambda: schedule)
    runner = model_runner("torch", "cpu")
    runner.req_to_token_pool.req_to_token = torch.zeros(5, 100, dtype=torch.int32)
    stock = Stock()
    stock.needs_cpu_seq_lens = False  # as FlashAttention 3 has it
    attention_backend.share(stock, runner, Layers([attention()], []))
    plans = cast("SharedPrefixMixin", stock).plans
    assert plans.width(ForwardMode.TARGET_VERIFY) == wanted
    assert plans._chunks is None or plans._chunks.max_tokens == 5 * wanted
    assert stock.needs_cpu_seq_lens


def test_a_draft_model_does_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups import model_override_base
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    for module, name in (
        (model_override_base, "get_default_attn_backend"),
        (attention_choice, "model_obstacle"),
    ):
        monkeypatch.setattr(module, name, lambda *_: "triton")
    monkeypatch.setitem(ATTENTION_BACKENDS, "triton", lambda runner: Stock())
    runner = model_runner()
    runner.model_config, runner.is_draft_worker = None, True
    assert type(attention_choice.make_backend(runner)) is Stock
    runner.is_draft_worker = False
    with pytest.raises(ConfigError, match="shared_prefix does not work with triton"):
        attention_choice.make_backend(runner)


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
