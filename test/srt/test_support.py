"""What the offline scheduler does not work with is refused in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import preloaded
import pytest
from forked_children import command
from sglang.srt.server_args import ServerArgs

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.errors import ConfigError
from sglang_batch.srt.compat.support import (
    CACHE_BACKEND,
    LIMITS,
    REFUSALS,
    SET_BY_SGLANG,
    check_deterministic,
    check_supported,
    found_limits,
    is_deterministic,
)

WAY_OUT = """--offline-batch-config '{"scheduler": "stock"}'"""

REFUSED: list[tuple[str, Any, str]] = [
    ("disable_radix_cache", True, "--disable-radix-cache does"),
    ("radix_cache_backend", "flexkv", "--radix-cache-backend flexkv does"),
    ("radix_eviction_policy", "lfu", "--radix-eviction-policy lfu does"),
    ("hicache_storage_backend", "file", "--hicache-storage-backend file does"),
    ("hicache_host_memory_mode", "buffer_only", "--hicache-host-memory-mode"),
    ("enable_lmcache", True, "--enable-lmcache does"),
    ("enable_flexkv", True, "--enable-flexkv does"),
    ("enable_unified_cache_external_linker", True, "external-linker does"),
    ("enable_session_radix_cache", True, "--enable-session-radix-cache does"),
    ("enable_streaming_session", True, "--enable-streaming-session does"),
    ("enable_hisparse", True, "--enable-hisparse does"),
    ("enable_unified_memory", True, "--enable-unified-memory does"),
    ("enable_page_major_kv_layout", True, "--enable-page-major-kv-layout does"),
    ("enable_kv_cache_sharding", True, "--enable-kv-cache-sharding does"),
    ("schedule_policy", "lpm", "--schedule-policy lpm does"),
    ("enable_priority_scheduling", True, "--enable-priority-scheduling does"),
    ("retraction_policy", "priority", "--retraction-policy priority does"),
    ("schedule_conservativeness", 0.3, "--schedule-conservativeness 0.3 does"),
    ("enable_prefill_delayer", True, "--enable-prefill-delayer does"),
    ("min_free_slots_delay", 4, "--min-free-slots-delay 4 does"),
    ("prefill_decode_interval", 2, "--prefill-decode-interval 2 does"),
    ("max_queued_requests", 100, "--max-queued-requests 100 does"),
    ("enable_pdmux", True, "--enable-pdmux does"),
    ("enable_two_batch_overlap", True, "--enable-two-batch-overlap does"),
    ("enable_megamoe_for_layernorm_sp", True, "--enable-megamoe-for-layernorm-sp does"),
    ("enable_mis", True, "--enable-mis does"),
    ("prefill_only_disable_kv_cache", True, "--prefill-only-disable-kv-cache does"),
    ("speculative_algorithm", "DFLASH", "--speculative-algorithm DFLASH does"),
    ("enable_multi_layer_eagle", True, "--enable-multi-layer-eagle does"),
    ("decoupled_spec_role", "verifier", "--decoupled-spec-role verifier does"),
    ("dllm_algorithm", "LowConfidence", "--dllm-algorithm LowConfidence does"),
    ("enable_lora_overlap_loading", True, "--enable-lora-overlap-loading does"),
    ("lora_drain_wait_threshold", 1.5, "--lora-drain-wait-threshold 1.5 does"),
    ("uno_lora_path", "a", "--uno-lora-path a does"),
    ("dcp_size", 2, "--dcp-size 2 does"),
    ("attn_cp_size", 2, "--attn-cp-size 2 does"),
    ("enable_prefill_cp", True, "--enable-prefill-cp does"),
    ("elastic_ep_backend", "nixl", "--elastic-ep-backend nixl does"),
]


@pytest.mark.parametrize(("name", "value", "flag"), REFUSED)
def test_flag_is_refused(name: str, value: Any, flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_supported({name: value})
    message = str(caught.value)
    assert flag in message
    assert message.endswith(f", or give {WAY_OUT}.")


def test_every_refusal_is_tested_and_is_a_field_of_sglang() -> None:
    names = {name for refusal in REFUSALS for name in refusal.fields.split()}
    assert names == {name for name, _, _ in REFUSED}
    assert names <= set(ServerArgs.__struct_fields__)
    assert set(SET_BY_SGLANG) <= names


def test_defaults_are_not_refused() -> None:
    defaults = ServerArgs(model_path="m")
    check_supported({n: getattr(defaults, n) for n in ServerArgs.__struct_fields__})
    check_supported({})


def test_harmless_values_are_not_refused() -> None:
    check_supported(
        {
            "radix_cache_backend": CACHE_BACKEND,
            "kv_cache_dtype": "nvfp4",
            "kv_canary": "raise",
            "enable_return_routed_experts": True,
            "enable_deterministic_inference": True,
            "enable_hierarchical_cache": True,
            "min_free_slots_delay": 1,
            "prefill_decode_interval": 0,
            "chunked_prefill_size": 2048,
            "elastic_ep_backend": "none",
            "lora_paths": [],
            "dp_size": 4,
            "tp_size": 4,
            "pp_size": 2,
            "attn_dp_size": 2,
            "enable_dp_attention": True,
            "enable_mixed_chunk": True,
            "disable_overlap_schedule": True,
        }
    )


SLOTS = "keeps data per KV slot, and an offloaded request resumes in other slots"
LIMITED: list[tuple[str, Any, str]] = [
    ("kv_cache_dtype", "mxfp8", "--kv-cache-dtype mxfp8 keeps scales besides KV"),
    ("kv_cache_dtype", "nvfp4", "--kv-cache-dtype nvfp4 keeps scales besides KV"),
    (
        "kv_cache_dtype",
        "fp4_mx_block16",
        "--kv-cache-dtype fp4_mx_block16 keeps scales besides KV",
    ),
    ("enable_return_routed_experts", True, f"--enable-return-routed-experts {SLOTS}"),
    ("enable_return_indexer_topk", True, f"--enable-return-indexer-topk {SLOTS}"),
    ("kv_canary", "log", f"--kv-canary log {SLOTS}"),
    ("kv_canary", "raise", f"--kv-canary raise {SLOTS}"),
]


@pytest.mark.parametrize(("name", "value", "reason"), LIMITED)
def test_flag_forbids_offloading(name: str, value: Any, reason: str) -> None:
    arguments = ServerArgs(model_path="m")
    assert found_limits(arguments) == ()
    assert found_limits(msgspec.structs.replace(arguments, **{name: value})) == (
        reason,
    )


def test_every_limit_is_tested_and_is_a_value_of_sglang() -> None:
    assert {name for limit in LIMITS for name in limit.fields.split()} == {
        name for name, _, _ in LIMITED
    }
    for limit in LIMITS:
        for name in limit.fields.split() if limit.values else ():
            found = {value for field, value, _ in LIMITED if field == name}
            assert found == set(limit.values)
    for fine in ("auto", "bfloat16", "fp8_e4m3"):
        arguments = ServerArgs(model_path="m", kv_cache_dtype=fine)
        assert found_limits(arguments) == ()


def test_variable_forbids_offloading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    assert found_limits(ServerArgs(model_path="m")) == (
        "SGLANG_USE_HND_KVCACHE=1 lays KV out per head",
    )


def deterministic(**values: Any) -> Any:
    fields = {
        "attention_backend": "fa3",
        "disable_radix_cache": False,
        "enable_mixed_chunk": False,
        "enable_deterministic_inference": True,
        "rl_on_policy_target": None,
    }
    return SimpleNamespace(**fields | values)


def test_what_deterministic_inference_does_without() -> None:
    plain = OfflineBatchConfig()
    check_deterministic(deterministic(), plain)
    for arguments, config, wrong in (
        (
            {"attention_backend": "flashinfer", "disable_radix_cache": True},
            plain,
            "--attention-backend flashinfer, for which SGLang turns off the prefix",
        ),
        ({"enable_mixed_chunk": True}, plain, "--enable-mixed-chunk"),
        ({}, OfflineBatchConfig(mixed_chunk=True), "--enable-mixed-chunk"),
        ({}, OfflineBatchConfig(attention="torch"), 'attention="torch"'),
    ):
        with pytest.raises(ConfigError) as caught:
            check_deterministic(deterministic(**arguments), config)
        assert wrong in str(caught.value)
        assert str(caught.value).endswith(f", or give {WAY_OUT}.")


def test_an_on_policy_target_is_deterministic() -> None:
    assert not is_deterministic(ServerArgs(model_path="m"))
    for flag in (
        {"enable_deterministic_inference": True},
        {"rl_on_policy_target": "fsdp"},
    ):
        assert is_deterministic(ServerArgs(model_path="m", **flag))


def launch(model: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Start a server that must end by itself."""
    common = ("--host=127.0.0.1", "--dtype=float32", "--offline-batch")
    return preloaded.run(
        command("server_main", f"--model-path={model}", *common, *args), timeout=200
    )


