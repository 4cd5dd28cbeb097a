"""Grammars are compiled before an engine starts, by xgrammar, as in SGLang's scheduler.

That is in a process without torch, which takes a third of a second. A grammar that ends it
ends nothing else.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from .pattern_checks import objects_of
from .value_checks import SAMPLING_FIELDS, FieldError, check_value

GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
# So many different ones are compiled beforehand. A file can have one for each line.
MOST_COMPILED = 8
# The engine judges a grammar that takes longer.
COMPILE_S = 30
# By kind and text, what is wrong with each that was compiled.
FAULTS: dict[tuple[str, str], str | None] = {}
# SGLang's schema for ``json_object``, which needs no check.
_ANY_OBJECT = '{"type": "object"}'
# Where the compiler's messages come from, such as "[12:56:31] /project/cpp/regex.cc:83: ".
_ORIGIN = re.compile(r"^\[[\d:]+\] \S+: ")


def check_grammars(params: Mapping[str, Any], compiles: bool) -> None:
    """Refuse grammars among sampling parameters, by SGLang's names.

    ``compiles`` says whether the engine compiles them with xgrammar. Raises FieldError.
    """
    given = [kind for kind in GRAMMARS if params.get(kind) is not None]
    if len(given) > 1:
        raise FieldError(given[0], f"an answer has one grammar; drop {given[1]}")
    for kind in given:
        text = params[kind]
        if text != _ANY_OBJECT:
            check_value(kind, text, SAMPLING_FIELDS[kind])
            if compiles and (problem := grammar_fault(kind, text)):
                raise FieldError(kind, problem)


def grammar_fault(kind: str, text: str) -> str | None:
    """Why xgrammar does not compile a grammar. None if it does, or was not asked."""
    key = kind, text
    if key not in FAULTS and len(FAULTS) < MOST_COMPILED:
        FAULTS[key] = _compiled_apart(kind, text)
    return FAULTS.get(key)


def _compiled_apart(kind: str, text: str) -> str | None:
    command = [sys.executable, "-m", __name__, kind]
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=COMPILE_S
        )
    except subprocess.TimeoutExpired:
        return None
    ended = "it ends the compiler of grammars" if done.returncode < 0 else None
    return _ORIGIN.sub("", done.stdout).strip() or ended


def _compile(kind: str, text: str) -> None:
    """Compile as SGLang's ``XGrammarGrammarBackend`` does, without a vocabulary."""
    for name in ("sglang", "xgrammar"):
        sys.modules[name] = empty_package(name)
    sys.modules["torch"] = None  # type: ignore[assignment]  # absent
    schemas = import_module("sglang.srt.constrained.json_schema_validation")
    import_module("xgrammar.load_binding")
    grammar = import_module("xgrammar.grammar").Grammar
    if kind in ("regex", "ebnf"):
        getattr(grammar, f"from_{kind}")(text)
        return
    value = json.loads(text)
    for ref in [each.get("$ref") for each in objects_of(value)]:
        if isinstance(ref, str) and not ref.startswith("#"):
            raise ValueError(f"$ref {ref!r} leads out of the schema")
    if kind == "json_schema":
        schemas.validate_xgrammar_json_schema(value)
        grammar.from_json_schema(text)
    elif "structures" not in value:
        grammar.from_structural_tag(text)
    else:  # the form before xgrammar's
        for each in value["structures"]:
            grammar.from_json_schema(json.dumps(each["schema"] or {}))


def empty_package(name: str) -> ModuleType:
    """A package whose modules can be imported without its ``__init__``."""
    spec = find_spec(name)
    assert spec is not None, f"{name} is a dependency"
    package = ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations or ())
    package.__spec__ = spec
    return package


if __name__ == "__main__":
    try:
        _compile(sys.argv[1], sys.stdin.read())
    except Exception as error:
        print(str(error) or type(error).__name__)
