"""Checks of a request's body that need neither an engine nor torch.

SGLang's request classes are pydantic models. Importing any module of SGLang runs
``sglang/__init__.py``, which takes seconds for torch and all its libraries, and the
classes use none of it. So they are imported below an empty ``sglang`` package here, in a
second, and a file can be checked in full before SGLang is imported.
"""

from __future__ import annotations

import difflib
import json
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from ....batch_api import protocol as api
from ....batch_api.lines import UNKNOWN_MODEL, ModelLimits, loads_lenient
from ...compat.server_types import JsonObject
from ..transcriptions import TranscriptionBody
from . import value_checks as checks
from .grammar_checks import check_grammars, empty_package
from .pattern_checks import TOKEN_LIMITS, check_literal
from .stop_rule_checks import take_rules
from .value_checks import FieldError, OfTokens, Rule

MESSAGES_URL = "/v1/messages"
_OTHER_MAX_TOKENS = ("max_completion_tokens", "max_output_tokens")
# Packages whose modules the request classes import, and which import torch.
_SLOW_PACKAGES = ("sglang", "xgrammar")
_PROMPTS = frozenset({"messages", "prompt", "input"})
# The other fields of the last body without errors: those of the next are mostly the same.
_last_sound: list[tuple[str, bool, ModelLimits, str]] = []
_Parsed = TypeVar("_Parsed", bound=BaseModel)
# Choices of one of the tools of a request. Others are of tools of a server.
_TOOLS = ("function", "custom", "tool")
# Fields that tell which member of a union a value is.
_TAGS = ("role", "type")
_TYPES = frozenset({"str", "int", "float", "bool", "list", "dict", "none"})


def request_classes() -> dict[str, type[BaseModel]]:
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from sglang.srt.entrypoints.openai import protocol

    return {
        "/v1/chat/completions": protocol.ChatCompletionRequest,
        "/v1/completions": protocol.CompletionRequest,
        "/v1/embeddings": protocol.EmbeddingRequest,
        "/v1/responses": protocol.ResponsesRequest,
        MESSAGES_URL: AnthropicMessagesRequest,
        "/v1/score": protocol.ScoringRequest,
        "/v1/rerank": protocol.V1RerankReqInput,
        "/v1/classify": protocol.ClassifyRequest,
        api.TRANSCRIPTIONS_URL: TranscriptionBody,
    }