def assert_one_sentence(done: subprocess.CompletedProcess[str], start: str) -> None:
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and lines[-1] == errors[0], done.stderr[-2000:]
    assert errors[0].startswith(f"error: {start}")
    assert errors[0].endswith(f"give {WAY_OUT}.")
    assert "Traceback" not in done.stderr


def test_server_refuses_a_flag(tmp_path: Path) -> None:
    assert_one_sentence(
        launch(tmp_path, "--enable-lmcache"),
        "--enable-lmcache does not work with the offline scheduler: ",
    )


LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **LLAMA},
    "state-space": {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        **LLAMA,
    },
    "sliding-window": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **LLAMA,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 32,
    },
    "no-hybrid-memory": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **LLAMA,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 32,
    },
    "images": {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        **LLAMA,
        "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64},
    },
    "encoder-decoder": {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "d_model": 64,
        "vocab_size": 128,
    },
}


def write_config(path: Path, kind: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(MODELS[kind]))
    return path


def test_server_refuses_a_model(tmp_path: Path) -> None:
    model = write_config(tmp_path / "model", "encoder-decoder")
    assert_one_sentence(
        launch(model),
        "WhisperForConditionalGeneration does not work with the offline scheduler: ",
    )


# Resolves the arguments of sglang.Engine for each model, and says how that ended.
ENGINE_ARGS = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.overrides import resolving_view
from sglang_batch.config import OfflineBatchConfig
from sglang_batch.errors import ConfigError
from sglang_batch.srt.plugin.offline_server_args import make_server_args
for name, extra in json.loads(sys.argv[1]):
    args = {"dtype": "float32", "offline_batch": True, **extra}
    record = make_server_args(model_path=name, **args)
    try:
        record.resolve_once()
        view = resolving_view(record)
        how = "sleeps" if view.sleep_on_idle else "spins"
        print(f"fine, {how} when idle, gc {view.gc_threshold}")
    except ConfigError as error:
        print(error)
    except BaseException as error:
        print(type(error).__name__, str(error).splitlines()[:1])
