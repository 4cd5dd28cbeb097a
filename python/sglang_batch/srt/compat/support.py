"""What flags do to the plan.

:data:`REFUSALS` has those that would have no effect, or give wrong results. They are
refused when arguments are parsed. With those of :data:`LIMITS`, requests are not
offloaded. :mod:`.tiers` has the models, and the tier of a server that follows from both.
``{"scheduler": "stock"}`` in ``--offline-batch-config`` turns off the offline scheduler
and the checks.

The checks raise ConfigError, which names the first such flag or setting and the alternative in
one sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ...config import OfflineBatchConfig
from ...errors import ConfigError

# The key of our part in a scheduler's internal state, as in /server_info.
STATE_KEY: Final = "offline_batch"
# The name under which our prefix cache is registered with SGLang.
CACHE_BACKEND = "planned"
# The name of our attention backend, which reads a shared prefix once.
ATTENTION_BACKEND = "shared_prefix"
# The name of our backend for KV between a prefill server and a decode server.
TRANSFER_BACKEND = "tcp"
# SGLang's arguments that name a backend.
ATTENTION_ARGUMENTS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
)
# Modes in which SGLang runs another HTTP server or other processes.
UNSUPPORTED = ("grpc_mode", "smg_grpc_mode", "encoder_only", "use_ray")
DROP_FLAG = "drop the flag"
STOCK_SCHEDULER = """--offline-batch-config '{"scheduler": "stock"}'"""


@dataclass(frozen=True, slots=True)
class FlagRule:
    """Fields of SGLang's arguments, each checked separately, with values that the offline
    scheduler refuses, or with which requests are not offloaded.

    fields: of ``ServerArgs``, separated by spaces.
    reason: completes the error "... does not work with the offline scheduler: ", or
        "offloading is off because --flag ...".
    allowed: the only values that are fine, besides None.
    most: the largest number that is fine, as all other values are.
    values: the only ones that are not fine. Without these three, true values are not.
    way_out: the user's alternative, before the general one.
    """

    fields: str
    reason: str
    allowed: tuple[object, ...] = ()
    most: int | None = None
    values: tuple[str, ...] = ()
    way_out: str = DROP_FLAG

    def applies(self, value: object) -> bool:
        if self.most is not None:
            return isinstance(value, int | float) and value > self.most
        if self.allowed:
            return value is not None and value not in self.allowed
        return value in self.values if self.values else bool(value)


_SECOND_TIER = "it moves KV that the plan relies on"
_ADMISSION = "the plan and its KV forecast decide when a request is admitted"
_PLAN_ORDER = """set the order with --offline-batch-config '{"policy": "dfs"}'"""
_DIVIDES = (
    "it divides memory among kinds of KV at run time, and the plan counts pools of "
    "fixed size"
)
_DRAFT_ALGORITHMS = ("NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "NEXTN")
_DRAFTS = (*_DRAFT_ALGORITHMS, *(name.lower() for name in _DRAFT_ALGORITHMS))
_DRAFTS_AHEAD = (
    "it drafts several tokens per step, which the KV forecast does not count"
)
_SPLITS = "its ranks split prompts, which was never tested with a plan"
_SPREADS = "it spreads a page of KV over ranks, and the plan counts those of one rank"

REFUSALS = (
    # The prefix cache, which we replace.
    FlagRule("disable_radix_cache", "the plan shares prefixes in it"),
    FlagRule("radix_cache_backend", "it replaces the prefix cache", (CACHE_BACKEND,)),
    FlagRule("radix_eviction_policy", "the plan decides which prefixes are evicted", ("lru",)),
    FlagRule("enable_lmcache enable_flexkv enable_unified_cache_external_linker", _SECOND_TIER),
    FlagRule("hicache_storage_backend", "--enable-hierarchical-cache means host memory here, without storage behind it"),
    FlagRule("hicache_host_memory_mode", "--enable-hierarchical-cache keeps KV in host memory here", ("cache",)),
    FlagRule("enable_session_radix_cache enable_streaming_session", "sessions keep prefixes that the plan would evict"),
    FlagRule("enable_hisparse", "SGLang runs it without the prefix cache"),
    FlagRule("enable_unified_memory enable_page_major_kv_layout", _DIVIDES),
    FlagRule("enable_kv_cache_sharding", "SGLang allows it with its own prefix cache only"),
    # The order and the admission of requests, which the plan decides.
    FlagRule("schedule_policy", "the plan orders the requests", ("fcfs",), way_out=_PLAN_ORDER),
    FlagRule("enable_priority_scheduling", "preemption would drop KV that the plan relies on", way_out=_PLAN_ORDER),
    FlagRule("retraction_policy", "requests are offloaded by the plan, not retracted", ("length",)),
    FlagRule("schedule_conservativeness", _ADMISSION, (1.0,)),
    FlagRule("enable_prefill_delayer", _ADMISSION),
    FlagRule("min_free_slots_delay", _ADMISSION, most=1),
    FlagRule("prefill_decode_interval", _ADMISSION, most=0),
    FlagRule("max_queued_requests", "batches need a queue without a limit", (None,), way_out="""limit it with --offline-batch-config '{"max_inflight": 4096}'"""),
    # The shape of a step: prompts in chunks, mixed with decoding.
    FlagRule("enable_pdmux", "it runs prefill and decode in its own loop"),
    FlagRule("enable_two_batch_overlap", "it is not tested with mixed chunks"),
    FlagRule("enable_megamoe_for_layernorm_sp", "SGLang refuses mixed chunks"),
    FlagRule("enable_mis prefill_only_disable_kv_cache", "it runs without the prefix cache"),
    FlagRule("speculative_algorithm", "the plan does not count what it keeps", _DRAFTS, way_out=f"name {', '.join(_DRAFT_ALGORITHMS)}"),
    FlagRule("enable_multi_layer_eagle", "it was never tried"),
    FlagRule("decoupled_spec_role", "drafts come from another server, which the KV forecast does not count", ("null",)),
    FlagRule("dllm_algorithm", "a diffusion model has its own scheduler"),
    # Adapters.
    FlagRule("uno_lora_path", _DRAFTS_AHEAD),
    FlagRule("enable_lora_overlap_loading", "adapters loaded outside the plan may displace those that it keeps"),
    FlagRule("lora_drain_wait_threshold", "the plan decides which adapter makes room", most=0),
    # More than one process per replica deciding on a batch.
    FlagRule("dcp_size", _SPREADS, most=1),
    FlagRule("attn_cp_size", _SPLITS, most=1),
    FlagRule("enable_prefill_cp", _SPLITS),
    FlagRule("elastic_ep_backend", "a rank may leave, and its part of the plan with it", ("none",)),
)  # fmt: skip

_OWN_STEPS = "its steps are not those of SGLang's loop"
_DROP_ONE = "drop one of the two"
# The same with a --disaggregation-mode.
MODE_REFUSALS = (
    FlagRule("speculative_algorithm", "KV is sent without drafts"),
    FlagRule("enable_dp_attention", _OWN_STEPS, way_out=_DROP_ONE),
    FlagRule("attn_dp_size pp_size", _OWN_STEPS, most=1, way_out=_DROP_ONE),
)  # fmt: skip
_RECEIVED = "KV is received into the host pool, where requests wait for their turn"
DECODE_REFUSALS = (
    FlagRule("disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache", _RECEIVED),
    FlagRule("disaggregation_decode_host_receive_threshold", _RECEIVED, (1,)),
)  # fmt: skip

_SLOTS = "keeps data per KV slot, and an offloaded request resumes in other slots"
_SCALED = ("mxfp8", "nvfp4", "fp4_mx_block16")

# Data that offloading would lose. All else of the plan stays.
LIMITS = (
    FlagRule("kv_cache_dtype", "keeps scales besides KV", values=_SCALED),
    FlagRule("enable_return_routed_experts enable_return_indexer_topk", _SLOTS),
    FlagRule("kv_canary", _SLOTS, values=("log", "raise")),
)  # fmt: skip

# Flags that SGLang itself may turn on for a model or because of an environment variable.
# (It also turns off the prefix cache and chunks for encoders, which is fine.)
SET_BY_SGLANG = (
    "enable_prefill_delayer",
    "speculative_algorithm",
    "enable_multi_layer_eagle",
    "dllm_algorithm",
    "enable_hisparse",
)


def config_in_mode(
    config: OfflineBatchConfig, mode: object, backend: object
) -> OfflineBatchConfig:
    """The settings that are in force with a ``--disaggregation-mode`` and transfer backend.

    A decode server to which another backend than ours brings KV has SGLang's scheduler: it
    gets requests in the order of a plan.
    """
    if mode == "decode" and backend != TRANSFER_BACKEND:
        return replace(config, scheduler="stock")
    return config


def check_flags(values: Mapping[str, object], config: OfflineBatchConfig) -> None:
    """All checks of flags that need no model, with arguments and errors as below."""
    for name in UNSUPPORTED:
        if values.get(name):
            flag = as_flag(name)
            raise ConfigError(f"--offline-batch does not work with {flag}; drop one.")
    named = [values.get(name) for name in ATTENTION_ARGUMENTS]
    if config.attention == "stock" and ATTENTION_BACKEND in named:
        raise ConfigError(
            f'attention="stock" contradicts --attention-backend {ATTENTION_BACKEND}; '
            "drop one."
        )
    check_disaggregation(values, config)
    if config.scheduler == "offline":
        check_supported(values)


def check_disaggregation(
    values: Mapping[str, object], config: OfflineBatchConfig
) -> None:
    """Refuse flags of a prefill or decode server that do not go together.

    values: SGLang's arguments by field of ``ServerArgs``. A missing one has its default.

    Raises:
        ConfigError: names the flag or setting and the alternative.
    """
    mode = values.get("disaggregation_mode") or "null"
    backend = values.get("disaggregation_transfer_backend")
    if config.prefill_servers and mode != "decode":
        raise ConfigError(
            "prefill_servers is for the decode server, which sends them its requests; "
            "add --disaggregation-mode decode, or drop the setting."
        )
    if config.scheduler == "offline" and mode != "null":
        _refuse(values, MODE_REFUSALS, f"--disaggregation-mode {mode} and ")
        if mode == "decode":
            _refuse(values, DECODE_REFUSALS)
        elif backend != TRANSFER_BACKEND:
            raise ConfigError(
                "--disaggregation-mode prefill with the offline scheduler works with "
                f"--disaggregation-transfer-backend {TRANSFER_BACKEND} only; add it, or "
                f"give {STOCK_SCHEDULER}."
            )
    if backend == TRANSFER_BACKEND and values.get("enable_pd_role_switch"):
        raise ConfigError(
            f"--enable-pd-role-switch does not work with "
            f"--disaggregation-transfer-backend {TRANSFER_BACKEND}; drop one of the two."
        )


def is_deterministic(arguments: object) -> bool:
    """Whether a request's answer must not depend on the others in its batch."""
    # The second of the two flags implies the first.
    names = ("enable_deterministic_inference", "rl_on_policy_target")
    return any(getattr(arguments, name) for name in names)


