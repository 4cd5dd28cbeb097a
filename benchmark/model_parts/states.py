"""Recurrent states: cached share, prompt tokens computed and answers, ours and stock."""

from __future__ import annotations

from report import Figure

from .jobs import figures_of

MODELS = ("qwen3_next",)


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part."""
    return [figure for model in MODELS for figure in figures_of(model, quick)]