"""


def test_kinds_of_models(tmp_path: Path) -> None:
    paths = {kind: str(write_config(tmp_path / kind, kind)) for kind in MODELS}
    stock = {"offline_batch_config": {"scheduler": "stock"}}
    runs: list[tuple[str, dict[str, Any], str]] = [
        ("plain", {}, "fine, sleeps when idle"),
        (
            "plain",
            {"sleep_on_idle": False},
            "fine, spins when idle, gc [20000, 20, 50]",
        ),
        ("plain", {"gc_threshold": [700]}, "fine, sleeps when idle, gc [700]"),
        ("plain", {"offline_batch_config": {"sleep_on_idle": False}}, "fine, spins"),
        ("state-space", {}, "fine"),
        ("state-space", {"page_size": 16}, "--page-size 16 does not work"),
        (
            "state-space",
            {"mamba_radix_cache_strategy": "extra_buffer"},
            "--mamba-radix-cache-strategy extra_buffer does not work",
        ),
        ("sliding-window", {"attention_backend": "triton"}, "fine"),
        (
            "sliding-window",
            {"disable_hybrid_swa_memory": True, "attention_backend": "triton"},
            "fine",
        ),
        (
            "sliding-window",
            {
                "disaggregation_mode": "prefill",
                "disaggregation_transfer_backend": "tcp",
                "attention_backend": "triton",
            },
            "GptOssForCausalLM does not work with --disaggregation-mode prefill",
        ),
        ("sliding-window", stock, "fine"),
        ("plain", {"schedule_policy": "lpm", **stock}, "fine"),
        ("plain", {"enable_deterministic_inference": True}, "fine"),
        ("plain", {"rl_on_policy_target": "fsdp"}, "fine"),
        (
            "plain",
            {"enable_deterministic_inference": True, "enable_mixed_chunk": True},
            "--enable-deterministic-inference with the offline scheduler does not work",
        ),
        (
            "plain",
            {
                "enable_deterministic_inference": True,
                "attention_backend": "flashinfer",
            },
            "--enable-deterministic-inference with the offline scheduler does not work",
        ),
        ("plain", {"enable_hierarchical_cache": True}, "fine"),
        ("no-hybrid-memory", {}, "fine"),
        ("images", {}, "fine"),
        ("encoder-decoder", {}, "WhisperForConditionalGeneration does not work"),
    ]
    wanted = json.dumps([(paths[kind], extra) for kind, extra, _ in runs])
    done = preloaded.run([sys.executable, "-c", ENGINE_ARGS, wanted])
    said = done.stdout.strip().splitlines()
    assert len(said) == len(runs), done.stderr[-3000:]
    for sentence, (kind, extra, expected) in zip(said, runs, strict=True):
        assert expected in sentence, (kind, extra, sentence)
        assert expected.startswith("fine") or sentence.endswith(f"give {WAY_OUT}.")


# Decode CUDA graphs go as far as rows may run, on a GPU that is only named here.
GRAPH_ROWS = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.overrides import resolving_view
from sglang_batch.srt.plugin import defaults
from sglang_batch.srt.plugin.offline_server_args import make_server_args
for extra in json.loads(sys.argv[2]):
    args = {"device": "cuda", "offline_batch": True, **extra}
    record = make_server_args(model_path=sys.argv[1], **args)
    defaults._resolve(record, lambda _: None)
    print(json.dumps(resolving_view(record).cuda_graph_max_bs_decode))
"""


