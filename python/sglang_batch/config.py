"""The settings of offline batches and the policies, checked where they are parsed.

The JSON of ``--offline-batch-config`` and the options of ``sglang-batch run`` both
become one :class:`OfflineBatchConfig`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any, TypeVar

from .batch_api.media_places import parse_source
from .batch_api.stop_rules.rule_settings import StopRules
from .errors import ConfigError

# The policies: every order that a job's requests can be given.
#
# This table is the one place that lists them. The function that makes a policy's order is
# in ``planner/ordering/order_functions.py``, registered under the policy's name. SGLang's
# names are used for policies that SGLang has too.


@dataclass(frozen=True, slots=True)
class Policy:
    """The properties of one policy.

    description: one line, for ``--help`` and the documentation.
    needs_estimates: whether the order depends on estimates of the output lengths. If
        so, a sample of the requests runs first.
    both_ends: whether requests are taken from both ends of the order, so that a step
        mixes compute-intensive and memory-intensive ones.
    uses_prompts: whether the job is planned from its prompts, which are all rendered
        first. If not, requests are rendered and sent in the order of the input.
    for_dense: whether it is made for dense batches. ``auto`` does not simulate it for
        paged KV.
    by_length: whether requests join by the length of their KV, in batches.
    """

    description: str
    needs_estimates: bool = False
    both_ends: bool = False
    uses_prompts: bool = True
    for_dense: bool = False
    by_length: bool = False


AUTO = "auto"
# Simplest first: among orders that are equally fast, ``auto`` takes the first.
POLICY_TABLE = {
    AUTO: Policy("the fastest order, by simulation", needs_estimates=True),
    "dfs": Policy("depth-first through the prefix tree"),
    "dfs-weight": Policy(
        "depth-first, at each node the subtree with most requests first"
    ),
    "dfs-longest": Policy(
        "depth-first, at each node the subtree with the longest expected answer first",
        needs_estimates=True,
    ),
    "dual-scan": Policy(
        "BlendServe's tree sorted by compute density, taken from both ends",
        needs_estimates=True,
        both_ends=True,
    ),
    "prefix-groups": Policy(
        "BatchLLM's prefix groups, those with most decoding per prompt token first",
        needs_estimates=True,
    ),
    "lpt": Policy("longest estimated output first", needs_estimates=True),
    "lof": Policy("longest max_new_tokens first"),
    "length-aligned": Policy(
        "batches of similar KV length, prefix families together",
        needs_estimates=True,
        by_length=True,
    ),
    "length-tree": Policy(
        "AlignedServe's batches of similar KV length, from a quad-tree",
        by_length=True,
    ),
    "random": Policy("shuffled with the seed"),
    "fcfs": Policy("order of the input", uses_prompts=False),
    "aligned": Policy(
        "depth-first, at each node the longest prompt and answer first, for dense "
        "batches",
        needs_estimates=True,
        for_dense=True,
    ),
}

POLICIES = tuple(POLICY_TABLE)
"""Names of all policies, ``auto`` included."""

ORDERS = tuple(name for name in POLICIES if name != AUTO)
"""Names of the policies that are an order themselves: all but ``auto``."""

PAGED_ORDERS = tuple(name for name in ORDERS if not POLICY_TABLE[name].for_dense)
"""The orders among which ``auto`` chooses for paged KV, by simulation."""

DENSE_ORDERS = tuple(
    name
    for name in ORDERS
    if POLICY_TABLE[name].for_dense or POLICY_TABLE[name].by_length
)
"""The orders among which ``auto`` chooses for dense batches."""

POLICY_HELP = "; ".join(
    f"{name}: {each.description}" for name, each in POLICY_TABLE.items()
)
"""All policies with their descriptions, for ``--help``."""

# The scheduler in SGLang's scheduler processes.
SCHEDULERS = ("offline", "stock")
# Kernels that read shared prefixes once. "stock" is SGLang's own attention.
ATTENTIONS = ("auto", "triton", "flashinfer", "torch", "stock")
# Whether mixed steps run as two forwards at the same time.
OVERLAPS = ("off", "auto", "on")
# Whether requests that must have equal answers are computed once.
DEDUPES = ("auto", "off")
# Earlier names of settings, which work for one release.
RENAMED_SETTINGS = {"max_line_tries": "max_line_attempts"}


def _hours(value: object) -> tuple[int, int] | None:
    found = re.fullmatch(r"([0-9]{2}):([0-9]{2})-([0-9]{2}):([0-9]{2})", str(value))
    if found is None:
        return None
    hour, minute, to_hour, to_minute = map(int, found.groups())
    if max(hour, to_hour) > 23 or max(minute, to_minute) > 59:
        return None
    begin, end = 60 * hour + minute, 60 * to_hour + to_minute
    return None if begin == end else (begin, end)


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_ORIGIN = re.compile(
    r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:.]+\](:[0-9]{1,5})?"
)
_URL = re.compile(rf"({_ORIGIN.pattern})(/[!-~]*)?")


def is_origin(value: object) -> bool:
    """Whether a value is an ``Origin`` header as browsers send it, or ``*``."""
    return isinstance(value, str) and (value == "*" or bool(_ORIGIN.fullmatch(value)))


def _is_network(value: object) -> bool:
    """Whether a value is an IP address, or a network of them."""
    try:
        return isinstance(value, str) and ip_network(value) is not None
    except ValueError:
        return False


def _is_server(value: object) -> bool:
    """Whether a value is the URL of a server, without a path."""
    return isinstance(value, str) and bool(_ORIGIN.fullmatch(value.rstrip("/")))


def _is_place(value: object) -> bool:
    """Whether a value is a place that media may be read from, or a network of hosts."""
    if not isinstance(value, str):
        return False
    try:
        parse_source(value)
    except ValueError:
        return False
    return True


def _rules_text(value: object) -> str | None:
    """The JSON of rules that are given as JSON or as an object, None for no rules.

    Raises:
        ConfigError: they cannot be used.
    """
    try:
        rules = (
            StopRules.from_text(value)
            if isinstance(value, str)
            else StopRules.parse(value)
        )
    except ValueError as error:
        raise ConfigError(f"stop_rules: {error}.") from None
    return rules.to_text() if rules else None


_DEVICE = re.compile(r"[a-z]+(:[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Check:
    """What a setting may be: a test, and its wording after the value in a message."""

    fits: Callable[[Any], bool]
    wanted: str


_FROM_0 = Check(lambda v: _whole(v, 0), "must be a whole number of 0 or more")
_FROM_1 = Check(lambda v: _whole(v, 1), "must be a whole number of 1 or more")
_PATH = Check(lambda v: isinstance(v, str), "must be the path of a file")
_BOOL = Check(lambda v: isinstance(v, bool), "must be true or false")


def _one_of(choices: tuple[str, ...]) -> Check:
    return Check(
        lambda v: v in choices, f"is not known; choose one of {', '.join(choices)}"
    )


def _setting(default: Any, section: str, check: Check, description: str) -> Any:
    return dataclasses.field(
        default=default,
        metadata={"section": section, "check": check, "description": description},
    )


def setting_help(name: str) -> str:
    """The description of a setting, for ``--help`` (argparse formats ``%``)."""
    fields = {field.name: field for field in dataclasses.fields(OfflineBatchConfig)}
    text: str = fields[name].metadata["description"]
    return text.replace("``", "").replace("%", "%%").removesuffix(".")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that names the closest known name, empty if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


_T = TypeVar("_T")


def _current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` under the current names of their settings.

    Raises:
        ConfigError: a setting is given under both its names.
    """
    current = dict(values)
    for old, new in RENAMED_SETTINGS.items():
        if old not in values:
            continue
        if new in values:
            raise ConfigError(
                f"{old} is the earlier name of {new}, and both are given; drop {old}."
            )
        warnings.warn(
            f"The setting {old} is now called {new}; the old name works for one "
            "release.",
            FutureWarning,
            stacklevel=3,
        )
        current[new] = current.pop(old)
    return current


