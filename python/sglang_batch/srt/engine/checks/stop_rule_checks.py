"""The way of ``stop_rules`` from a body to the scheduler.

A line has them at the top of its body. In SGLang's requests they are JSON text in
``custom_params`` of the sampling parameters, which SGLang passes to its scheduler as they are.
Calls of SGLang's own routes give them there, as text or as an object.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from ....batch_api.protocol import GENERATING_URLS
from ....batch_api.stop_rules import FIELD, StopRules
from ....job.engine import GENERATE_URL
from .value_checks import FieldError


def take_rules(url: str, body: MutableMapping[str, Any]) -> StopRules | None:
    """Remove the rules from the body of a line. None if it has none.

    Raises:
        FieldError: they cannot be used, or the endpoint generates nothing.
    """
    value = body.pop(FIELD, None)
    if value is None:
        return None
    if url not in GENERATING_URLS and url != GENERATE_URL:
        raise FieldError(FIELD, f"{url} generates nothing that could be cut; drop them")
    return _parsed(value) or None


def add_rules(adapted: Any, rules: StopRules | None) -> None:
    """Give SGLang's request for a line its rules, in place of those it has."""
    if rules is None:
        return
    if adapted.sampling_params is None:
        adapted.sampling_params = {}
    for params in _each(adapted.sampling_params):
        custom = params.get("custom_params")
        given = custom if isinstance(custom, dict) else {}
        params["custom_params"] = {**given, FIELD: rules.to_text()}


def has_rules(params: Mapping[str, Any]) -> bool:
    """Whether sampling parameters have rules, which may end an answer at any token."""
    custom = params.get("custom_params")
    return isinstance(custom, dict) and bool(custom.get(FIELD))


def settle_rules(adapted: Any) -> None:
    """Check the rules in SGLang's request, and make them text.

    Raises:
        FieldError: they cannot be used.
    """
    for params in _each(getattr(adapted, "sampling_params", None)):
        custom = params.get("custom_params")
        if not isinstance(custom, dict) or (value := custom.get(FIELD)) is None:
            continue
        rules = _parsed(value)
        if rules and isinstance(width := params.get("beam_width"), int) and width > 1:
            raise FieldError(
                FIELD, "a beam search has no one answer that grows; drop them"
            )
        params["custom_params"] = {**custom, FIELD: rules.to_text()}


def _each(sampling_params: Any) -> list[dict[str, Any]]:
    """Those of each prompt. Others than objects are refused later."""
    given = sampling_params if isinstance(sampling_params, list) else [sampling_params]
    return [params for params in given if isinstance(params, dict)]


def _parsed(value: object) -> StopRules:
    try:
        if isinstance(value, str):
            return StopRules.from_text(value)
        return StopRules.parse(value)
    except ValueError as error:
        raise FieldError(FIELD, str(error)) from None