def test_decode_graphs_go_as_far_as_rows_may_run(tmp_path: Path) -> None:
    rows = {"max_running_requests": 448}
    ranks = {"max_running_requests": 3584, "tp_size": 8, "dp_size": 8}
    stock = {"offline_batch_config": {"scheduler": "stock"}}
    runs: list[tuple[dict[str, Any], int | None]] = [
        (rows, 448),
        (ranks, 1024),
        (ranks | {"enable_dp_attention": True}, 448),
        (ranks | {"dp_size": 1, "attn_dp_size": 8}, 448),
        (rows | {"cuda_graph_max_bs_decode": 64}, 64),
        (rows | {"cuda_graph_bs_decode": [8, 64]}, None),
        (rows | {"cuda_graph_config": {"decode": {"max_bs": 64}}}, None),
        (rows | {"device": "cpu"}, None),
        (rows | stock, None),
        ({}, None),
    ]
    model = str(write_config(tmp_path / "plain", "plain"))
    wanted = json.dumps([given for given, _ in runs])
    done = preloaded.run([sys.executable, "-c", GRAPH_ROWS, model, wanted])
    found = [json.loads(line) for line in done.stdout.strip().splitlines()]
    assert found == [expected for _, expected in runs], done.stderr[-3000:]


def test_engine_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="--attn-cp-size 2 does not work"):
        from sglang_batch.srt.plugin.offline_server_args import make_server_args

        make_server_args(model_path="m", offline_batch=True, attn_cp_size=2)


def test_a_misspelt_argument_of_an_engine_has_a_suggestion() -> None:
    from sglang_batch.srt.plugin.offline_server_args import make_server_args

    with pytest.raises(
        TypeError, match=r"no argument 'tp_sze'\. Did you mean 'tp_size'"
    ):
        make_server_args(model_path="m", offline_batch=True, tp_sze=2)