def _accept_earlier_names(cls: type[_T]) -> type[_T]:
    """Let the constructor take settings by their earlier names, with a warning."""
    construct = cls.__init__

    @functools.wraps(construct)
    def __init__(self: _T, *args: Any, **values: Any) -> None:
        values = _current_names(values)
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for name in values:
            if name not in known:
                raise TypeError(
                    f"{cls.__name__} has no setting {name!r}.{did_you_mean(name, known)}"
                )
        construct(self, *args, **values)

    setattr(cls, "__init__", __init__)  # noqa: B010 - mypy refuses the assignment
    return cls


@_accept_earlier_names
@dataclass(frozen=True, slots=True)
class OfflineBatchConfig:
    """How jobs are planned and sent to the engine, and the limits of a server.

    Each setting is a field with its default, section, check and description. A setting
    whose default is None may also be given as None.

    Raises:
        ConfigError: a value is out of range.
    """

    # planning
    policy: str = _setting(
        "dfs",
        "planning",
        _one_of(POLICIES),
        "order in which requests are sent to the engine, one of ``POLICIES``. ``dfs`` "
        "sorts by prompt tokens, so that requests with a common prefix follow one "
        "another. ``fcfs`` keeps the order of the input and plans nothing. ``auto`` "
        "simulates all orders and takes the fastest.",
    )
    seed: int = _setting(0, "planning", _FROM_0, "for everything random in planning.")
    max_inflight: int | None = _setting(
        None,
        "planning",
        _FROM_1,
        "most requests in the engine at a time. By default the engine chooses: enough to "
        "keep it full, few enough to keep its queue short.",
    )
    render_lookahead: int = _setting(
        8,
        "planning",
        _FROM_1,
        "requests rendered (template and tokenizer) ahead of being sent, in threads.",
    )
    dedupe: str = _setting(
        "auto",
        "planning",
        _one_of(DEDUPES),
        "one of ``DEDUPES``. ``auto`` computes requests of a job that must have equal "
        "answers once: greedy ones, and those for embeddings and scores. ``off`` computes "
        "each.",
    )
    stop_rules: str | None = _setting(
        None,
        "planning",
        Check(lambda v: isinstance(v, str), "must be an object of rules"),
        "JSON of the rules that end the answers of lines which have no ``stop_rules`` "
        "themselves. May be given as an object, too. None is none.",
    )
    bucket_requests: int = _setting(
        4_000_000,
        "planning",
        _FROM_1,
        "a job of more requests than this is planned in buckets of about so many whose "
        "prompts begin alike. It bounds the memory of ``sglang-batch run``: 0.5 kB for "
        "each request of two buckets.",
    )
    answer_cache: str | None = _setting(
        None,
        "planning",
        Check(
            lambda v: isinstance(v, str) and v != "",
            "must be the path of a directory",
        ),
        "a directory that keeps the answers of such requests for later jobs with the same "
        "model and options, of the same owner. None keeps none.",
    )
    answer_cache_bytes: int = _setting(
        10 << 30,
        "planning",
        _FROM_1,
        "most bytes of answers in it: the least recently used make room.",
    )
    answer_cache_days: float = _setting(
        30.0,
        "planning",
        Check(lambda v: _number(v) and v > 0, "must be a number of days above 0"),
        "days after which an answer in it is too old.",
    )
    learn_costs: bool = _setting(
        True,
        "planning",
        _BOOL,
        "whether schedulers time their steps, so that later jobs on this machine are "
        "planned with measured costs.",
    )
    dollars_per_hour: float | None = _setting(
        None,
        "planning",
        Check(lambda v: _number(v) and v > 0, "must be a number of dollars above 0"),
        "price of an hour of an engine in dollars, for the costs of batches.",
    )

    # scheduling
    scheduler: str = _setting(
        "offline",
        "scheduling",
        _one_of(SCHEDULERS),
        "one of ``SCHEDULERS``. ``offline`` replaces SGLang's scheduler and prefix cache "
        "with versions that follow the plan. ``stock`` keeps SGLang's own, and the plan "
        "is only the order in which requests are sent.",
    )
    step_log: str | None = _setting(
        None,
        "scheduling",
        _PATH,
        "CSV file to which the offline scheduler appends a line for each step, for "
        "``sglang-batch plan --steps``.",
    )
    offload_bytes: int | None = _setting(
        None,
        "scheduling",
        _FROM_0,
        "host memory of each TP rank for KV that makes room for other KV: of running "
        "requests, and of prefixes of gathered calls. None is four times as much as the "
        "device has for KV, but at most a quarter of the free memory for all ranks. What "
        "finds no room is computed again.",
    )
    mixed_chunk: bool | None = _setting(
        None,
        "scheduling",
        _BOOL,
        "whether a step computes prompts and decodes together, as with SGLang's "
        "``--enable-mixed-chunk``. None turns it on where there is an accelerator, or "
        'with ``overlap`` "on": SGLang\'s attention for machines without one is far '
        "slower at it, unless its steps are split.",
    )
    attention: str = _setting(
        "auto",
        "scheduling",
        _one_of(ATTENTIONS),
        "one of ``ATTENTIONS``, the kernel for decodes that share a prefix: our Triton "
        "kernel, FlashInfer's cascade (without CUDA graphs) or PyTorch, used together "
        "with the backend that SGLang chooses. ``stock`` leaves all attention to SGLang. "
        "``auto`` uses Triton on GPUs that its kernel has settings for, if no attention "
        "backend is named, the model is supported and a trial run succeeds.",
    )
    sleep_on_idle: bool = _setting(
        True,
        "scheduling",
        _BOOL,
        "whether an engine without work waits for messages, as with SGLang's ``--sleep- "
        "on-idle``, instead of using a CPU core to look for them.",
    )
    max_line_attempts: int = _setting(
        3,
        "scheduling",
        _FROM_1,
        "most attempts at a line that is answered with a server error (HTTP 408, 425, "
        "429, 500, 502, 503 or 504), with growing pauses in between.",
    )
    line_timeout_s: float | None = _setting(
        None,
        "scheduling",
        Check(lambda v: _number(v) and v > 0, "must be a number of seconds above 0"),
        "seconds after its first step in the engine when a line without an answer is an "
        "error. None waits forever.",
    )
    max_batches: int = _setting(
        4,
        "scheduling",
        _FROM_1,
        "batches that a server runs at a time. Batches of a higher priority start in "
        "addition to them.",
    )
    gather_s: float | None = _setting(
        None,
        "scheduling",
        Check(
            lambda v: _number(v) and 0 <= v <= 10,
            "must be a number of seconds from 0 to 10",
        ),
        "seconds that a single call waits for others, to be planned with them. None sends "
        "it at once, ahead of all jobs.",
    )
    batch_hours: str | None = _setting(
        None,
        "scheduling",
        Check(
            lambda v: _hours(v) is not None,
            "must be a time of day from and to, such as '22:00-06:00'",
        ),
        "local time of day in which batches run, such as ``22:00-06:00``. None is all "
        "day. Outside these hours running lines finish and no more are sent.",
    )
    batch_share: float = _setting(
        1.0,
        "scheduling",
        Check(
            lambda v: _number(v) and 0 < v <= 1,
            "must be a number above 0 and at most 1",
        ),
        "largest share of the engine's running requests that may be lines of batches, "
        "above 0 and at most 1.",
    )
    prefill_servers: tuple[str, ...] = _setting(
        (),
        "scheduling",
        Check(
            lambda v: isinstance(v, tuple) and all(map(_is_server, v)),
            "must be a list of URLs such as 'http://10.0.0.7:30000'",
        ),
        "on a decode server (``--disaggregation-mode decode``), URLs of the offline "
        "servers that compute its prompts, such as ``http://10.0.0.7:30000``.",
    )

    # limits
    max_batch_requests: int | None = _setting(
        None, "limits", _FROM_1, "most lines of a batch. None is any number."
    )
    max_file_bytes: int | None = _setting(
        None, "limits", _FROM_1, "largest file that a server takes. None is any size."
    )
    storage_bytes: int | None = _setting(
        None,
        "limits",
        _FROM_1,
        "largest total size of a server's files. None is any size.",
    )
    file_days: int = _setting(
        30,
        "limits",
        _FROM_1,
        "days for which an uploaded file of purpose ``batch`` and the results of a batch "
        "are kept, unless the client sets an expiry.",
    )
    min_free_bytes: int = _setting(
        1 << 30,
        "limits",
        _FROM_0,
        "bytes of the disk that uploads leave free, for the results of batches. 0 is "
        "none.",
    )
    max_uploads: int = _setting(
        64,
        "limits",
        _FROM_1,
        "bodies of files, parts, message batches and waves that a server receives at a "
        "time from one client.",
    )
    upload_timeout_s: float = _setting(
        60.0,
        "limits",
        Check(lambda v: _number(v) and v > 0, "must be a number of seconds above 0"),
        "seconds without a byte after which a body that is being received is given up.",
    )

    # security
    allowed_origins: tuple[str, ...] = _setting(
        (),
        "security",
        Check(
            lambda v: isinstance(v, tuple) and all(map(is_origin, v)),
            "must be a list of origins such as 'https://app.example.com', or ['*']",
        ),
        "origins whose web pages may call the routes of batches and files, such as "
        "``https://app.example.com``. ``*`` is any page.",
    )
    public_url: str | None = _setting(
        None,
        "security",
        Check(
            lambda v: isinstance(v, str) and _URL.fullmatch(v) is not None,
            "must be the http or https URL of the server, such as 'https://batches.example.com'",
        ),
        "URL of the server as its clients know it. Links in answers start with it. None: "
        "with the host that the call itself named.",
    )
    trusted_proxies: tuple[str, ...] = _setting(
        (),
        "security",
        Check(
            lambda v: isinstance(v, tuple) and all(map(_is_network, v)),
            "must be a list of addresses and networks such as '10.0.0.7' or '10.0.0.0/8'",
        ),
        "addresses and networks of proxies, such as ``10.0.0.0/8``, whose ``X-Forwarded- "
        "Host`` and ``X-Forwarded-Proto`` are read in place of the host.",
    )
    api_keys: str | None = _setting(
        None,
        "security",
        _PATH,
        "path of a file with a line ``NAME KEY`` or ``NAME KEY admin`` for each key. "
        "Every call must then carry a key. A client sees only objects made under its "
        "name.",
    )
    open_metrics: bool = _setting(
        False,
        "security",
        _BOOL,
        "whether ``/metrics`` needs no key on a server with keys. It needs that of an "
        "admin otherwise.",
    )
    media_sources: tuple[str, ...] = _setting(
        (),
        "security",
        Check(
            lambda v: isinstance(v, tuple) and all(map(_is_place, v)),
            "must be a list of URLs, absolute paths and networks, such as "
            "'https://images.example.com/', '/data/images/' or '10.0.0.0/8'",
        ),
        "URLs and paths of the files and folders from which images and other media of a "
        "job's lines may be read, besides data: URLs, and the private networks in which "
        "hosts of these URLs may be.",
    )

    # experimental
    max_wait_steps: int | None = _setting(
        None,
        "experimental",
        _FROM_1,
        "with ``length-aligned`` and ``length-tree``, decode steps after which a waiting "
        "request joins before all others. None: never with paged KV, after 65,536 in "
        "dense batches.",
    )
    prefill_ahead_tokens: int = _setting(
        0,
        "experimental",
        _FROM_0,
        "most tokens of prompts that are computed before there is room for their answers, "
        "with ``length-aligned`` and ``length-tree``. Their KV waits on the host, in at "
        "most half of that memory. 0 is none.",
    )
    prefetch_bytes: int = _setting(
        0,
        "experimental",
        _FROM_0,
        "memory on the device for KV that is on the host and resumes soon. It is copied "
        "there ahead, while steps run, in addition to the device's KV. 0 is none.",
    )
    prefetch_device: str | None = _setting(
        None,
        "experimental",
        Check(
            lambda v: isinstance(v, str) and _DEVICE.fullmatch(v) is not None,
            "must be a device such as 'cuda:1'",
        ),
        "the device that has this memory, such as ``cuda:1``, which the GPU can read "
        "directly. With several TP ranks it is that of the first rank, and the devices "
        "behind it are those of the others. None is the GPU itself.",
    )
    overlap: str = _setting(
        "off",
        "experimental",
        _one_of(OVERLAPS),
        "one of ``OVERLAPS``. Whether a step with prompts and decodes runs as two "
        "forwards at the same time, decodes and prompts. ``auto`` tries it out when a "
        "server with a GPU starts, and splits the steps that this makes faster by 5 % or "
        "more. ``on`` splits all steps that can be split. Off unless asked for: no GPU "
        "has shown a gain yet.",
    )

    def __post_init__(self) -> None:
        lists = (
            "allowed_origins",
            "trusted_proxies",
            "prefill_servers",
            "media_sources",
        )
        for name in lists:
            if isinstance(getattr(self, name), list):  # of JSON
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.stop_rules is not None:
            object.__setattr__(self, "stop_rules", _rules_text(self.stop_rules))
        for setting in dataclasses.fields(self):
            value, check = getattr(self, setting.name), setting.metadata["check"]
            if value is None and setting.default is None:
                continue
            if not check.fits(value):
                raise ConfigError(f"{setting.name}={value!r} {check.wanted}.")

    @property
    def hours(self) -> tuple[int, int] | None:
        """``batch_hours`` in minutes of the day, from and to. None is all day."""
        return None if self.batch_hours is None else _hours(self.batch_hours)

    @classmethod
    def from_json(cls, text: str | None) -> OfflineBatchConfig:
        """Parse the value of ``--offline-batch-config``.

        Raises:
            ConfigError: ``text`` is not a JSON object, a setting is unknown, or a value
                is out of range.
        """
        if not text:
            return cls()
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(
                f"--offline-batch-config is not valid JSON ({error}): {text!r}"
            ) from None
        if not isinstance(values, dict):
            raise ConfigError(
                f"--offline-batch-config must be a JSON object, got {text!r}"
            )
        values = _current_names(values)
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(
                    f"--offline-batch-config has no setting {key!r}; "
                    f"the settings are {', '.join(known)}.{did_you_mean(key, known)}"
                )
        return cls(**values)
