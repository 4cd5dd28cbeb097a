"""Server arguments that ``--offline-batch`` implies, and the check of the model.

SGLang resolves its arguments once, in the main process, before it starts any other
process. The steps of this resolution can be wrapped.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from sglang.srt.arg_groups import overrides
from sglang.srt.arg_groups.overrides import model_config_of, resolving_view
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.runtime_context import attn_dp_enabled_of

from ...errors import ConfigError, ExitStatus
from ...planner.choosing.ways import MOST_GRAPH_ROWS
from ..compat import support, tiers
from ..compat.offline_hooks import is_offline
from ..engine.cpu_defaults import set_cpu_defaults
from ..engine.environment import forget_defaults, set_default

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

# Python's thresholds are for programs with few objects. A job keeps thousands of requests,
# and each search for cycles looks at all of them.
GC_THRESHOLD = [20_000, 20, 50]
# The process's own, while there is an offline engine with ours.
_gc_before: tuple[int, int, int] | None = None

ResolutionStep: TypeAlias = Callable[["ServerArgs"], object]
"""A step of SGLang's resolution of arguments."""


def register() -> None:
    """Add our steps to SGLang's resolution of arguments (main process, once)."""
    _register("handle_missing_default_values", _resolve)
    # Before this step, SGLang has not yet failed on a model that we refuse. After it,
    # the model's own defaults apply.
    _register("handle_model_specific_adjustments", _check)
    _register("handle_deterministic_inference", _check_deterministic)


def _register(name: str, step: Callable[[ServerArgs, ResolutionStep], None]) -> None:

    def ours(server_args: ServerArgs, previous: ResolutionStep) -> None:
        if is_offline(server_args):
            step(server_args, previous)
        else:
            previous(server_args)

    register_resolution_hook(name)(ours)


def _declare(server_args: ServerArgs, **fields: Any) -> None:
    overrides.declare_resolution(server_args, "offline_batch", **fields)


def undo(_result: None, engine: Any) -> None:
    """AFTER hook on ``Engine.shutdown``: garbage and environment are as they were before."""
    global _gc_before
    forget_defaults()
    if _gc_before is not None:
        gc.set_threshold(*_gc_before)
        _gc_before = None


def _resolve(server_args: ServerArgs, previous: ResolutionStep) -> None:
    global _gc_before
    previous(server_args)
    # Answers include counts of cached tokens, like OpenAI's, and progress shows them.
    _declare(server_args, enable_cache_report=True)
    config = server_args.offline_config
    view = resolving_view(server_args)
    if config.sleep_on_idle:
        _declare(server_args, sleep_on_idle=True)
    if view.gc_threshold is None:
        # Which SGLang sets for the process.
        _gc_before = _gc_before or gc.get_threshold()
        _declare(server_args, gc_threshold=GC_THRESHOLD)
    mode = view.disaggregation_mode
    if (
        mode == "decode"
        and (view.device == "cpu" or config.scheduler == "offline")
        and view.disaggregation_decode_retraction_backup is None
        and view.disaggregation_decode_host_receive_threshold == 1
    ):
        # SGLang would choose a pool of pinned memory, for which it needs CUDA, and which
        # offloading has no use for.
        _declare(server_args, disaggregation_decode_retraction_backup="cpu_tensor")
    if config.scheduler == "offline":
        mixed = view.enable_mixed_chunk or config.mixed_chunk
        if config.mixed_chunk is None and not support.is_deterministic(view):
            wanted = view.device != "cpu" or config.overlap == "on"
            mixed = view.enable_mixed_chunk or wanted
        if mode != "null" or view.speculative_algorithm:
            mixed = False  # there are no decodes to mix prompts with, or only drafts
        _declare(
            server_args,
            radix_cache_backend=support.CACHE_BACKEND,
            enable_mixed_chunk=bool(mixed),
            # SGLang's copies KV that the plan does not need. Ours takes its sizes.
            enable_hierarchical_cache=False,
        )
        if (rows := _graph_rows(view)) is not None:
            _declare(server_args, cuda_graph_max_bs_decode=rows)


