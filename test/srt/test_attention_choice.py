"""Who reads shared prefixes once.

There is no GPU here: backends of SGLang are looked at, not run.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import (
    HybridLinearAttnBackend,
)
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
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sharing_backend import (
    DIM,
    HEADS,
    Stock,
    attention,
    latent_layer,
)

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.errors import ConfigError, EngineError
from sglang_batch.srt.attention import attention_backend, attention_choice
from sglang_batch.srt.attention.attention_backend import (
    Layers,
    SharedPrefixMixin,
)
from sglang_batch.srt.compat import support

MODULES = {
    "FlashAttentionBackend": "flashattention_backend",
    "FlashInferAttnBackend": "flashinfer_backend",
    "TritonAttnBackend": "triton_backend",
    "TorchNativeAttnBackend": "torch_native_backend",
}


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


class Native:
    """Stands for an attention backend."""

    prefill_attention_backend_str = "native"


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
