"""Recurrent states: cached share, prompt tokens computed and answers, ours and stock."""

from __future__ import annotations

from report import Figure

from .jobs import figures_of

# Gated delta nets with and without experts, Kimi Delta Attention, and Mamba-2.
MODELS = ("qwen3_next", "qwen3_5_text", "kimi_linear", "granitemoehybrid")


def measure(quick: bool = False) -> list[Figure]:
    """The figures of this part."""
    models = MODELS[:1] if quick else MODELS
    return [figure for model in models for figure in figures_of(model, quick)]
