"""Whether a server splits mixed steps: by its settings, its model, and a trial."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from ..compat.support import is_deterministic
from ..compat.tiers import keeps_states
from .batch_halves import HalfForwards, StreamedHalves, ThreadedHalves
from .overlap_table import OverlapTable
from .overlap_trial import OverlapTrial
from .overlapped_steps import OverlappedSteps

logger = logging.getLogger(__name__)

# SMs that prompts are limited to in a trial, besides no limit.
SM_SHARES = (72, 88, 104, 120)


def overlap_by_default(scheduler: Any) -> OverlappedSteps | None:
    """The splitting of a scheduler's mixed steps, or None if all run as one forward.

    scheduler: SGLang's, with its memory pools and CUDA graphs.
    """
    runner = scheduler.tp_worker.model_runner
    setting = runner.server_args.offline_config.overlap
    if setting == "off" or not scheduler.is_mixed_chunk:
        return None
    if setting == "auto" and runner.device != "cuda":
        return None
    reason = why_never(runner)
    if reason is not None:
        log = logger.warning if setting == "on" else logger.info
        log("Mixed steps run as one forward, because of %s.", reason)
        return None
    try:
        return _set_up(scheduler, trial=setting == "auto")
    except Exception:
        logger.exception("Mixed steps run as one forward: they could not be split.")
        return None


def _set_up(scheduler: Any, *, trial: bool) -> OverlappedSteps | None:
    runner = scheduler.tp_worker.model_runner
    steps = OverlappedSteps(runner, halves_of(runner, SM_SHARES if trial else ()))
    if not trial:
        logger.info("Mixed steps run as two forwards at the same time.")
        return steps
    try:
        table = OverlapTrial(scheduler, steps).run()
    except Exception:
        steps.follow(OverlapTable([]))
        raise
    steps.follow(table)
    on, tried = len(table.on), len({(c.prompt_tokens, c.rows) for c in table.cells})
    logger.info(
        "Trial of mixed steps as two forwards at the same time: %d of %d shapes are "
        "faster; exponent %.2f.", on, tried, table.exponent,
    )  # fmt: skip
    return steps


def halves_of(model_runner: Any, sm_shares: tuple[int, ...] = ()) -> HalfForwards:
    """What runs the halves of a step on this machine.

    sm_shares: limits of SMs for prompts to prepare, besides none.
    """
    if model_runner.device != "cuda":
        return ThreadedHalves(model_runner)
    from .step_lanes import lanes_by_share

    return StreamedHalves(model_runner, lanes_by_share(sm_shares))


# Names of the number of experts in configurations of models.
_RANKS = "several ranks, whose halves would need communicators of their own"
_MIXTURE = "a mixture of experts in 16 or 32 bits"
_TOKEN_DATA = "data that is returned for each token"
_PREPARED = "a model that prepares its batches"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def why_never(model_runner: Any) -> str | None:
    """Why no step of a server is split, or None if steps may be.

    model_runner: SGLang's, with its attention backend and pools.
    """
    arguments, model = model_runner.server_args, model_runner.model_config
    parallel = get_parallel()
    ranks = max(parallel.tp_size, parallel.pp_size, parallel.attn_dp_size)
    on_gpu = model_runner.device == "cuda"
    found = (
        (not model_runner.is_generation, "a model that does not decode"),
        (ranks > 1, _RANKS),
        (not on_gpu and model_runner.device != "cpu", f"a {model_runner.device}"),
        (on_gpu and torch.version.hip is not None, "ROCm, where nobody has tried it"),
        (not model_runner.spec_algorithm.is_none(), "drafts"),
        (model_runner.use_mla_backend, "latent attention"),
        (model.is_encoder_decoder, "an encoder-decoder model"),
        # A step that is run again after a fault would advance them twice.
        (keeps_states(model), "recurrent states"),
        (_is_unquantised_mixture(model_runner), _MIXTURE),
        (model_runner.lora_manager is not None, "adapters"),
        (is_deterministic(arguments), "deterministic inference"),
        (arguments.enable_torch_compile, "--enable-torch-compile"),
        (arguments.enable_two_batch_overlap, "--enable-two-batch-overlap"),
        (arguments.enable_pdmux, "--enable-pdmux"),
        (arguments.enable_return_routed_experts, _TOKEN_DATA),
        (arguments.enable_return_indexer_topk, _TOKEN_DATA),
        (model_runner.canary_manager is not None, "--kv-canary"),
        (model_runner.hisparse_coordinator is not None, "sparse attention"),
        (hasattr(model_runner.model, "prepare_forward_batch"), _PREPARED),
        (hasattr(model_runner.model, "prepare_for_forward"), _PREPARED),
        (on_gpu and _has_workspaces(model_runner.model), "kernels with one workspace"),
    )
    return next((reason for applies, reason in found if applies), None)


def _is_unquantised_mixture(model_runner: Any) -> bool:
    """Whether a second read of the weights, of most experts, costs more than it saves."""
    if model_runner.model_config.quantization:
        return False
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    config = model_runner.model_config.hf_text_config
    modules = model_runner.model.modules()
    return any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS) or any(
        isinstance(module, FusedMoE) for module in modules
    )


def _has_workspaces(model: Any) -> bool:
    """Whether layers keep scratch memory, which two forwards would share (Marlin)."""
    return any(
        isinstance(getattr(module, "workspace", None), torch.Tensor)
        for module in model.modules()
    )
