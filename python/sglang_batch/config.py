"""Settings of an offline batch, validated once, at the edge.

The JSON of ``--offline-batch-config`` and the options of ``sglang-batch run``
both end as one :class:`OfflineBatchConfig`.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

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
# What computes attention with --attention-backend shared_prefix.
ATTENTIONS = ("auto", "triton", "torch")


@dataclass(frozen=True, slots=True)
class OfflineBatchConfig:
    """How a job is planned and fed.

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
    attention: one of ``ATTENTIONS``, for ``--attention-backend shared_prefix``: the
        Triton kernel, or the same plan in PyTorch, which is the way on a CPU and a
        reference elsewhere. ``auto``: Triton wherever an accelerator is.
    step_log: CSV file to which the offline scheduler appends a line for each step,
        for ``sglang-batch plan --steps``.
    """

    policy: str = "dfs"
    seed: int = 0
    max_inflight: int | None = None
    render_lookahead: int = 8
    scheduler: str = "offline"
    step_log: str | None = None
    mixed_chunk: bool | None = None
    attention: str = "auto"

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(
                f"policy={self.policy!r} is not known; choose one of {', '.join(POLICIES)}."
            )
        if self.scheduler not in SCHEDULERS:
            raise ConfigError(
                f"scheduler={self.scheduler!r} is not known; "
                f"choose one of {', '.join(SCHEDULERS)}."
            )
        if self.attention not in ATTENTIONS:
            raise ConfigError(
                f"attention={self.attention!r} is not known; "
                f"choose one of {', '.join(ATTENTIONS)}."
            )
        if (
            not isinstance(self.seed, int)
            or isinstance(self.seed, bool)
            or self.seed < 0
        ):
            raise ConfigError(
                f"seed={self.seed!r} must be a whole number of 0 or more."
            )
        if not isinstance(self.mixed_chunk, bool | None):
            raise ConfigError(
                f"mixed_chunk={self.mixed_chunk!r} must be true or false."
            )
        if self.step_log is not None and not isinstance(self.step_log, str):
            raise ConfigError(f"step_log={self.step_log!r} must be the path of a file.")
        for name in ("max_inflight", "render_lookahead"):
            value = getattr(self, name)
            if value is None and name == "max_inflight":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"{name}={value!r} must be a whole number of 1 or more."
                )

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
