"""Answers that keep to a grammar, by xgrammar."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import xgrammar

ANY_JSON = "$$ANY$$"
"""The text of kind ``json_schema`` that stands for any JSON value."""

KINDS = ("json_schema", "regex", "ebnf", "structural_tag")

# What xgrammar 0.2 reads in a schema without keeping answers to it.
_IGNORED_KEYWORDS = frozenset(
    [
        "contains",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "multipleOf",
        "not",
        "then",
        "uniqueItems",
    ]
)
_KNOWN_FORMATS = frozenset(
    [
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "json-pointer",
        "relative-json-pointer",
        "time",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
    ]
)
# Of these, xgrammar keeps a string to one.
_STRING_LIMITS = (("format",), ("pattern",), ("minLength", "maxLength"))

# Where a schema has others: as the value, in a list, and by names.
_SCHEMA_AT = frozenset(
    [
        "additionalItems",
        "additionalProperties",
        "items",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
_SCHEMAS_IN_LIST = frozenset(["allOf", "anyOf", "items", "oneOf", "prefixItems"])
_SCHEMAS_BY_NAME = frozenset(
    ["$defs", "definitions", "dependencies", "patternProperties", "properties"]
)

# Compiled grammars that are kept for rows to come.
_KEPT = 256


# xgrammar's set of the characters of a string whose length is limited, and that set without
# the control characters that a JSON string has to escape.
_LIMITED, _JSON_LIMITED = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\]"
_LENGTHS = ("minLength", "maxLength")


class JsonCompiler(xgrammar.GrammarCompiler):
    """A compiler of xgrammar whose answers to JSON schemas are JSON.

    xgrammar 0.2 allows bare tabs and other control characters in strings with ``minLength`` or
    ``maxLength``.
    """

    def compile_json_schema(
        self, schema: Any, **kwargs: Any
    ) -> xgrammar.CompiledGrammar:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        if not any(name in text for name in _LENGTHS):
            return super().compile_json_schema(schema, **kwargs)
        return self.compile_grammar(_json_grammar(schema, **kwargs))

    def compile_structural_tag(
        self, *args: Any, **kwargs: Any
    ) -> xgrammar.CompiledGrammar:
        if len(args) == 1 and not kwargs:
            tag = args[0]
            text = tag if isinstance(tag, str) else tag.model_dump_json()
            if any(name in text for name in _LENGTHS):
                args = (json.dumps(_with_grammars(json.loads(text))),)
        return super().compile_structural_tag(*args, **kwargs)


def _json_grammar(schema: Any, **kwargs: Any) -> str:
    grammar = str(xgrammar.Grammar.from_json_schema(schema, **kwargs))
    return grammar.replace(_LIMITED, _JSON_LIMITED)


def _with_grammars(part: Any) -> Any:
    """A part of a structural tag, with the grammars of its schemas in their place."""
    if isinstance(part, list):
        return [_with_grammars(each) for each in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "json_schema" and part.get("style") in (None, "json"):
        text = json.dumps(part.get("json_schema"))
        if any(name in text for name in _LENGTHS):
            return {"type": "grammar", "grammar": _json_grammar(text)}
        return part
    return {name: _with_grammars(value) for name, value in part.items()}


class GrammarRow:
    """The place of one row in its grammar."""

    def __init__(self, kind: str, text: str, compiled: xgrammar.CompiledGrammar):
        self._named = _named(kind, text)
        self._matcher = xgrammar.GrammarMatcher(compiled)

    @property
    def terminated(self) -> bool:
        """Whether the grammar has ended with an ending token of the model."""
        return bool(self._matcher.is_terminated())

    def accept(self, token: int) -> None:
        """Advance by a token of the answer.

        Raises:
            ValueError: the grammar does not allow it here.
        """
        if not self._matcher.accept_token(token):
            raise ValueError(
                f"token {token} is not allowed here by the {self._named}; "
                "choose tokens under its mask"
            )

    def fill(self, bitmask: Any, row: int) -> None:
        """Write which tokens may follow to one row of a bitmask."""
        self._matcher.fill_next_token_bitmask(bitmask, row)


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """The tokens that may follow, of the rows of a step that have a grammar.

    rows: the rows, ascending.
    bitmask: int32 ``[all rows, ceil(vocab / 32)]`` on the CPU, one bit per token.
    vocab_size: width of the logits.
    """

    rows: Sequence[int]
    bitmask: Any
    vocab_size: int

    def apply(self, logits: Any) -> None:
        """Set the logits of other tokens to minus infinity, in place.

        Args:
            logits: float32 ``[all rows, vocab]``, on any device.

        Raises:
            ValueError: the logits have another width.
        """
        if logits.shape[-1] != self.vocab_size:
            raise ValueError(
                f"the logits have {logits.shape[-1]} columns, the grammars "
                f"{self.vocab_size}; make the grammars with the width of the logits"
            )
        xgrammar.apply_token_bitmask_inplace(
            logits,
            self.bitmask.to(logits.device),
            vocab_size=self.vocab_size,
            indices=list(self.rows),
        )


class Grammars:
    """Compiles grammars for one tokenizer and keeps the last ones.

    Args:
        tokenizer: of transformers.
        vocab_size: width of the model's logits, which may be more or less than the
            tokens of the tokenizer.
        eos_ids: the ending tokens of the model, which a finished grammar allows.

    Raises:
        ValueError: xgrammar does not know this kind of tokenizer, or there are no
            ending tokens.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_ids: Iterable[int]):
        self._vocab_size = vocab_size
        stop_ids = sorted(set(eos_ids))
        if not stop_ids:
            raise ValueError(
                "eos_ids is empty, so no grammar could end; give the ending tokens "
                "of the model"
            )
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=vocab_size, stop_token_ids=stop_ids
            )
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"xgrammar cannot use the tokenizer {type(tokenizer).__name__}: "
                f"{error}; send requests without a grammar"
            ) from error
        # Its own cache takes some structural tags with tokens for others.
        self._compiler = JsonCompiler(info, cache_enabled=False)
        self._compiled = lru_cache(maxsize=_KEPT)(self._compile)

    def row(self, kind: str, text: str) -> GrammarRow:
        """The start of a grammar, for one row.

        Args:
            kind: one of :data:`KINDS`.
            text: the grammar; of kind ``json_schema`` also :data:`ANY_JSON`.

        Raises:
            ValueError: the grammar cannot be compiled.
        """
        return GrammarRow(kind, text, self._compiled(kind, text))

    def fill(self, rows: Sequence[GrammarRow | None]) -> GrammarMask | None:
        """The mask of a step, None if no row needs one.

        Args:
            rows: one per row of the logits, None for a row without a grammar.
        """
        filled = [
            (place, row)
            for place, row in enumerate(rows)
            if row is not None and not row.terminated
        ]
        if not filled:
            return None
        bitmask = xgrammar.allocate_token_bitmask(len(rows), self._vocab_size)
        for place, row in filled:
            row.fill(bitmask, place)
        return GrammarMask([place for place, _ in filled], bitmask, self._vocab_size)

    def _compile(self, kind: str, text: str) -> xgrammar.CompiledGrammar:
        if kind not in KINDS:
            raise ValueError(
                f"{kind!r} is no kind of grammar; give one of {', '.join(KINDS)}"
            )
        try:
            if kind == "regex":
                return self._compiler.compile_regex(text)
            if kind == "ebnf":
                return self._compiler.compile_grammar(text)
            if kind == "structural_tag":
                return self._compiler.compile_structural_tag(_structural_tag(text))
            if text == ANY_JSON:
                return self._compiler.compile_builtin_json_grammar()
            _refuse_ignored(json.loads(text))
            return self._compiler.compile_json_schema(text)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"the {_named(kind, text)} is invalid: {error}") from error


