"""Sliding windows: cached share, prompt tokens computed and answers, ours and stock."""

from __future__ import annotations

from report import Figure

from .jobs import figures_of

# The first has a pool of its own for its windows, the second one pool for all layers.
MODELS = ("gpt_oss", "gemma3_text")


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part."""
    models = MODELS[:1] if quick else MODELS
    return [figure for model in models for figure in figures_of(model, quick)]
