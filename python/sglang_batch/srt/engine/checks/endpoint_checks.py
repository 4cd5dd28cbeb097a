"""Refuses bodies that SGLang's endpoints take without doing as they are told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from .pattern_checks import TOKEN_LIMITS, check_literal
from .value_checks import FieldError

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


def check_parsed(url: str, parsed: BaseModel, tool_call_parser: str | None) -> None:
    """Refuse values that the endpoint's request class lets through.

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
    if url == RESPONSES_URL:
        _check_metadata(getattr(parsed, "metadata", None) or {})
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


def _check_metadata(metadata: Mapping[str, object]) -> None:
    """Refuse what an answer, which repeats them, must not have among its metadata."""
    for name, value in metadata.items():
        if not isinstance(value, str):
            raise FieldError(
                "metadata", f"the value of {name[:100]!r} is not text", "invalid_type"
            )


def _forces_a_tool(parsed: BaseModel) -> bool:
    """Whether an answer must call one of the given tools."""
    fields = parsed.model_dump(include={"tool_choice", "tools"})
    choice, tools = fields.get("tool_choice"), fields.get("tools") or []
    if not isinstance(choice, dict):
        return bool(tools) and choice == "required"
    if choice.get("type") == "any":
        return bool(tools)
    # Each API has its own place for the name. SGLang refuses names of no tool.
    wanted = choice.get("name") or (choice.get("function") or {}).get("name")
    names = [t.get("name") or (t.get("function") or {}).get("name") for t in tools]
    return wanted is not None and wanted in names