def _named(kind: str, text: str) -> str:
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    return f"{kind} {shown!r}"


def _refuse_ignored(schema: Any) -> None:
    """Refuse a JSON schema with a limit that answers would not be kept to.

    SGLang refuses the same.

    Raises:
        ValueError: names the limit and its place.
    """
    for place, part in _subschemas(schema, "#"):
        if ignored := sorted(_IGNORED_KEYWORDS & part.keys()):
            raise ValueError(
                f"{', '.join(ignored)} at {place} would be ignored; leave it out"
            )
        kinds = part.get("type", "string")
        if "string" not in (kinds if isinstance(kinds, list) else [kinds]):
            continue
        if "format" in part and part["format"] not in _KNOWN_FORMATS:
            raise ValueError(
                f"format {part['format']!r} at {place} would be ignored; "
                f"give one of {', '.join(sorted(_KNOWN_FORMATS))}, or a pattern"
            )
        limits = [names for names in _STRING_LIMITS if part.keys() & set(names)]
        if len(limits) > 1:
            shown = ", ".join("/".join(names) for names in limits)
            raise ValueError(f"only one of {shown} at {place} would count; keep one")


def _subschemas(schema: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and all in it, each with its JSON pointer."""
    if not isinstance(schema, dict):
        return
    yield place, schema
    for keyword, value in schema.items():
        inner: Iterable[tuple[str, Any]] = ()
        if isinstance(value, list) and keyword in _SCHEMAS_IN_LIST:
            inner = ((f"/{i}", part) for i, part in enumerate(value))
        elif isinstance(value, dict) and keyword in _SCHEMAS_BY_NAME:
            inner = ((f"/{name}", part) for name, part in value.items())
        elif isinstance(value, dict) and keyword in _SCHEMA_AT:
            inner = (("", value),)
        for name, part in inner:
            yield from _subschemas(part, f"{place}/{keyword}{name}")


def _structural_tag(text: str) -> str:
    """A tag as xgrammar reads it.

    Older tags have ``structures`` and ``triggers`` where newer ones have ``format``.
    In both, a schema that is missing allows any JSON value.
    """
    tag = json.loads(text)
    if not isinstance(tag, dict):
        raise ValueError("it is no JSON object")
    if tag.get("structures") is None:
        return json.dumps(_with_schemas(tag))
    tags = [
        {
            "type": "tag",
            "begin": structure["begin"],
            "content": {
                "type": "json_schema",
                "json_schema": structure.get("schema") or {},
            },
            "end": structure["end"],
        }
        for structure in tag["structures"]
    ]
    triggered = {
        "type": "triggered_tags",
        "triggers": tag["triggers"],
        "tags": tags,
        "at_least_one": tag.get("at_least_one", False),
    }
    return json.dumps({"type": "structural_tag", "format": triggered})


def _with_schemas(tag: Any) -> Any:
    """A part of a tag with an empty schema wherever one is missing."""
    if isinstance(tag, list):
        return [_with_schemas(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") in ("json_schema", "qwen_xml_parameter"):
        schema = tag.get("json_schema")
        return tag | {"json_schema": {} if schema is None else schema}
    return {name: _with_schemas(part) for name, part in tag.items()}
