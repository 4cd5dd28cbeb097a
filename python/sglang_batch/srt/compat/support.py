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

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec

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
# What SGLang does not know of a plan, or does not check before its engine fails: flags, numbers,
# values, files in /dev of which a machine with an accelerator has one, values without one.
RULES: dict[str, Any] = json.loads(
    Path(__file__).with_name("option_rules.json").read_bytes()
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


def _rules(section: str) -> tuple[FlagRule, ...]:
    """Those of a section of ``option_rules.json``, below the parts of SGLang that they touch."""
    rows = [*chain.from_iterable(RULES[section].values())]
    return msgspec.convert(rows, tuple[FlagRule, ...])


REFUSALS = _rules("refused")
# The same with a --disaggregation-mode.
MODE_REFUSALS = _rules("refused with a mode")
DECODE_REFUSALS = _rules("refused for decodes")
LIMITS = _rules("not offloaded")

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
