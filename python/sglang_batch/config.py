"""Settings of an offline batch, validated once, at the edge.

The JSON of ``--offline-batch-config`` and the options of ``sglang-batch run``
both end as one :class:`OfflineBatchConfig`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError

# Orders of a job's requests; planner/order.py says what each is. Where ``auto`` finds
# several equal it takes the first of them: the simplest.
POLICIES = (
    "auto",
    "dfs",
    "dfs-weight",
    "dual-scan",
    "prefix-groups",
    "lpt",
    "lof",
    "random",
    "fcfs",
)
# Who carries the plan out inside SGLang's scheduler processes.
SCHEDULERS = ("offline", "stock")
# What reads shared prefixes once; "stock" is SGLang's own attention.
ATTENTIONS = ("auto", "triton", "flashinfer", "torch", "stock")


_CHOICES = {"policy": POLICIES, "scheduler": SCHEDULERS, "attention": ATTENTIONS}


def _hours(value: object) -> tuple[int, int] | None:
    found = re.fullmatch(r"(\d\d):(\d\d)-(\d\d):(\d\d)", str(value))
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


_Fits = Callable[[Any], bool]
_FROM_0: tuple[_Fits, str] = (lambda v: _whole(v, 0), "a whole number of 0 or more")
_FROM_1: tuple[_Fits, str] = (lambda v: _whole(v, 1), "a whole number of 1 or more")
_PATH: tuple[_Fits, str] = (lambda v: isinstance(v, str), "the path of a file")
# What each setting must be; of those in _OPTIONAL, None is a value too.
_FITS: dict[str, tuple[_Fits, str]] = {
    "seed": _FROM_0,
    "max_inflight": _FROM_1,
    "render_lookahead": _FROM_1,
    "mixed_chunk": (lambda v: isinstance(v, bool), "true or false"),
    "step_log": _PATH,
    "max_line_tries": _FROM_1,
    "line_timeout_s": (lambda v: _number(v) and v > 0, "a number of seconds above 0"),
    "max_batches": _FROM_1,
    "batch_hours": (
        lambda v: _hours(v) is not None,
        "a time of day from and to, such as '22:00-06:00'",
    ),
    "batch_share": (
        lambda v: _number(v) and 0 < v <= 1,
        "a number above 0 and at most 1",
    ),
    "max_batch_requests": _FROM_1,
    "max_file_bytes": _FROM_1,
    "storage_bytes": _FROM_1,
    "file_days": _FROM_1,
    "api_keys": _PATH,
}
_OPTIONAL = {
    "max_inflight",
    "step_log",
    "mixed_chunk",
    "line_timeout_s",
    "batch_hours",
    "max_batch_requests",
    "max_file_bytes",
    "storage_bytes",
    "api_keys",
}


@dataclass(frozen=True, slots=True)
class OfflineBatchConfig:
    """How jobs are planned and fed, and what a server allows them.

    policy: order in which requests are sent to the engine, one of ``POLICIES``.
        ``dfs`` sorts by prompt tokens, so requests that share a prefix follow one
        another; ``fcfs`` keeps the order of the input and plans nothing; ``auto``
        simulates all orders and takes the fastest.
    seed: of everything random in planning.
    max_inflight: requests inside the engine at a time. None lets the engine say:
        enough to keep it full, few enough to keep its queue short.
    render_lookahead: requests rendered (template and tokenizer) ahead of their
        turn, in threads.
    scheduler: one of ``SCHEDULERS``. ``offline`` replaces SGLang's scheduler and
        prefix cache by ones that know the plan; ``stock`` leaves SGLang's own in
        place, and the plan is only the order in which requests are sent.
    mixed_chunk: whether decodes ride with prompts in one step, as with SGLang's
        ``--enable-mixed-chunk``. None: wherever an accelerator is; the attention that
        SGLang has for machines without one takes far longer for it.
    attention: one of ``ATTENTIONS``: what computes decodes that share a prefix, beside
        the backend that SGLang chooses: our Triton kernel, FlashInfer's cascade
        (without CUDA graphs), or PyTorch; ``stock`` leaves all to SGLang. ``auto``:
        Triton on GPUs that its kernel has settings for, if no attention backend is
        named and model and trial allow it.
    step_log: CSV file to which the offline scheduler appends a line for each step,
        for ``sglang-batch plan --steps``.

    max_line_tries: how often a line is sent whose answer is an error of the server
        (HTTP 408, 429 or 5xx), with growing pauses between.
    line_timeout_s: a line without an answer for so long is an error; None waits.

    max_batches: batches that a server runs at a time; more of a higher priority start
        beside them.
    batch_hours: local time of day in which batches run, such as ``22:00-06:00``; None
        is all day. Outside of it lines that run are finished and no more are sent.
    batch_share: largest share of the engine's running requests that lines of batches
        may be, above 0 and at most 1.

    max_batch_requests, max_file_bytes: largest batch and largest file that a server
        takes; None is any.
    storage_bytes: what all files of a server may take together; None is any.
    file_days: days that an uploaded file of purpose ``batch``, and the results of a
        batch, are kept where the client does not say.
    api_keys: path of a file with a line ``NAME KEY`` for each client. A call must
        carry one of the keys then, and sees only what was made with the same name.
    """

    policy: str = "dfs"
    seed: int = 0
    max_inflight: int | None = None
    render_lookahead: int = 8
    scheduler: str = "offline"
    step_log: str | None = None
    mixed_chunk: bool | None = None
    attention: str = "auto"
    max_line_tries: int = 3
    line_timeout_s: float | None = None
    max_batches: int = 4
    batch_hours: str | None = None
    batch_share: float = 1.0
    max_batch_requests: int | None = None
    max_file_bytes: int | None = None
    storage_bytes: int | None = None
    file_days: int = 30
    api_keys: str | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(
                    f"{name}={value!r} is not known; choose one of {', '.join(choices)}."
                )
        for name, (fits, wanted) in _FITS.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not fits(value):
                raise ConfigError(f"{name}={value!r} must be {wanted}.")

    @property
    def hours(self) -> tuple[int, int] | None:
        """``batch_hours`` in minutes of the day, from and to; None is all day."""
        return None if self.batch_hours is None else _hours(self.batch_hours)

    @classmethod
    def from_json(cls, text: str | None) -> OfflineBatchConfig:
        """Parse the value of ``--offline-batch-config``.

        Raises:
            ConfigError: not a JSON object, an unknown key, or a value out of range.
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
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(
                    f"--offline-batch-config has no setting {key!r}; "
                    f"it knows {', '.join(known)}."
                )
        return cls(**values)