def check_deterministic(arguments: Any, config: OfflineBatchConfig) -> None:
    """Refuse flags that deterministic inference would have to do without.

    Args:
        arguments: those of SGLang, after it has chosen attention for this mode.

    Raises:
        ConfigError: names the flag or setting and the alternative.
    """
    wrong = ""
    if arguments.disable_radix_cache:
        wrong = (
            f"--attention-backend {arguments.attention_backend}, for which SGLang turns "
            "off the prefix cache; add --attention-backend fa3, fa4 or triton"
        )
    elif arguments.enable_mixed_chunk or config.mixed_chunk:
        wrong = (
            "--enable-mixed-chunk, since prompts and decodes have kernels of their own; "
            "drop it"
        )
    elif config.attention not in ("auto", "stock"):
        wrong = (
            f'attention="{config.attention}", which reads a prefix in another order '
            "where it is shared; leave the setting out"
        )
    if wrong:
        raise ConfigError(
            "--enable-deterministic-inference with the offline scheduler does not work "
            f"with {wrong}, or give {STOCK_SCHEDULER}."
        )


def check_on_cpu(view: Any) -> None:
    """Refuse what needs an accelerator where there is none.

    SGLang registers the host pool that receives KV with CUDA. On a CPU the KV pool is host
    memory anyway.

    Raises:
        ConfigError: names the flag and the alternative.
    """
    if view.device != "cpu":
        return
    threshold = view.disaggregation_decode_host_receive_threshold
    if view.disaggregation_mode == "decode" and threshold < 1:
        raise ConfigError(
            f"--disaggregation-decode-host-receive-threshold {threshold:g} needs an "
            "accelerator: on a CPU, KV is received into host memory without it; drop "
            "the flag."
        )
    if view.speculative_use_rejection_sampling:
        raise ConfigError(
            "--speculative-use-rejection-sampling needs an accelerator; drop the flag."
        )


