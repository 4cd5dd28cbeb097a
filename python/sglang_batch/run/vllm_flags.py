"""Options of ``vllm run-batch`` (vLLM 0.33), as ``sglang-batch run`` takes them.

Those that SGLang has by the same name are passed on like all its options. The table has the rest:
those with another name, those without effect here, and those that mean something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from ..errors import ConfigError


class FlagUse(Enum):
    """What becomes of an option of vLLM's."""

    RENAMED = "renamed"
    IGNORED = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """An option of vLLM's.

    names: with spaces between them.
    text: SGLang's options for it, if it is renamed; a value follows the last of them.
        Otherwise why it has no effect, or what to use instead.
    takes_value: whether a value follows.
    values: SGLang's word for some of vLLM's values. None: the option is left out.
    refused: values that are refused, with the reason. ``None`` is any that ``values`` lacks.
    is_size: whether the value may be such as ``16k``, where vLLM's suffixes differ.
    """

    use: FlagUse
    names: str
    text: str
    takes_value: bool = True
    values: Mapping[str, str | None] = field(default_factory=dict)
    refused: Mapping[str | None, str] = field(default_factory=dict)
    is_size: bool = False


_renamed = partial(VllmFlag, FlagUse.RENAMED)
_ignored = partial(VllmFlag, FlagUse.IGNORED, takes_value=False)
_refused = partial(VllmFlag, FlagUse.REFUSED)

_EMBEDS = {"auto": None, "generate": None}
_NO_POOLING: dict[str | None, str] = {
    None: "use --is-embedding for a model that embeds, scores or classifies"
}

VLLM_FLAGS = (
    _renamed("--tokenizer", "--tokenizer-path"),
    _renamed(
        "--max-model-len", "--context-length", is_size=True,
        refused=dict.fromkeys(("auto", "-1"), "leave it out for the model's own length, or give a number of tokens"),
    ),
    _renamed("--max-num-seqs", "--max-running-requests", is_size=True),
    _renamed("--seed", "--random-seed"),
    _renamed("--enforce-eager", "--disable-cuda-graph", takes_value=False),
    _renamed("--block-size", "--page-size"),
    _renamed("--hf-overrides", "--json-model-override-args"),
    _renamed("--limit-mm-per-prompt", "--limit-mm-data-per-request"),
    _renamed("--max-cpu-loras", "--max-loaded-loras"),
    _renamed("--lora-modules", "--enable-lora --lora-paths"),
    _renamed("--enable-log-requests", "--log-requests", takes_value=False),
    _renamed("-tp", "--tensor-parallel-size"),
    _renamed("-pp", "--pipeline-parallel-size"),
    _renamed("-dp", "--data-parallel-size"),
    _renamed("-q", "--quantization"),
    _renamed("--kv-cache-dtype", "--kv-cache-dtype", values={"fp8": "fp8_e4m3"}),
    _renamed(
        "--generation-config", "--sampling-defaults",
        values={"auto": "model", "vllm": "openai"},
        refused={None: "a folder of its own is not read; use auto or vllm"},
    ),
    _renamed(
        "--runner --task", "--is-embedding", takes_value=True,
        values={
            **_EMBEDS,
            **dict.fromkeys(("pooling", "embed", "embedding"), ""),
        },
        refused=_NO_POOLING,
    ),
    _ignored("--enable-metrics", "a run has no HTTP server; the summary has its figures"),
    _ignored(
        "--host --port", "a run has no HTTP server for metrics", takes_value=True
    ),
    _ignored("--enable-prefix-caching", "prefixes are always shared"),
    _ignored("--enable-chunked-prefill", "long prompts are always prefilled in chunks"),
    _ignored("--async-scheduling", "SGLang prepares a step while another one runs"),
    _ignored(
        "--disable-log-requests --no-enable-log-requests", "requests are not logged"
    ),
    _ignored("--max-log-len", "requests are not logged", takes_value=True),
    _ignored("--disable-log-stats", "SGLang's lines are in the engine's log only"),
    _ignored(
        "--enable-prompt-tokens-details --enable-force-include-usage",
        "every answer has its usage, with the cached tokens",
    ),
    _ignored(
        "--enable-auto-tool-choice",
        "the tools of a request are always offered; --tool-call-parser reads the calls",
    ),
    _ignored("--use-tqdm-on-load --no-use-tqdm-on-load", "the run has a progress bar"),
    _ignored(
        "--response-role", "answers have the role assistant", takes_value=True,
        values={"assistant": None},
        refused={None: "answers have the role assistant"},
    ),
    _ignored(
        "--distributed-executor-backend", "SGLang starts its processes by itself",
        takes_value=True, values={"mp": None, "uni": None},
        refused={"ray": "use --ray for the engines of a Ray cluster",
                 None: "SGLang has its own processes; leave it out"},
    ),
    _refused(
        "--gpu-memory-utilization --device-memory-utilization",
        "vLLM's share is of the whole memory and counts activations and CUDA graphs too; "
        "SGLang's --mem-fraction-static is of what is free at the start, for weights and "
        "KV cache alone: use that, a little lower, or leave it to SGLang",
    ),
    _refused(
        "--kv-cache-memory-bytes --num-gpu-blocks-override",
        "use --max-total-tokens, the tokens of the KV cache",
    ),
    _refused(
        "--max-num-batched-tokens",
        "vLLM counts prompts and decodes of a step; SGLang's --chunked-prefill-size "
        "counts prompts: use that",
    ),
    _refused(
        "--no-enable-prefix-caching", "the plan shares prefixes; leave it out",
        takes_value=False,
    ),
    _refused(
        "--no-enable-chunked-prefill", "use --chunked-prefill-size=-1", takes_value=False
    ),
    _refused("--scheduling-policy", "the plan orders the requests: use --policy"),
    _refused(
        "--enable-expert-parallel -ep",
        "use --ep-size with the number of GPUs that share the experts", takes_value=False,
    ),
    _refused(
        "--max-loras",
        "use --max-loras-per-batch, which counts the model without an adapter too",
    ),
    _refused(
        "--tokenizer-revision --code-revision", "SGLang has one --revision for all files"
    ),
    _refused(
        "--speculative-config -sc",
        "use --speculative-algorithm and SGLang's other --speculative-* options",
    ),
    _refused(
        "--structured-outputs-config --guided-decoding-backend", "use --grammar-backend"
    ),
    _refused(
        "--compilation-config -cc",
        "use --enable-torch-compile and SGLang's --cuda-graph-* options",
    ),
    _refused("--override-generation-config", "use --preferred-sampling-params"),
    _refused("--mm-processor-kwargs", "use --mm-process-config"),
)  # fmt: skip