def _graph_rows(view: ServerArgs) -> int | None:
    """Rows of the largest decode CUDA graph: as many as may run.

    SGLang's default stops at 256 or 512. None where it is right, or the graphs are given.
    """
    given = (
        view.cuda_graph_max_bs_decode,
        view.cuda_graph_bs_decode,
        view.cuda_graph_config,
    )
    if view.device == "cpu" or view.max_running_requests is None or any(given):
        return None
    # SGLang divides the limit among attention ranks, which have an old and a new name.
    ranks = int(view.attn_dp_size or 1)
    if view.enable_dp_attention:
        ranks = max(ranks, int(view.dp_size))
    return min(max(1, int(view.max_running_requests) // ranks), MOST_GRAPH_ROWS)


def _check(server_args: ServerArgs, previous: ResolutionStep) -> None:
    with _said_in_one_line(server_args):
        support.check_on_cpu(resolving_view(server_args))
        if server_args.offline_config.scheduler == "offline":
            _check_model(server_args, previous)
        else:
            previous(server_args)
    if resolving_view(server_args).enable_strict_thinking:
        # If it is set, SGLang keeps to budgets also with parsers that exclude no tokens.
        set_default("SGLANG_MAX_THINK_TOKENS", str(2**31 - 1))
    set_cpu_defaults(server_args)


def _check_deterministic(server_args: ServerArgs, previous: ResolutionStep) -> None:
    previous(server_args)
    config, view = server_args.offline_config, resolving_view(server_args)
    if config.scheduler == "offline" and support.is_deterministic(view):
        with _said_in_one_line(server_args):
            support.check_deterministic(view, config)


@contextmanager
def _said_in_one_line(server_args: ServerArgs) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        # A command ends with the message, without a traceback.
        if getattr(server_args, "_offline_from_cli", False):
            # Below all that SGLang still prints while it ends.
            atexit.register(print, f"error: {error}", file=sys.stderr)
            raise SystemExit(ExitStatus.BAD_INPUT) from error
        raise


def _check_model(server_args: ServerArgs, previous: ResolutionStep) -> None:
    tiers.check_model(model_config_of(server_args), hybrid_swa_disabled=True)
    if tiers.keeps_states(model_config_of(server_args)):
        # States are kept wherever a prompt is cut, and not at multiples of a few dozen
        # tokens, where hardly a prefix ends.
        view = resolving_view(server_args)
        check_states_anywhere(view.mamba_radix_cache_strategy, view.page_size)
        _declare(
            server_args,
            mamba_radix_cache_strategy="no_buffer",
            disable_overlap_schedule=True,
        )
    previous(server_args)
    resolved = resolving_view(server_args)
    support.check_supported(
        {name: getattr(resolved, name) for name in support.SET_BY_SGLANG}
    )
    tier = tiers.check_model(
        model_config_of(server_args),
        hybrid_swa_disabled=resolved.disable_hybrid_swa_memory,
    )
    if resolved.disaggregation_mode == "prefill":
        tiers.check_sent_whole(tier.without_offloading(*support.found_limits(resolved)))
    if drafts := resolved.speculative_algorithm:
        configs = [model_config_of(server_args)]
        if path := resolved.speculative_draft_model_path:
            from sglang.srt.configs.model_config import ModelConfig

            draft = ModelConfig.from_server_args(
                server_args,
                model_path=path,
                model_revision=resolved.speculative_draft_model_revision,
                is_draft_model=True,
                context_length=configs[0].context_len,
            )
            configs.append(draft)
        tiers.check_drafts(
            configs,
            drafts,
            resolved.pp_size,
            attention_dp=attn_dp_enabled_of(resolved),
        )


def check_states_anywhere(strategy: str, page_size: int | None) -> None:
    """Refuse flags with which states are not kept at any token.

    Raises:
        ConfigError: names the flag and the way out.
    """
    wrong = ""
    if strategy not in ("auto", "no_buffer"):
        wrong = f"--mamba-radix-cache-strategy {strategy}"
    elif page_size not in (None, 1):
        wrong = f"--page-size {page_size}"
    if wrong:
        raise ConfigError(
            f"{wrong} does not work with the offline scheduler and a model with recurrent "
            f"layers, whose states are kept at the token where a prefix ends; drop it, or "
            f"give {support.STOCK_SCHEDULER}."
        )
