"""Answers of SGLang to JSON schemas that are JSON."""

from __future__ import annotations

from typing import Any

from ....dense.grammar import JsonCompiler


def keep_to_json(_result: object, backend: Any, *_args: object, **_kw: object) -> None:
    """AFTER hook on ``XGrammarGrammarBackend.__init__``: its schemas are compiled by ours."""
    backend.grammar_compiler.__class__ = JsonCompiler
