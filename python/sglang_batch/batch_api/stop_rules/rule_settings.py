"""The ``stop_rules`` of a request: which there are, and their checks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from ...request import BatchRequestInput, Requests
from ..protocol import GENERATING_URLS
from .regex_rule import check_regex

FIELD = "stop_rules"
RULES = ("json", "regex", "repetition")
# Most patterns of a request. Each is matched against every byte of the answer.
MAX_REGEXES = 8
# Counts for each size of a pattern are kept while the answer grows.
MAX_PATTERN_SIZE = 512
_MOST = 1 << 20


@dataclass(frozen=True, slots=True)
class Repetition:
    """When the last tokens of an answer repeat a pattern: the end of a loop.

    A pattern comes ``min_count`` times in a row, with ``min_tokens`` tokens in all:
    a row of spaces or dashes is shorter. Raises ValueError if a number is out of
    range.
    """

    max_pattern_size: int = 64
    min_pattern_size: int = 1
    min_count: int = 4
    min_tokens: int = 64

    def __post_init__(self) -> None:
        least = {"min_count": 2}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            low, high = least.get(name, 1), _MOST
            if name.endswith("pattern_size"):
                high = MAX_PATTERN_SIZE
            if type(value) is not int or not low <= value <= high:
                raise ValueError(
                    f"repetition.{name} is {_short(value)}; give a whole number from "
                    f"{low} to {high}"
                )
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError(
                f"repetition.min_pattern_size is {self.min_pattern_size}, more than "
                f"max_pattern_size {self.max_pattern_size}; give a smaller one"
            )


@dataclass(frozen=True, slots=True)
class StopRules:
    """Ends of an answer besides its stop strings, ending tokens and length.

    The first JSON value is complete, one of the regular expressions matches, or it
    loops.
    """

    json: bool = False
    regexes: tuple[str, ...] = ()
    repetition: Repetition | None = None

    def __bool__(self) -> bool:
        return self.json or self.reads_text or self.repetition is not None

    @property
    def reads_text(self) -> bool:
        """Whether a rule needs the text of tokens, so a tokenizer."""
        return self.json or bool(self.regexes)

    @classmethod
    def parse(cls, value: object) -> StopRules:
        """The rules of JSON such as ``{"json": true}``. ValueError: one sentence."""
        if value is None:
            return cls()
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{_short(value)} is not an object of rules; the rules are "
                f"{', '.join(RULES)}"
            )
        for name in value:
            if name not in RULES:
                raise ValueError(
                    f"there is no rule {_short(name)}; the rules are {', '.join(RULES)}"
                )
        return cls(
            json=_parse_json(value.get("json")),
            regexes=_parse_regexes(value.get("regex")),
            repetition=_parse_repetition(value.get("repetition")),
        )

    @classmethod
    def from_text(cls, text: str) -> StopRules:
        """The rules of JSON text. Raises as :meth:`parse`."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{_short(text)} is not JSON ({error})") from None
        return cls.parse(value)

    def to_value(self) -> dict[str, Any]:
        value: dict[str, Any] = {}
        if self.json:
            value["json"] = True
        if self.regexes:
            value["regex"] = list(self.regexes)
        if self.repetition is not None:
            value["repetition"] = dataclasses.asdict(self.repetition)
        return value

    def to_text(self) -> str:
        return json.dumps(self.to_value())


NO_RULES = StopRules()


def _parse_json(value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"json is {_short(value)}; give true or false")
    return bool(value)


def _parse_regexes(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    regexes = value if isinstance(value, list) else [value]
    if len(regexes) > MAX_REGEXES:
        raise ValueError(
            f"regex has {len(regexes)} patterns; give at most {MAX_REGEXES}"
        )
    for regex in regexes:
        if not isinstance(regex, str):
            raise ValueError(f"regex is {_short(regex)}; give a pattern or a list")
        if (fault := check_regex(regex)) is not None:
            raise ValueError(f"regex {_short(regex)} {fault}")
    return tuple(regexes)


def _parse_repetition(value: object) -> Repetition | None:
    if value is None or value is False:
        return None
    if value is True:
        return Repetition()
    known = [field.name for field in fields(Repetition)]
    if not isinstance(value, Mapping):
        raise ValueError(
            f"repetition is {_short(value)}; give true, or an object of "
            f"{', '.join(known)}"
        )
    for name in value:
        if name not in known:
            raise ValueError(
                f"repetition has no setting {_short(name)}; the settings are "
                f"{', '.join(known)}"
            )
    return Repetition(**value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def with_stop_rules(requests: Requests, rules: str | None) -> Requests:
    """The requests that generate, with these ``stop_rules`` in bodies without any."""
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
