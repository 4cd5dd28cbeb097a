"""A job's stop rules for its lines that have none of their own."""

from __future__ import annotations

import dataclasses

import msgspec

from ..request import BatchRequestInput, Requests
from .protocol import GENERATING_URLS
from .stop_rules.rule_settings import FIELD

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def with_stop_rules(requests: Requests, rules: str | None) -> Requests:
    """The same requests, whose bodies have ``stop_rules``, but for those that generate nothing.

    Args:
        rules: JSON of the rules of requests without any. None for none.
    """
    return requests if rules is None else _WithStopRules(requests, rules.encode())


class _WithStopRules:
    def __init__(self, requests: Requests, rules: bytes) -> None:
        self._requests = requests
        self._first_field = b'{"%s": %s, ' % (FIELD.encode(), rules)

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, index: int) -> BatchRequestInput:
        request = self._requests[index]
        if request.url not in GENERATING_URLS or not _lacks_rules(request.body):
            return request
        rest = request.body.lstrip()[1:]
        return dataclasses.replace(request, body=self._first_field + rest)


def _lacks_rules(body: bytes) -> bool:
    """Whether a body is an object without rules. A line with a bad body keeps it as it is."""
    try:
        found = _fields.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return bool(found) and FIELD not in found