def parse_body(body: bytes) -> JsonObject:
    """The JSON object of a body.

    Raises:
        ValueError: it is not one, or has text that UTF-8 cannot encode.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = loads_lenient(body)
        checks.check_text(value)
    if not isinstance(value, dict):
        raise ValueError("The body of a request must be a JSON object.")
    return value


def without_nulls(body: JsonObject) -> JsonObject:
    """A body without the fields that are null: some clients send null for a field that is not set."""
    return {name: value for name, value in body.items() if value is not None}


def validated(kind: type[_Parsed], body: JsonObject) -> _Parsed:
    """A body as an endpoint's request class.

    A null is as good as nothing, within the body, too, where the class has a default. Of a
    required field it is refused as a null, not as a field that is missing.
    ``max_tokens`` of a completion may be 0, which SGLang's class refuses: a prompt whose
    log probabilities are echoed needs no answer.

    Raises:
        ValidationError: the class does not take the body.
        FieldError: the class fails at it.
    """
    fields = kind.model_fields
    required = {name for name, field in fields.items() if field.is_required()}
    body = {k: v for k, v in body.items() if v is not None or k in required}
    form = body.get("response_format")
    if isinstance(form, dict) and not form.keys() & {"type", "format"}:
        raise FieldError("response_format", "it has no type, such as json_schema")
    limit = body.get("max_tokens")
    scores = "prompt" in kind.model_fields and type(limit) is int and limit == 0
    if scores:
        del body["max_tokens"]
    parsed = _validated(kind, body)
    if scores:
        vars(parsed)["max_tokens"] = 0
    return parsed


def _validated(kind: type[_Parsed], body: JsonObject) -> _Parsed:
    try:
        return kind.model_validate(body)
    except AttributeError:
        # SGLang looks for a schema in this field before it has checked it.
        if "response_format" not in body:
            raise
        problem = "it must be an object, and so must its schema"
        raise FieldError("response_format", problem, "invalid_type") from None
    except ValidationError as error:
        fewer = _without_refused_nulls(body, error)
        if fewer is None:
            raise
        try:
            return _validated(kind, fewer)
        except ValidationError:
            raise error from None


def _without_refused_nulls(
    body: JsonObject, error: ValidationError
) -> JsonObject | None:
    """A copy without the nulls that the error names, or None if it names none."""
    copied, dropped = deepcopy(body), False
    for each in error.errors(include_url=False, include_context=False):
        if each["input"] is not None:
            continue
        inner: Any = copied
        *outer, last = _places(copied, each["loc"]) or (None,)
        for part in outer:
            inner = inner[part]
        if isinstance(inner, dict) and last in inner:
            del inner[last]
            dropped = True
    return copied if dropped else None


def _places(value: Any, loc: tuple[int | str, ...]) -> list[int | str]:
    """The keys and indices of a location that lead to a null; the others are of unions."""
    found: list[int | str] = []
    for part in loc:
        known = (isinstance(value, dict) and part in value) or (
            isinstance(value, list) and isinstance(part, int) and part < len(value)
        )
        if known:
            found.append(part)
            value = value[part]
    return found if value is None else []


def body_errors(
    url: str,
    body: bytes,
    *,
    compiles: bool = False,
    limits: ModelLimits = UNKNOWN_MODEL,
) -> list[tuple[str, str | None]]:
    """The errors of a body, each as (message, param): the first of each field.

    A body need not name a model. Where it must, the checks of lines find that.
    ``compiles`` says whether the engine will compile grammars with xgrammar.
    """
    try:
        value = parse_body(body)
    except ValueError as error:
        return [(str(error), "body")]
    if value.get("model") is None:
        value["model"] = "any"  # a job does so too, with its own
    found: dict[str, str] = {}
    try:
        take_rules(url, value)
    except FieldError as error:
        found[error.param] = str(error)
    try:
        parsed = validated(_checked_classes()[url], value)
    except ValidationError as error:
        return [*errors_by_field(error), *((text, at) for at, text in found.items())]
    except FieldError as error:
        return [(str(error), error.param)]
    for name, rule in _numbers().items():
        if (number := vars(parsed).get(name)) is not None:
            try:
                checks.check_value(name, number, rule, limits.vocab_size)
            except FieldError as error:
                found[error.param] = str(error)
    try:
        # SGLang chooses a parser of tool calls for some models, once it is imported.
        check_parsed(url, parsed, "unknown", limits)
        others = {name: each for name, each in value.items() if name not in _PROMPTS}
        key = (url, compiles, limits, json.dumps(others))
        if not found and _last_sound != [key]:
            if wrong := api.wrong_budget(url, value):
                raise FieldError(*wrong)
            _check_names(parsed, value)
            if getattr(parsed, "messages", None) == []:
                raise FieldError("messages", "there are none")
            if url in _OPENAI[:2]:
                check_grammars(_sampling_of(parsed), compiles)
            _last_sound[:] = [key]
    except FieldError as error:
        error = error.as_sent(value)
        found.setdefault(error.param, str(error))
    return [(message, param) for param, message in found.items()]


@cache
def _numbers() -> dict[str, Rule]:
    kinds = checks.Whole | checks.Real | checks.OfTokens
    numbers: dict[str, Rule] = {
        checks.OPENAI_NAMES.get(name, name): rule
        for name, rule in checks.SAMPLING_FIELDS.items()
        if isinstance(rule, kinds)
    }
    numbers["top_logprobs"] = OfTokens.COUNT
    numbers["label_token_ids"] = OfTokens.IDS
    return numbers | dict.fromkeys(_OTHER_MAX_TOKENS, numbers["max_tokens"])


def _check_names(parsed: BaseModel, body: JsonObject) -> None:
    """Refuse fields that SGLang would not look at, where it is plain which was meant.

    Those of other servers stay, such as Anthropic's ``speed``, which is not far from ``seed``.
    """
    known = type(parsed).model_fields
    names = {*known, *(field.alias for field in known.values() if field.alias)}
    for name in body.keys() - names:
        absent = sorted(names - body.keys())
        close = difflib.get_close_matches(name, absent, n=1, cutoff=0.9)
        if meant := checks.OPENAI_NAMES.get(name) or "".join(close):
            problem = f"there is no such field. Did you mean {meant!r}?"
            raise FieldError(name, problem)
    choice = _chosen_tool(body)
    if choice is not None and "tools" not in str(
        body.get("messages")
    ):  # they may be there
        there = [_named(tool) for tool in body.get("tools") or ()]
        if choice not in there:
            problem = f"{choice!r} is none of the tools {there}"
            raise FieldError("tool_choice", problem)
    if getattr(parsed, "top_logprobs", None) and not getattr(parsed, "logprobs", True):
        raise FieldError("top_logprobs", "it has no effect without logprobs: true")


def _chosen_tool(body: JsonObject) -> str | None:
    """The name of a tool of the request that must be called, in the form of any endpoint."""
    choice = body.get("tool_choice")
    if not isinstance(choice, dict) or "namespace" in choice:
        return None
    return _named(choice) if choice.get("type", "function") in _TOOLS else None


def _named(tool: JsonObject) -> str | None:
    inner = tool.get("function", tool)
    return inner.get("name") if isinstance(inner, dict) else None


def _sampling_of(parsed: Any) -> dict[str, Any]:
    """The sampling parameters that SGLang's serving class makes of a body, by its names."""
    form = parsed.response_format
    if getattr(form, "type", "") == "json_schema" and (
        form.json_schema is None or form.json_schema.schema_ is None
    ):
        problem = "it has no schema, which belongs in json_schema.schema"
        raise FieldError("response_format", problem)
    chat = _checked_classes()["/v1/chat/completions"]
    fields = {**vars(parsed), "messages": []}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of max_tokens
        made: Any = chat.model_construct(**fields)
        found: dict[str, Any] = made.to_sampling_params([], {})
    schema = fields.get("json_schema")
    return found if schema is None else found | {"json_schema": schema}