def check_supported(values: Mapping[str, object]) -> None:
    """Refuse unsupported flags.

    values: SGLang's arguments by field of ``ServerArgs``. A missing one has its default.

    Raises:
        ConfigError: names the first such flag and the alternative, in one sentence.
    """
    _refuse(values, REFUSALS)


def _refuse(
    values: Mapping[str, object], rules: Iterable[FlagRule], mode: str = ""
) -> None:
    for rule in rules:
        for name in rule.fields.split():
            if rule.applies(values.get(name)):
                raise ConfigError(
                    f"{_as_given(name, values[name])} does not work with {mode}the "
                    f"offline scheduler: {rule.reason}; {rule.way_out}, or give "
                    f"{STOCK_SCHEDULER}."
                )


def found_limits(arguments: object) -> tuple[str, ...]:
    """Why requests of a server are not offloaded, each as "--flag value does this".

    arguments: those of SGLang, as it has resolved them.
    """
    found = []
    for limit in LIMITS:
        for name in limit.fields.split():
            value = getattr(arguments, name)
            if limit.applies(value):
                found.append(f"{_as_given(name, value)} {limit.reason}")
    from sglang.srt.environ import envs

    if envs.SGLANG_USE_HND_KVCACHE.get():
        found.append("SGLANG_USE_HND_KVCACHE=1 lays KV out per head")
    return tuple(found)


def as_flag(name: str) -> str:
    """The flag of a field of ``ServerArgs``."""
    return "--" + name.replace("_", "-")


def _as_given(name: str, value: object) -> str:
    flag = as_flag(name)
    return flag if isinstance(value, bool | list | dict) else f"{flag} {value}"
