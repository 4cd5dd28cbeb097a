"""Server arguments that ``--offline-batch`` implies, and the check of the model.

SGLang resolves its arguments once, in the main process and before it starts any
other; steps of that resolution may be wrapped.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.overrides import (
    declare_resolution,
    model_config_of,
    resolving_view,
)
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

from ..errors import ConfigError
from .support import CACHE_BACKEND, SET_BY_SGLANG, check_model, check_supported


def register() -> None:
    """Add our steps to SGLang's resolution of arguments (main process, once)."""
    register_resolution_hook("handle_missing_default_values")(_resolve)
    # Before it, SGLang has not yet failed on a model that we refuse; after it, the
    # model's own defaults are in force.
    register_resolution_hook("handle_model_specific_adjustments")(_check)


def _resolve(server_args: Any, previous: Any) -> None:
    previous(server_args)
    if not getattr(server_args, "offline_batch", False):
        return
    # Answers carry cached token counts, as OpenAI's do, and progress shows them.
    declare_resolution(server_args, "offline_batch", enable_cache_report=True)
    config = server_args.offline_config
    if config.scheduler == "offline":
        view = resolving_view(server_args)
        mixed = view.enable_mixed_chunk or config.mixed_chunk
        if mixed is None or config.mixed_chunk is None:
            mixed = view.enable_mixed_chunk or view.device != "cpu"
        declare_resolution(
            server_args,
            "offline_batch",
            radix_cache_backend=CACHE_BACKEND,
            enable_mixed_chunk=bool(mixed),
        )


def _check(server_args: Any, previous: Any) -> None:
    if (
        not getattr(server_args, "offline_batch", False)
        or server_args.offline_config.scheduler != "offline"
    ):
        previous(server_args)
        return
    try:
        check_model(model_config_of(server_args), hybrid_swa_disabled=True)
        previous(server_args)
        resolved = resolving_view(server_args)
        check_supported(
            {name: getattr(resolved, name) for name in SET_BY_SGLANG}, SET_BY_SGLANG
        )
        check_model(
            model_config_of(server_args),
            hybrid_swa_disabled=resolved.disable_hybrid_swa_memory,
        )
    except ConfigError as error:
        # A command ends with the sentence, without a traceback.
        if getattr(server_args, "_offline_from_cli", False):
            raise SystemExit(f"error: {error}") from error
        raise
