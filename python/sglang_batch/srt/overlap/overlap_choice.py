"""Whether a server splits mixed steps: by its settings, its model, and a trial.

The trial finds out which shapes of mixed steps are faster as two forwards at once. It runs
after CUDA graphs are captured, on free KV. Each shape runs as one forward, split, and in its
halves alone. The logits of both ways are compared first.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from sglang.srt.model_executor import forward_batch_info as info
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_parallel

from ...errors import EngineError
from ..compat.support import is_deterministic
from ..compat.tiers import keeps_states
from .batch_halves import HalfForwards, StreamedHalves, ThreadedHalves, split
from .overlap_table import MixedStep, OverlapTable, TrialCell
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


PROMPT_TOKENS = (2048, 1024, 512, 4096)
"""Prompt tokens of the shapes, in the order in which they are tried."""

DECODES = ((128, 2048), (32, 4096), (256, 1024))
"""Rows that decode and their KV tokens, which are halved until they fit."""

BUDGET_S = 10.0

_REPEATS = 2
_LEAST_CONTEXT = 64
_LONGEST_PROMPT = 1024
# A share is not tried for a shape that loses more than this without one.
_HOPELESS = -0.2
# Largest difference of logits over the largest logit, by the bytes of a number.
_TOLERANCE = {4: 1e-3, 2: 0.05}


class OverlapTrial:
    """Measures shapes on a server without requests.

    scheduler: SGLang's, whose KV is free.
    steps: splits the steps.
    clock: seconds, for the times and for the budget.
    """

    def __init__(
        self,
        scheduler: Any,
        steps: OverlappedSteps,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = scheduler.tp_worker.model_runner
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._step_tokens = int(
            scheduler.chunked_prefill_size or scheduler.max_prefill_tokens
        )
        self._max_rows = int(scheduler.max_running_requests)
        self._page_size = int(scheduler.page_size)
        self._steps = steps
        self._clock = clock

    def run(
        self,
        prompt_tokens: Sequence[int] = PROMPT_TOKENS,
        decodes: Sequence[tuple[int, int]] = DECODES,
        budget_s: float = BUDGET_S,
    ) -> OverlapTable:
        """Measure shapes that fit the server until the budget is used up, without limits of
        SMs first.

        Raises:
            EngineError: the logits of a split step are not those of one forward.
        """
        end = self._clock() + budget_s
        cells: list[TrialCell] = []
        first, *limits = self._steps.halves.shares
        for shape in self._shapes(prompt_tokens, decodes):
            if self._clock() > end:
                break
            cells.append(self._measure(shape, first))
        promising = sorted(cells, key=lambda cell: -cell.gain)
        for cell in promising:
            for share in limits:
                if cell.gain < _HOPELESS or self._clock() > end:
                    break
                shape = MixedStep(cell.prompt_tokens, cell.rows, cell.context)
                cells.append(self._measure(shape, share, of=cell))
        return OverlapTable(cells)

    def _shapes(
        self, prompt_tokens: Sequence[int], decodes: Sequence[tuple[int, int]]
    ) -> Iterator[MixedStep]:
        seen = set()
        for tokens in prompt_tokens:
            for wanted, context in decodes:
                num_prompts = -(-tokens // _LONGEST_PROMPT)
                rows = min(wanted, self._max_rows - num_prompts)
                while context > _LEAST_CONTEXT and not self._fits(
                    MixedStep(tokens, rows, context)
                ):
                    context //= 2
                shape = MixedStep(tokens, rows, context)
                if rows > 0 and self._fits(shape) and shape not in seen:
                    seen.add(shape)
                    yield shape

    def _fits(self, shape: MixedStep) -> bool:
        total = sum(map(self._in_pages, self._lengths(shape)))
        longest = self._runner.req_to_token_pool.req_to_token.shape[1]
        return (
            shape.prompt_tokens + shape.rows <= self._step_tokens + self._max_rows
            and shape.prompt_tokens <= self._step_tokens
            and max(self._lengths(shape)) <= longest
            and total <= self._allocator.available_size()
        )

    def _in_pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size) * self._page_size

    def _lengths(self, shape: MixedStep) -> list[int]:
        """KV tokens of each row, prompts first."""
        whole, rest = divmod(shape.prompt_tokens, _LONGEST_PROMPT)
        prompts = [_LONGEST_PROMPT] * whole + [rest] * bool(rest)
        return [*prompts, *[int(shape.context)] * shape.rows]

    # Measurements ---------------------------------------------------------------------

    def _measure(
        self, shape: MixedStep, share: int | None, of: TrialCell | None = None
    ) -> TrialCell:
        """One cell. Times that do not depend on the share are taken from ``of``."""
        lengths = self._lengths(shape)
        slots = self._allocator.alloc(sum(map(self._in_pages, lengths)))
        if slots is None:
            raise EngineError("no KV is free for the trial of split steps")
        try:
            return self._time(shape, share, self._batch(shape, lengths, slots), of)
        finally:
            self._runner.req_to_token_pool.req_to_token[1 : 1 + len(lengths)] = 0
            self._allocator.free(slots)

    def _time(
        self, shape: MixedStep, share: int | None, batch: Any, of: TrialCell | None
    ) -> TrialCell:
        runner, steps = self._runner, self._steps

        def fused() -> Any:
            return runner.forward(dataclasses.replace(batch)).logits_output

        def halves() -> Any:
            output = steps.split_forward(runner.forward, batch, shape.rows, share)
            return output.logits_output

        if of is None:
            self._compare(fused().next_token_logits, halves().next_token_logits)
            apart = split(batch, shape.rows, runner.kv_index_translator)
            alone = steps.halves.alone
            fused_s = self._seconds(fused)
            prompts_s = self._seconds(lambda: alone(runner.forward, apart.prompts))
            decodes_s = self._seconds(lambda: alone(runner.forward, apart.decodes))
        else:
            fused_s, prompts_s, decodes_s = of.fused_s, of.prompts_s, of.decodes_s
        return TrialCell(
            prompt_tokens=shape.prompt_tokens,
            rows=shape.rows,
            context=int(shape.context),
            sm_share=share,
            fused_s=fused_s,
            split_s=self._seconds(halves),
            prompts_s=prompts_s,
            decodes_s=decodes_s,
        )

    def _seconds(self, work: Callable[[], Any]) -> float:
        """The least of a few times, after a first run that is not counted."""
        times = []
        for _ in range(1 + _REPEATS):
            self._synchronize()
            begin = self._clock()
            work()
            self._synchronize()
            times.append(self._clock() - begin)
        return min(times[1:])

    def _synchronize(self) -> None:
        if self._runner.device == "cuda":
            torch.cuda.synchronize()

    def _compare(self, fused: torch.Tensor, halves: torch.Tensor) -> None:
        largest = float(fused.abs().max())
        difference = float((fused - halves).abs().max()) / max(largest, 1e-6)
        tolerance = _TOLERANCE.get(self._runner.dtype.itemsize, _TOLERANCE[2])
        if not difference <= tolerance:  # also if it is not a number
            raise EngineError(
                f"the logits of a split step differ from those of one forward by "
                f"{difference:.2g} of the largest"
            )

    # A batch --------------------------------------------------------------------------

    def _batch(
        self, shape: MixedStep, lengths: list[int], slots: torch.Tensor
    ) -> ForwardBatch:
        """A mixed batch over these KV slots, whose contents are as they were."""
        runner = self._runner
        device = slots.device
        num_rows, num_prompts = len(lengths), len(lengths) - shape.rows
        new = [*lengths[:num_prompts], *[1] * shape.rows]
        prefixes = [total - part for total, part in zip(lengths, new, strict=True)]
        table = runner.req_to_token_pool.req_to_token
        places, positions, at = [], [], 0
        for row, (total, prefix) in enumerate(zip(lengths, prefixes, strict=True), 1):
            own = slots[at : at + total]
            table[row, :total] = own.to(table.dtype)
            places.append(own[prefix:])
            positions.append(torch.arange(prefix, total, device=device))
            at += self._in_pages(total)
        num_tokens = sum(new)
        starts = [sum(new[:row]) for row in range(num_rows)]

        def int32(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        vocabulary = runner.model_config.vocab_size
        seq_lens_cpu = torch.tensor(lengths, dtype=torch.int64)
        seq_lens = seq_lens_cpu.to(device)
        rows = torch.arange(1, num_rows + 1, dtype=torch.int64)
        batch = ForwardBatch(
            forward_mode=info.ForwardMode.MIXED,
            batch_size=num_rows,
            input_ids=torch.arange(num_tokens, device=device) * 7919 % vocabulary,
            req_pool_indices=rows.to(device),
            req_pool_indices_cpu=rows,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens_cpu,
            orig_seq_lens=seq_lens.to(torch.int32),
            out_cache_loc=torch.cat(places).to(torch.int64),
            seq_lens_sum=sum(lengths),
            positions=torch.cat(positions),
            extend_num_tokens=num_tokens,
            extend_seq_lens=int32(new),
            extend_prefix_lens=int32(prefixes),
            extend_start_loc=int32(starts),
            extend_seq_lens_cpu=new,
            extend_prefix_lens_cpu=prefixes,
            spec_algorithm=runner.spec_algorithm,
            capture_hidden_mode=info.CaptureHiddenMode.NULL,
            contains_last_prefill_chunk=False,
        )
        if runner.model_config.model_is_mrope:
            batch.mrope_positions = batch.positions.expand(3, -1)
        translator = runner.kv_index_translator
        translator.own_plan(batch).bind(batch, translator)
        return batch