def errors_by_field(error: ValidationError) -> list[tuple[str, str | None]]:
    """Of each field the error to tell: its message and the ``body.`` path of the value."""
    fields: dict[object, list[Any]] = {}
    for each in error.errors(include_url=False, include_context=False):
        fields.setdefault(each["loc"][0] if each["loc"] else None, []).append(each)
    return [_described(_closest(errors, 0)) for errors in fields.values()]


def _closest(errors: list[Any], at: int) -> Any:
    """The error to tell of several that share the first parts of their locations.

    A value that fits no member of a union has an error for each of them. It is meant to
    be the one whose tag it has, and of several the one of which more was understood.
    """
    parts: dict[object, list[Any]] = {}
    for each in errors:
        part = each["loc"][at] if at < len(each["loc"]) else None
        parts.setdefault(part, []).append(each)
    if None in parts:
        return parts[None][0]
    if not any(_is_member(part) for part in parts):
        return _closest(next(iter(parts.values())), at + 1)
    by_part = {
        part: (_distance(each, at), part != "str") for part, each in parts.items()
    }
    nearest = parts[min(by_part, key=by_part.__getitem__)]
    if not _distance(nearest, at)[0]:
        return _closest(nearest, at + 1)
    # It is none of them. Each says which tag it has.
    tags = [each for each in errors if _is_tag(each, at)]
    said = dict.fromkeys(each["msg"].rstrip(".") for each in tags)
    return {**tags[0], "msg": "; or ".join(said)}


def _distance(errors: list[Any], at: int) -> tuple[bool, int]:
    """How far a value is from a member of a union with these errors."""
    depths = [len(_keys(each["loc"][at:])) for each in errors]
    return any(_is_tag(each, at) for each in errors), -max(depths)


def _is_tag(error: Any, at: int) -> bool:
    keys = _keys(error["loc"][at:])
    return len(keys) == 1 and keys[0] in _TAGS


def _keys(loc: Iterable[object]) -> list[object]:
    return [part for part in loc if not _is_member(part)]


def _is_member(part: object) -> bool:
    """Whether a part of a location names a type, and no key or index of the body."""
    if not isinstance(part, str):
        return False
    return part in _TYPES or not part.isidentifier() or part[0].isupper()


def _described(each: Any) -> tuple[str, str | None]:
    path = ".".join(map(str, _keys(each["loc"])))
    where = f"body.{path}" if path else "body"
    given = "it is null. " * (each["input"] is None)
    return f"Invalid value for '{where}': {given}{each['msg'].rstrip('.')}.", where


@cache
def _checked_classes() -> dict[str, type[BaseModel]]:
    with nullcontext() if "sglang" in sys.modules else _empty_packages():
        return request_classes()


@contextmanager
def _empty_packages() -> Iterator[None]:
    """SGLang's modules can be imported, but the slow packages among them are empty.

    Afterwards they have other names, so that a later import is a complete one.
    """
    made = [name for name in _SLOW_PACKAGES if name not in sys.modules]
    sys.modules.update({name: empty_package(name) for name in made})
    if "xgrammar" in made:
        tags = import_module("xgrammar.structural_tag")
        vars(sys.modules["xgrammar"])["StructuralTag"] = tags.StructuralTag
    try:
        yield
    finally:
        for name in [each for each in sys.modules if each.split(".")[0] in made]:
            _rename(sys.modules.pop(name), f"bare_{name}")


def _rename(module: ModuleType, name: str) -> None:
    """Give a module another name, also for its classes, which look up annotations there."""
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ == module.__name__:
            value.__module__ = name
    sys.modules[name] = module


