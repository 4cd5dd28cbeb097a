"""The tier of each model family that SGLang runs, and whether its attention reads shared
prefixes once, from its configuration, without weights.

A family is an architecture of SGLang's registry without those of draft models. Its configuration
is the default of transformers or of SGLang. Where that is no whole model, the kinds of models are
told by the class of the configuration, and of a family whose configuration comes with its
checkpoints, by its name alone.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import tempfile
from collections import Counter
from types import SimpleNamespace
from typing import Any

from report import Figure, print_table

LEAST_STARTED = 0.95
LEAST_SHARING = 0.85
DRAFT = re.compile("NextN|MTP|Mtp|Eagle|EAGLE|Draft|DSpark|DFlash|Assistant|Medusa")
# Ends of the names of models, without which they are those of their configurations.
ROLE = re.compile("For[A-Z].*$|LMHeadModel$|Model$")
# What the default configurations of some families lack to be like their checkpoints.
FIELDS: dict[str, dict[str, Any]] = {
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"] * 16},
    "InklingModelConfig": {"mamba2_cache_params": True},
}
# Families whose configuration has another name.
OTHER_NAMES = {
    "bailingmoev2_5": "bailinghybrid",
    "bailingmoev3": "bailinghybrid",
    "dots3note": "dots3",
    "inkling": "inklingmodel",
    "kimik3linear": "kimilinear",
    "mimov2": "mimov2flash",
    "minicpmsala": "minicpmhybrid",
    "mistrallarge3": "deepseekv3",
    "sarvammla": "deepseekv3",
}
# Modules of SGLang's models with attention that cannot share, by what their layers are given.
CANNOT_SHARE = {
    "grok": "a temperature that changes with the position",
    "mllama": "cross-attention",
    "moss_vl": "cross-attention",
    "gemma4_diffusion": "blocks of tokens that see each other",
    "llada2": "blocks of tokens that see each other",
    "sdar": "blocks of tokens that see each other",
    "sdar_moe": "blocks of tokens that see each other",
}
LATENT = "yes, if the setting names it"


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part, the same in a quick run."""
    del quick
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            found = _all_families()
    finally:
        logging.disable(logging.NOTSET)
    tiers = Counter(tier for _, tier, _, _ in found)
    reasons = Counter((tier, reason) for _, tier, reason, _ in found)
    rows = [[tier, count, reason] for (tier, reason), count in reasons.most_common()]
    print_table("Families by tier", ["tier", "families", "why"], rows)
    sharing = Counter(filter(None, (shares for *_, shares in found)))
    print_table(
        "Shared prefixes read once", ["shared", "families"], sharing.most_common()
    )
    for name, tier, reason, _ in found:
        if tier == "unknown":
            print(f"{name}: {reason}")
    started = tiers["full"] + tiers["planned"]
    note = ", ".join(f"{tier} {count}" for tier, count in sorted(tiers.items()))
    return [
        Figure("families", len(found), "", note=note),
        Figure(
            "families that start under the plan",
            started / len(found),
            "of all",
            (">=", LEAST_STARTED),
        ),
        Figure(
            "families with softmax attention that read shared prefixes once",
            (sharing["yes"] + sharing[LATENT]) / sharing.total(),
            "of those that decode",
            (">=", LEAST_SHARING),
        ),
        Figure(
            "families that end in neither a tier nor one sentence",
            tiers["unknown"],
            "",
            ("=", 0),
        ),
    ]


def _all_families() -> list[tuple[str, str, str, str]]:
    """Architecture, tier and reason of each family, and whether it shares."""
    from sglang.srt.models.registry import ModelRegistry

    configs = _configurations()
    names = sorted(ModelRegistry.get_supported_archs())
    families = [name for name in names if not DRAFT.search(name)]
    found = []
    for name in families:
        short = ROLE.sub("", name).lower()
        found.append(_family(name, configs.get(OTHER_NAMES.get(short, short))))
    return found


def _configurations() -> dict[str, type[Any]]:
    """Classes of configurations by the lower-case name of their models."""
    from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    classes = [*_CONFIG_REGISTRY.values()]
    for model_type in CONFIG_MAPPING:
        with contextlib.suppress(Exception):  # of packages that are not installed
            classes.append(CONFIG_MAPPING[model_type])
    found: dict[str, type[Any]] = {}
    for kind in classes:
        found.setdefault(kind.__name__.removesuffix("Config").lower(), kind)
    return found


def _family(name: str, kind: type[Any] | None) -> tuple[str, str, str, str]:
    from transformers import LlamaConfig

    from sglang_batch.srt.compat.tiers import model_tier

    for read in (_read, _read_class):
        try:
            config = read(name, kind or LlamaConfig)
            tier = model_tier(config)
        except Exception as error:
            reason = f"{type(error).__name__} while its configuration is read"
        else:
            reason = " and ".join(tier.reasons)
            return name, str(tier.tier), reason, _shares(name, config, tier)
    return name, "unknown", reason, "unknown"


def _shares(name: str, config: Any, tier: Any) -> str:
    """Yes, or why no layer can, or "" for a family without decodes or softmax attention."""
    from sglang.srt.configs.model_config import AttentionArch, is_generation_model
    from sglang.srt.models.registry import ModelRegistry

    kind = getattr(config, "attention_arch", AttentionArch.MHA)
    if not is_generation_model([name]) or kind == AttentionArch.SSM:
        return ""
    if tier.tier == "refused":
        return "the family is refused"
    if any("sparse" in reason for reason in tier.reasons):
        return "sparse attention"
    module = ModelRegistry.resolve_model_cls([name])[0].__module__.rpartition(".")[2]
    return CANNOT_SHARE.get(module, LATENT if kind == AttentionArch.MLA else "yes")


def _read(name: str, kind: type[Any]) -> Any:
    """SGLang's own object for a configuration."""
    from sglang.srt.configs.model_config import ModelConfig

    config = kind(**FIELDS.get(kind.__name__, {}))
    config.architectures = [name]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return ModelConfig(folder, dtype="float32")


def _read_class(name: str, kind: type[Any]) -> Any:
    """What SGLang tells by the name and the class of a configuration."""
    from sglang.srt.configs.linear_attn_model_registry import get_linear_attn_config
    from sglang.srt.configs.model_config import (
        is_hybrid_swa_model,
        is_multimodal_model,
    )

    fields = FIELDS.get(kind.__name__, {})
    kind = type(kind.__name__, (kind,), fields)
    config: Any = object.__new__(kind)
    config.__dict__.update(architectures=[name], is_encoder_decoder=False)
    return SimpleNamespace(
        hf_config=config,
        hf_text_config=config,
        is_draft_model=False,
        is_encoder_decoder=False,
        is_multimodal=is_multimodal_model([name]),
        is_hybrid_swa=is_hybrid_swa_model([name], config),
        full_attention_layer_ids=None,
        use_ngram_embedding=False,
        use_engram=False,
        linear_attn_registry_result=get_linear_attn_config(config),
    )
