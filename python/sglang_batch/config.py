"""The settings of offline batches and the policies, checked where they are parsed.

The JSON of ``--offline-batch-config`` and the options of ``sglang-batch run`` both
become one :class:`OfflineBatchConfig`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import re
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any, TypeVar

from .batch_api.media_places import parse_source
from .batch_api.stop_rules import StopRules
from .errors import ConfigError, did_you_mean

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
        "AlignedServe's batches of similar KV length, from a quad-tree", by_length=True
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
"""The orders for paged KV. ``auto`` chooses among them by simulation, without those
by length where the longest row decides no step."""

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


def _parses(parse: Callable[[str], object]) -> Callable[[object], bool]:
    """A test that a value is a text which ``parse`` takes, or refuses with ValueError."""

    def fits(value: object) -> bool:
        try:
            return isinstance(value, str) and parse(value) is not None
        except ValueError:
            return False

    return fits


def _is_server(value: object) -> bool:
    """Whether a value is the URL of a server, without a path."""
    return isinstance(value, str) and bool(_ORIGIN.fullmatch(value.rstrip("/")))


_DEVICE = re.compile(r"[a-z]+(:[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Check:
    """What a setting may be.

    fits: the test of a value.
    wanted: its wording, after the value in a message.
    kind: makes a value of the text of an option. It raises ValueError.
    choices: the values, if they can be listed.
    """

    fits: Callable[[Any], bool]
    wanted: str
    kind: Callable[[str], Any] = str
    choices: tuple[str, ...] | None = None

    def parse(self, text: str) -> Any:
        """The value of an option.

        Raises:
            argparse.ArgumentTypeError: the setting may not be this.
        """
        try:
            value = self.kind(text)
        except ValueError:
            value = None
        if value is None or not self.fits(value):
            raise argparse.ArgumentTypeError(f"{text!r} {self.wanted}")
        return value


def _int(text: str) -> int:
    return int(text.encode("ascii"))


def _float(text: str) -> float:
    return float(text.encode("ascii"))


def _above_0(unit: str) -> Check:
    return Check(
        lambda v: _number(v) and 0 < v < math.inf,
        f"must be a number of {unit} above 0",
        _float,
    )


def _one_of(*choices: str) -> Check:
    wanted = f"is not known; choose one of {', '.join(choices)}"
    return Check(lambda v: v in choices, wanted, choices=choices)


def _list_of(fits: Callable[[Any], bool], wanted: str) -> Check:
    return Check(
        lambda v: isinstance(v, tuple) and all(map(fits, v)),
        f"must be a list of {wanted}",
    )


_FROM_0 = Check(lambda v: _whole(v, 0), "must be a whole number of 0 or more", _int)
_FROM_1 = Check(lambda v: _whole(v, 1), "must be a whole number of 1 or more", _int)
_PATH = Check(lambda v: isinstance(v, str) and v != "", "must be a path")
_BOOL = Check(lambda v: isinstance(v, bool), "must be true or false")


def _setting(section: str, default: Any, check: Check, description: str) -> Any:
    return dataclasses.field(
        default=default,
        metadata={"section": section, "check": check, "description": description},
    )


_planning = functools.partial(_setting, "planning")
_scheduling = functools.partial(_setting, "scheduling")
_limits = functools.partial(_setting, "limits")
_security = functools.partial(_setting, "security")
_experimental = functools.partial(_setting, "experimental")

SECTIONS = ("planning", "scheduling", "limits", "security")
"""Sections of the settings. Those in "experimental" may change in any release."""


def settings_in(section: str) -> list[dataclasses.Field[Any]]:
    """The settings of a section, in the order of the documentation."""
    fields = dataclasses.fields(OfflineBatchConfig)
    return [field for field in fields if field.metadata["section"] == section]


def _plain(markdown: str) -> str:
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", markdown).replace("`", "")


def add_setting(
    parser: argparse._ActionsContainer, name: str, more: str = "", **changed: Any
) -> None:
    """Add the option for a setting, with its description, choices and check.

    Args:
        more: follows the description in ``--help``.
        changed: other arguments of ``add_argument``. The default is None.
    """
    setting = OfflineBatchConfig.__dataclass_fields__[name]
    check: Check = setting.metadata["check"]
    text = _plain(setting.metadata["description"])
    given: dict[str, Any] = {"choices": check.choices}
    if check.choices is None:
        given = {"type": check.parse}
    given["help"] = (f"{text}. {more}" if more else text).replace("%", "%%")
    parser.add_argument(f"--{name.replace('_', '-')}", **given | changed)


def settings_help() -> str:
    """All settings but the experimental ones, with their defaults, for ``--help``."""
    blocks = []
    for section in SECTIONS:
        lines = []
        for each in settings_in(section):
            text = f"{each.name}: {_plain(each.metadata['description'])}"
            if each.default is not None:
                text += f" (default: {json.dumps(each.default)})"
            lines += textwrap.wrap(text, 84, subsequent_indent="    ")
        blocks.append(f"{section}:\n" + textwrap.indent("\n".join(lines), "  "))
    return "\n\n".join(blocks) + "\n"


_T = TypeVar("_T")


def _accept_earlier_names(cls: type[_T]) -> type[_T]:
    """Let the constructor take earlier names and values of settings, with a warning."""
    construct = cls.__init__

    @functools.wraps(construct)
    def __init__(self: _T, *args: Any, **values: Any) -> None:
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for name in list(values):
            new = RENAMED_SETTINGS.get(name)
            if new in values:
                raise ConfigError(
                    f"{name} is the earlier name of {new}, and both are given; drop {name}."
                )
            if new is not None:
                warnings.warn(
                    f"The setting {name} is now called {new}; the old name works for one "
                    "release.",
                    FutureWarning,
                    stacklevel=2,
                )
                values[new] = values.pop(name)
            elif name not in known:
                raise TypeError(
                    f"there is no setting {name!r}; the settings are {', '.join(known)}."
                    + did_you_mean(name, known)
                )
        if values.get("attention") == "flashinfer":
            warnings.warn(
                'attention="flashinfer" is gone, and "triton" runs in its place; the old '
                "value works for one release.",
                FutureWarning,
                stacklevel=2,
            )
            values["attention"] = "triton"
        construct(self, *args, **values)

    setattr(cls, "__init__", __init__)  # noqa: B010 - mypy refuses the assignment
    return cls


@_accept_earlier_names
@dataclass(frozen=True, slots=True)
class OfflineBatchConfig:
    """How jobs are planned and sent to the engine, and the limits of a server.

    Each setting is a field with its section, default, check and description: the options
    of commands, their ``--help`` and the tables of the documentation are made of them. A
    setting whose default is None may also be given as None.

    Raises:
        ConfigError: a value is out of range.
    """

    policy: str = _planning(
        "dfs",
        _one_of(*POLICIES),
        "[order](run.md#which-policy) of the requests; `sglang-batch plan` compares them",
    )
    seed: int = _planning(0, _FROM_0, "seed of everything random in planning")
    max_inflight: int | None = _planning(
        None,
        _FROM_1,
        "requests of a job in the engine at a time. By default twice as many as can run, at "
        "least 1,024; with `--dp-size`, few more than each replica runs",
    )
    dedupe: str = _planning(
        "auto",
        _one_of(*DEDUPES),
        "`auto` computes requests that must have [equal "
        "answers](savings.md#equal-requests) once; `off` computes each",
    )
    answer_cache: str | None = _planning(
        None,
        _PATH,
        "directory that keeps [equal answers](savings.md#equal-requests) for later jobs of "
        "the same owner, model and options",
    )
    answer_cache_bytes: int = _planning(
        10 << 30, _FROM_1, "most bytes of answers in it"
    )
    answer_cache_days: float = _planning(
        30.0, _above_0("days"), "days after which an answer is too old"
    )
    stop_rules: str | None = _planning(
        None,
        Check(lambda v: isinstance(v, str), "must be an object of rules"),
        "rules that [cut answers](savings.md#answers-cut-where-they-are-useless) of lines "
        'without their own, such as `{"json": true}`',
    )
    dollars_per_hour: float | None = _planning(
        None,
        _above_0("dollars"),
        "price of an engine (of each replica), for [costs](savings.md#costs)",
    )

    scheduler: str = _scheduling(
        "offline",
        _one_of("offline", "stock"),
        "`stock` keeps SGLang's scheduler and cache",
    )
    attention: str = _scheduling(
        "auto",
        _one_of("auto", "triton", "torch", "stock"),
        "kernel that reads [shared prefixes](kernels.md) once: `triton` or `torch`; `stock` "
        "turns this off",
    )
    offload_bytes: int | None = _scheduling(
        None,
        _FROM_0,
        "host memory per TP rank for offloaded KV, pinned with an accelerator. `null`: four "
        "times the device's KV, but at most a quarter of the machine's free memory for all "
        "ranks. `0`: compute again instead. If it is full, the KV that is cheapest to compute "
        "is dropped",
    )
    step_log: str | None = _scheduling(None, _PATH, "CSV file with a row per step")
    max_batches: int = _scheduling(
        4,
        _FROM_1,
        "batches that run at a time, apart from those of higher priority or paused by a "
        "daily limit; 1 with the stock scheduler",
    )
    batch_share: float = _scheduling(
        1.0,
        Check(
            lambda v: _number(v) and 0 < v <= 1,
            "must be a number above 0 and at most 1",
            _float,
        ),
        "share of running requests for batches, divided evenly among batches and waves, at "
        "least 1 each. Waves in another tokenizer worker count separately",
    )
    batch_hours: str | None = _scheduling(
        None,
        Check(
            lambda v: _hours(v) is not None,
            "must be a time of day from and to, such as '22:00-06:00'",
        ),
        'local time in which batches run, such as `"22:00-06:00"`. Outside, lines in flight '
        "finish. Waves run at any hour",
    )
    gather_s: float | None = _scheduling(
        None,
        Check(
            lambda v: _number(v) and 0 <= v <= 10,
            "must be a number of seconds from 0 to 10",
            _float,
        ),
        "seconds, at most 10, that a [single call](python.md#single-calls-of-many-tasks) "
        "waits to be planned with others. `null` sends it at once",
    )
    max_line_attempts: int = _scheduling(
        3,
        _FROM_1,
        "attempts at a line answered with 408, 425, 429, 500, 502, 503 or 504, with pauses "
        "of 1, 2, 4 ... seconds",
    )
    line_timeout_s: float | None = _scheduling(
        None,
        _above_0("seconds"),
        "seconds after its first step when a line is aborted with `line_timeout`. `null`: "
        "never",
    )

    max_batch_requests: int | None = _limits(None, _FROM_1, "most lines of a batch")
    max_file_bytes: int | None = _limits(None, _FROM_1, "most bytes of a file")
    storage_bytes: int | None = _limits(
        None,
        _FROM_1,
        "most bytes of all files, parts, unfinished results, and inputs of active batches",
    )
    min_free_bytes: int = _limits(
        1 << 30, _FROM_0, "bytes of the disk that uploads leave to results"
    )
    file_days: int = _limits(
        30,
        _FROM_1,
        "days that results and files of purpose `batch` are kept unless the client says "
        "otherwise",
    )

    api_keys: str | None = _security(None, _PATH, "file of [keys](operating.md#keys)")
    open_metrics: bool = _security(
        False, _BOOL, "whether `/metrics` needs no key of an admin"
    )
    allowed_origins: tuple[str, ...] = _security(
        (),
        _list_of(is_origin, "origins such as 'https://app.example.com', or ['*']"),
        'origins whose web pages may call the routes of batches and files; `["*"]` is any, '
        "without credentials. The server's own pages always may",
    )
    public_url: str | None = _security(
        None,
        Check(
            lambda v: isinstance(v, str) and _URL.fullmatch(v) is not None,
            "must be the http or https URL of the server, such as 'https://batches.example.com'",
        ),
        "URL of the server as clients know it. `results_url` begins with it, and pages of "
        "its origin may call. `null`: the host of each call",
    )
    trusted_proxies: tuple[str, ...] = _security(
        (),
        _list_of(
            _parses(ip_network),
            "addresses and networks such as '10.0.0.7' or '10.0.0.0/8'",
        ),
        "addresses and networks of proxies whose `X-Forwarded-Host` and "
        "`X-Forwarded-Proto` are read for `results_url`",
    )
    media_sources: tuple[str, ...] = _security(
        (),
        _list_of(
            _parses(parse_source),
            "URLs, absolute paths and networks, such as 'https://images.example.com/', "
            "'/data/images/' or '10.0.0.0/8'",
        ),
        "URLs, folders and private networks from which [media of "
        "lines](operating.md#media-of-lines) may be read, such as "
        '`["https://images.example.com/", "/data/images/", "10.0.0.0/8"]`',
    )

    render_lookahead: int = _experimental(
        8, _FROM_1, "lines rendered ahead of the next one to send"
    )
    bucket_requests: int = _experimental(
        4_000_000,
        _FROM_1,
        "`run` plans a larger job in [buckets](scale.md#a-job-that-is-larger-than-memory) "
        "of about this size",
    )
    learn_costs: bool = _experimental(
        True,
        _BOOL,
        "whether steps are timed, and later jobs planned with [measured "
        "costs](planner.md#costs-fitted-to-measured-steps)",
    )
    mixed_chunk: bool | None = _experimental(
        None,
        _BOOL,
        "whether a step may combine decodes and prompts. `null`: with an accelerator, or "
        'with `overlap` `"on"`',
    )
    sleep_on_idle: bool = _experimental(
        True,
        _BOOL,
        "whether an idle engine waits for work. `false` polls with a CPU core per replica. "
        "Not with data-parallel attention",
    )
    max_enqueued_tokens: int | None = _experimental(
        None,
        _FROM_1,
        "most estimated tokens of a client's batches in progress, unless its key has a limit",
    )
    max_uploads: int = _experimental(
        64,
        _FROM_1,
        "bodies received at a time from one client. More wait ten seconds, then get HTTP 429",
    )
    upload_timeout_s: float = _experimental(
        60.0,
        _above_0("seconds"),
        "seconds without a byte, or below 1,024 bytes per second on average, until HTTP 408",
    )
    webhooks: str | None = _experimental(
        None, _PATH, "file of [webhooks](operating.md#webhooks)"
    )
    webhook_networks: tuple[str, ...] = _experimental(
        (),
        _list_of(_parses(ip_network), "networks such as '10.0.0.0/8'"),
        "private networks they may go to, also by `http`",
    )
    prefill_servers: tuple[str, ...] = _experimental(
        (),
        _list_of(_is_server, "URLs such as 'http://10.0.0.7:30000'"),
        "on a decode server, URLs of the offline servers that [compute its "
        "prompts](scale.md#prompts-on-one-server-answers-on-another)",
    )
    draft_requests: int | None = _experimental(
        None,
        _FROM_0,
        "most running requests with which a step of NGRAM [drafts](models.md#speculation). "
        "`null`: by costs",
    )
    max_wait_steps: int | None = _experimental(
        None,
        _FROM_1,
        "decode steps after which a waiting request joins first, with `length-aligned` and "
        "`length-tree`. By default never (65,536 in dense batches)",
    )
    prefill_ahead_tokens: int = _experimental(
        0,
        _FROM_0,
        "with these policies, most prompt tokens computed before there is room for their "
        "answers",
    )
    prefetch_bytes: int = _experimental(
        0,
        _FROM_0,
        "extra device memory to which KV of requests that resume soon is copied ahead",
    )
    prefetch_device: str | None = _experimental(
        None,
        Check(
            lambda v: isinstance(v, str) and _DEVICE.fullmatch(v) is not None,
            "must be a device such as 'cuda:1'",
        ),
        'the GPU with this memory, such as `"cuda:1"`, readable by the server\'s (the first '
        "rank's; later ranks use those behind it). `null`: the same GPU",
    )
    overlap: str = _experimental(
        "off",
        _one_of("off", "auto", "on"),
        "[mixed steps as two forwards](experimental.md#mixed-steps-as-two-forwards): "
        '`"on"`, or `"auto"` by a trial',
    )

    def __post_init__(self) -> None:
        if self.stop_rules is not None:
            given: Any = self.stop_rules  # JSON, or an object of it
            parse = StopRules.from_text if isinstance(given, str) else StopRules.parse
            try:
                rules = parse(given)
            except ValueError as error:
                raise ConfigError(f"stop_rules: {error}.") from None
            object.__setattr__(self, "stop_rules", rules.to_text() if rules else None)
        for setting in dataclasses.fields(self):
            value, check = getattr(self, setting.name), setting.metadata["check"]
            if setting.default == () and isinstance(value, list):  # of JSON
                value = tuple(value)
                object.__setattr__(self, setting.name, value)
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
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"--offline-batch-config: {error}") from None
