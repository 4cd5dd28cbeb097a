"""Tiny models of many types: tokens against ``generate`` for each prompt alone.

The models are those of ``test/helpers/tiny_models.py``, built from configurations with
random weights. Requests join one after the other, and three share a prefix. A class is
equal if all its types are.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from report import Figure, print_table
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dense_parts.turns import progress
from sglang_batch.dense.model import LoadedModel, wrap
from sglang_batch.dense.row_request import DenseRequest, DenseSettings
from sglang_batch.dense.rows import rows_for
from sglang_batch.errors import ConfigError

sys.path.append(str(Path(__file__).parents[2] / "test" / "helpers"))

from dense_runs import Run, generated, greedy, prompts
from tiny_models import (
    CANNOT_BE_BUILT,
    CAUSAL_OTHERS,
    CAUSAL_WITHOUT_SGLANG,
    SEQ2SEQ,
    tiny_model,
)

# More requests than rows, and prefixes that are worth sharing.
SETTINGS = DenseSettings(max_rows=3, shortest_shared=4)
ANSWERS = (2, 9, 12, 4, 7)

SHARED, ALONE, REFUSED, UNLIKE, NOT_TEXT = (
    "equal, in shared batches",
    "equal, one at a time",
    "refused",
    "NOT EQUAL",
    "no language model of text",
)
EQUAL = {SHARED, ALONE}


def measure(quick: bool, repeats: int) -> list[Figure]:
    first, others, encoders = CAUSAL_WITHOUT_SGLANG, CAUSAL_OTHERS, SEQ2SEQ
    if quick:
        first, others, encoders = ("bloom", "rwkv"), ("gpt2",), ("t5",)
    found = {name: outcome(name) for name in (*first, *others)}
    with_encoder = {name: outcome(name, encoder_decoder=True) for name in encoders}
    alone, rest = by_class(first, found), by_class(others, found)
    groups = {
        "SGLang has no class": alone,
        "other causal models": rest,
        "encoder-decoders": with_encoder,
    }
    kinds = (SHARED, ALONE, REFUSED, NOT_TEXT, UNLIKE)
    print_table(
        "Classes",
        ["", *kinds],
        [
            [name, *(str(Counter(group.values())[kind]) for kind in kinds)]
            for name, group in groups.items()
        ],
    )
    least = (None, None) if quick else ((">=", 38), (">=", 20))
    everything = [*alone.values(), *rest.values(), *with_encoder.values()]
    unlike = everything.count(UNLIKE)
    return [
        _equal(f"of {len(alone)} classes that SGLang does not run", alone, least[0]),
        _equal(f"of {len(rest)} other causal classes", rest, least[1]),
        _equal(f"of {len(encoders)} encoder-decoders", with_encoder, None),
        Figure("classes that answer otherwise", unlike, "", ("=", 0)),
    ]


def by_class(names: Collection[str], found: dict[str, str]) -> dict[str, str]:
    """The outcome of each class: where its types differ, the one that is not equal."""
    of_class = defaultdict(list)
    for name in names:
        of_class[str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])].append(found[name])
    return {
        name: next((each for each in outcomes if each not in EQUAL), outcomes[0])
        for name, outcomes in of_class.items()
    }


def outcome(model_type: str, *, encoder_decoder: bool | None = None) -> str:
    """How a tiny model of a type answers."""
    if model_type in CANNOT_BE_BUILT:
        return NOT_TEXT
    # As in a run of the engine: only its steps are in inference mode.
    with torch.inference_mode(False):
        model = wrap(tiny_model(model_type, encoder_decoder=encoder_decoder))
        found = _outcome(model, _requests(15 if encoder_decoder else 25))
    progress(f"{model_type}: {found}")
    return found


def _outcome(model: LoadedModel, requests: Sequence[DenseRequest]) -> str:
    try:
        rows, why_separate = rows_for(model, SETTINGS)
    except ConfigError:
        return REFUSED
    run = Run(model, SETTINGS, rows=rows).add(requests[:2]).steps(2)
    run.add(requests[2:]).finish()
    expected = {
        each.rid: generated(model, each.input_ids, each.stopping.max_new_tokens)
        for each in requests
    }
    if run.tokens() != expected:
        return UNLIKE
    return ALONE if why_separate else SHARED


def _requests(longest: int) -> list[DenseRequest]:
    """Prompts of different lengths, three of which share a prefix."""
    (stem,) = prompts(1, seed=1, shortest=10, longest=10)
    all_ids = prompts(len(ANSWERS), seed=2, longest=longest)
    return [
        greedy(str(place), [*stem, *ids] if place < 3 else ids, count, place=place)
        for place, (ids, count) in enumerate(zip(all_ids, ANSWERS, strict=True))
    ]


def _equal(
    name: str, outcomes: dict[str, str], target: tuple[str, float] | None
) -> Figure:
    equal = [each for each in outcomes.values() if each in EQUAL]
    shared = f"{equal.count(SHARED)} in shared batches"
    return Figure(f"{name}, equal", len(equal), "", target, shared)
