"""Server arguments that ``--offline-batch`` implies."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook


def register() -> None:
    """Add our step to SGLang's resolution of arguments (main process, once)."""
    register_resolution_hook("handle_missing_default_values")(_resolve)


def _resolve(server_args: Any, previous: Any) -> None:
    previous(server_args)
    if not getattr(server_args, "offline_batch", False):
        return
    # Answers carry cached token counts, as OpenAI's do, and progress shows them.
    declare_resolution(server_args, "offline_batch", enable_cache_report=True)