_BY_NAME = {name: flag for flag in VLLM_FLAGS for name in flag.names.split()}
_SUFFIXES = {
    **{"k": 10**3, "m": 10**6, "g": 10**9},
    **{"K": 2**10, "M": 2**20, "G": 2**30},
}


def sglang_argv(argv: list[str], say: Callable[[str], None]) -> list[str]:
    """SGLang's options for options among which are some of vLLM's.

    Args:
        argv: options of the engine. Those that are not in the table stay as they are.
        say: told once for each option that has no effect.

    Raises ConfigError if an option means something else here, or lacks its value.
    """
    found: list[str] = []
    left = iter(argv)
    for argument in left:
        name, equals, value = argument.partition("=")
        flag = _BY_NAME.get(name.replace("_", "-") if name[:2] == "--" else name)
        if flag is None:
            found.append(argument)
            continue
        if flag.use is FlagUse.REFUSED:
            raise ConfigError(f"{name} is an option of vLLM's: {flag.text}.")
        if not flag.takes_value:
            if equals:
                raise ConfigError(f"{argument}: {name} takes no value.")
            value = ""
        elif not equals and (value := next(left, "")) == "":
            raise ConfigError(f"{name} needs a value.")
        words = _translated(flag, name, value)
        if flag.use is FlagUse.IGNORED:
            say(f"{name} has no effect: {flag.text}.")
        elif words is not None:
            found += flag.text.split() + ([words] if words else [])
    return found


def _translated(flag: VllmFlag, name: str, value: str) -> str | None:
    """SGLang's word for a value. None: leave the option out."""
    if value in flag.values:
        return flag.values[value]
    for refused in (value, None):
        if refused in flag.refused:
            raise ConfigError(
                f"{name} {value} is an option of vLLM's: {flag.refused[refused]}."
            )
    return _size(name, value) if flag.is_size else value


def _size(name: str, value: str) -> str:
    """A number as vLLM reads it: ``k`` is 1,000 and ``K`` is 1,024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", value, re.ASCII)
    if match is None or ("." in match[1] and match[2] not in _SUFFIXES):
        raise ConfigError(f"{name} {value} must be a whole number, such as 8192 or 8k.")
    size = float(match[1]) * _SUFFIXES.get(match[2], 1)
    return str(int(size))