# OpenAI's highest temperature. SGLang's own endpoint has none.
MAX_TEMPERATURE = 2
RESPONSES_URL = "/v1/responses"
_OPENAI = ("/v1/chat/completions", "/v1/completions", RESPONSES_URL)
# Arguments of the tokenizer's function that a template is no part of. A template of the
# client's may never end.
_RESERVED = frozenset(
    {
        *("chat_template", "conversation", "messages", "tools", "documents"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "padding"),
        *("truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)


def check_parsed(
    url: str, parsed: BaseModel, tool_call_parser: str | None, limits: ModelLimits
) -> None:
    """Refuse values that the endpoint's request class lets through, but not the model.

    Raises:
        FieldError: names the first one.
    """
    for name, value in vars(parsed).items():
        # Of a completion no new tokens may be wanted, only its prompt's probabilities.
        if url == "/v1/completions" and name in TOKEN_LIMITS:
            continue
        if problem := check_literal(name, value):
            raise FieldError(name, problem)
    temperature = getattr(parsed, "temperature", None)
    if url in _OPENAI and temperature is not None and temperature > MAX_TEMPERATURE:
        raise FieldError(
            "temperature",
            f"{temperature:g} is above {MAX_TEMPERATURE}, the highest",
            "decimal_above_max_value",
        )
    names = ("max_tokens", *_OTHER_MAX_TOKENS)
    given = [limit for name in names if (limit := vars(parsed).get(name))]
    least = vars(parsed).get("min_tokens")
    if least and given and least > max(given):
        raise FieldError("min_tokens", f"{least} is more than the limit, {max(given)}")
    _check_by_model(parsed, limits)
    if url == RESPONSES_URL:  # whose answers repeat it
        for name, value in (getattr(parsed, "metadata", None) or {}).items():
            if not isinstance(value, str):
                problem = f"the value of {name[:100]!r} is not text"
                raise FieldError("metadata", problem, "invalid_type")
    for name in getattr(parsed, "chat_template_kwargs", None) or ():
        if name in _RESERVED:
            raise FieldError(
                "chat_template_kwargs",
                f"{name!r} is not a variable of the template, but an argument of the "
                "tokenizer, which is the server's",
            )
    if tool_call_parser is None and _forces_a_tool(parsed):
        raise FieldError(
            "tool_choice",
            "a call of a tool can be required only of a server with "
            "--tool-call-parser, which this one was launched without",
        )


def _check_by_model(parsed: BaseModel, limits: ModelLimits) -> None:
    fields = vars(parsed)
    for name in (*TOKEN_LIMITS, "min_tokens"):
        if (fields.get(name) or 0) >= (limits.context_len or math.inf):
            most = f"the model's context length of {limits.context_len} tokens"
            problem = f"{fields[name]} and a prompt exceed {most}"
            raise FieldError(name, problem, "context_length_exceeded")
    for name in ("prompt", "input"):
        first = value = fields.get(name)
        while isinstance(first, list) and first:
            first = first[0]
        if type(first) is int:
            checks.check_value(name, value, OfTokens.IDS, limits.vocab_size)
    named = fields.get("lora_path") or []
    base, model = f"{limits.model}:", str(fields.get("model"))
    if limits.model and model.startswith(base):
        named = model.removeprefix(base)
    for name in [named] if isinstance(named, str) else filter(None, named):
        if limits.adapters is not None and name not in limits.adapters:
            there = ", ".join(sorted(limits.adapters)) or "none"
            problem = f"there is no LoRA adapter {name!r}; --lora-paths names {there}"
            raise FieldError("lora_path", problem)


def check_native(body: Mapping[str, Any]) -> None:
    """Refuse empty values in a line of ``/generate`` that SGLang takes as they are.

    Only in lines, of which there are many. Calls of SGLang's own API are answered as ever.

    Raises:
        FieldError: names the first one.
    """
    given = body.get("sampling_params")
    for params in given if isinstance(given, list) else [given]:
        if not isinstance(params, dict):
            continue  # the request class refuses it
        for name, value in params.items():
            if problem := check_literal(name, value):
                raise FieldError(f"sampling_params.{name}", problem)


def _forces_a_tool(parsed: BaseModel) -> bool:
    fields = parsed.model_dump(include={"tool_choice", "tools"})
    choice, tools = fields.get("tool_choice"), fields.get("tools") or []
    if not isinstance(choice, dict):
        return bool(tools) and choice == "required"
    if choice.get("type") == "any":
        return bool(tools)

    def name_of(tool: JsonObject) -> object:  # each API has its own place for it
        return tool.get("name") or (tool.get("function") or {}).get("name")

    # SGLang refuses names of no tool.
    wanted = name_of(choice)
    return wanted is not None and wanted in map(name_of, tools)
