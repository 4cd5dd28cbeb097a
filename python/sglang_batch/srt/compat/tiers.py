"""How much of the plan a server has with each kind of model, and with each flag.

*Full*: everything. *Planned*: the order of the plan, each shared prefix computed once, admission
by the forecast of KV and eviction by the plan, but no offloading. *Refused*: answers would be
wrong; the error names the way out.

:data:`MODEL_KINDS` is the table of models, and :mod:`.support` has those of flags. The log of a
starting server has its tier in one line, ``/server_info`` has it, and the tables in
docs/models.md are made from these.

The checks raise ConfigError, which names the architecture and the way out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from ...errors import ConfigError
from .support import STOCK_SCHEDULER

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig


class Tier(StrEnum):
    """How much of the plan there is. See the module."""

    FULL = "full"
    PLANNED = "planned"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class ModelKind:
    """A kind of model that keeps more than plain KV.

    tier: planned or refused.
    found: whether a model is of this kind.
    reason: completes "offloading is off because" and "does not work: ".
    way_out: an alternative to the stock scheduler. May be empty.
    """

    name: str
    tier: Tier
    found: Callable[[ModelConfig], bool]
    reason: str
    way_out: str = ""


def keeps_states(config: ModelConfig) -> bool:
    """Whether a model has a recurrent state besides KV."""
    from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state

    return bool(uses_ssm_state(config))


def _compressed(config: ModelConfig) -> bool:
    from sglang.srt.configs.model_config import is_deepseek_v4

    return bool(is_deepseek_v4(config.hf_config))


def _windows(config: ModelConfig) -> bool:
    return bool(config.is_hybrid_swa)


def _only_windows(config: ModelConfig) -> bool:
    full = config.full_attention_layer_ids
    return config.is_hybrid_swa and full is not None and len(full) == 0


def _sparse(config: ModelConfig) -> bool:
    from sglang.srt.configs.model_config import is_deepseek_dsa, is_minimax_sparse

    hf_config = config.hf_config
    return bool(is_deepseek_dsa(hf_config) or is_minimax_sparse(hf_config))


def _pooled_index(config: ModelConfig) -> bool:
    from sglang.srt.configs.model_config import get_dsa_index_kpool

    return _sparse(config) and bool(get_dsa_index_kpool(config.hf_config) > 1)


# The first that is refused decides; otherwise all that are found.
MODEL_KINDS: tuple[ModelKind, ...] = (
    ModelKind(
        "encoder-decoder",
        Tier.REFUSED,
        lambda config: config.is_encoder_decoder,
        "it has an encoder whose KV is not in the prefix cache",
    ),
    ModelKind(
        "state-space or linear-attention layers",
        Tier.PLANNED,
        keeps_states,
        "its state-space or linear-attention layers keep a state besides KV",
    ),
    ModelKind(
        "compressed KV (DeepSeek V4)",
        Tier.REFUSED,
        _compressed,
        "it keeps compressed KV and a ring of recent tokens per request, which the "
        "plan does not count",
    ),
    ModelKind(
        "recurrent states and windows (Inkling)",
        Tier.REFUSED,
        lambda config: keeps_states(config) and config.is_hybrid_swa,
        "it has both recurrent states and a pool for windows, and the plan counts one such "
        "pool",
    ),
    ModelKind(
        "sliding-window layers only",
        Tier.REFUSED,
        _only_windows,
        "all its layers have sliding windows, so no prefix is kept whole",
        "add --disable-hybrid-swa-memory",
    ),
    ModelKind(
        "sliding-window layers with a pool of their own",
        Tier.PLANNED,
        _windows,
        "its sliding-window layers keep KV in a separate pool",
    ),
    ModelKind(
        "sparse attention (DeepSeek V3.2, MiniMax M3)",
        Tier.PLANNED,
        _sparse,
        "its sparse attention keeps an index besides KV",
    ),
    ModelKind(
        "sparse attention with an index of groups of tokens",
        Tier.REFUSED,
        _pooled_index,
        "a chunk of a prompt has to end where a group of its index ends, and the plan "
        "cuts prompts anywhere",
    ),
    ModelKind(
        "n-gram embeddings",
        Tier.PLANNED,
        lambda config: config.use_ngram_embedding or config.use_engram,
        "its n-gram tables keep state per request besides KV",
    ),
)


@dataclass(frozen=True, slots=True)
class ModelTier:
    """The tier of a server with one model.

    reasons: why it is not full. Empty if it is.
    way_out: of a refused model, besides the stock scheduler. May be empty.
    """

    architecture: str
    tier: Tier
    reasons: tuple[str, ...] = ()
    way_out: str = ""

    def __str__(self) -> str:
        line = f"{self.architecture}: {self.tier}"
        if self.tier is Tier.PLANNED:
            line += f"; offloading is off because {' and '.join(self.reasons)}"
        return line

    def without_offloading(self, *reasons: str) -> ModelTier:
        """The tier where something besides the model forbids offloading.

        reasons: complete "offloading is off because". May be none.
        """
        if not reasons or self.tier is Tier.REFUSED:
            return self
        return replace(self, tier=Tier.PLANNED, reasons=(*self.reasons, *reasons))


def model_tier(config: ModelConfig, *, hybrid_swa_disabled: bool = False) -> ModelTier:
    """The tier of a model.

    hybrid_swa_disabled: all layers keep all KV, whatever their attention window.
    """
    architecture = (config.hf_config.architectures or ["this model"])[0]
    reasons = []
    for kind in MODEL_KINDS:
        if kind.found in (_windows, _only_windows) and hybrid_swa_disabled:
            continue
        if kind.found(config):
            if kind.tier is Tier.REFUSED:
                return ModelTier(architecture, kind.tier, (kind.reason,), kind.way_out)
            reasons.append(kind.reason)
    tier = Tier.PLANNED if reasons else Tier.FULL
    return ModelTier(architecture, tier, tuple(reasons))


def check_model(config: ModelConfig, *, hybrid_swa_disabled: bool = False) -> ModelTier:
    """The tier of a model that works with the offline scheduler.

    hybrid_swa_disabled: as of :func:`model_tier`.
    """
    found = model_tier(config, hybrid_swa_disabled=hybrid_swa_disabled)
    if found.tier is not Tier.REFUSED:
        return found
    way_out = f"{found.way_out}, or give" if found.way_out else "give"
    raise ConfigError(
        f"{found.architecture} does not work with the offline scheduler: "
        f"{found.reasons[0]}; {way_out} {STOCK_SCHEDULER}."
    )


def check_sent_whole(found: ModelTier) -> None:
    """Refuse a model on a prefill server that sends KV and nothing else.

    Raises:
        ConfigError: names the architecture and the way out.
    """
    if found.tier is not Tier.FULL:
        raise ConfigError(
            f"{found.architecture} does not work with --disaggregation-mode prefill and "
            f"the offline scheduler: {found.reasons[0]}, and only KV is sent; drop the "
            f"mode, or name another transfer backend and give {STOCK_SCHEDULER}."
        )


def check_drafts(
    configs: Sequence[ModelConfig],
    algorithm: str,
    pp_size: int = 1,
    *,
    attention_dp: bool = False,
) -> None:
    """Refuse ``--speculative-algorithm`` with a model that keeps more for each draft than KV,
    with stages of a pipeline, and with attention data parallelism.

    configs: of the model, and of the draft model if there is one.

    Raises:
        ConfigError: names the architecture and the way out.
    """
    for config in filter(keeps_states, configs):
        architecture = model_tier(config).architecture
        raise ConfigError(
            f"{architecture} does not work with --speculative-algorithm {algorithm} and the "
            "offline scheduler: each draft needs a recurrent state of its own, which the "
            f"plan does not count; drop the flag, or give {STOCK_SCHEDULER}."
        )
    other = ""
    if pp_size > 1:
        other, why = f"--pp-size {pp_size}", "of several micro-batches"
    elif attention_dp:
        other, why = "--enable-dp-attention", "that pad other ranks' drafts"
    if other:
        raise ConfigError(
            f"--speculative-algorithm {algorithm} does not work with {other} and the offline "
            f"scheduler: tokens {why} are not counted apart; drop one of the two, or give "
            f"{STOCK_SCHEDULER}."
        )
