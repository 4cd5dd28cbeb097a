"""A mixed batch as two batches that run at the same time, and their logits as those of one.

The rows of a mixed batch are those of prompts, in front, and those that decode. A row with one
new token may also be a prompt. On a CPU the halves run in two threads, on a GPU on two streams.
The prompts have an attention backend of their own, since each keeps its preparations for a
forward until the next one.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import torch
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor import forward_batch_info as info
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_model

from .step_lanes import CudaLanes, run_in_lanes

# Fields of ForwardBatch. ``[num_tokens]``:
_OF_TOKENS = ("input_ids", "positions", "out_cache_loc")
# ``[num_rows]``, or lists of that length:
_OF_ROWS = (
    "req_pool_indices", "req_pool_indices_cpu", "seq_lens", "seq_lens_cpu",
    "orig_seq_lens", "top_logprobs_nums", "token_ids_logprobs", "rids",
)  # fmt: skip
# Of the rows of an extend, which decodes do not have.
_OF_EXTENDS = (
    "extend_seq_lens", "extend_prefix_lens", "extend_start_loc",
    "extend_prefix_lens_cpu", "extend_seq_lens_cpu", "extend_logprob_start_lens_cpu",
)  # fmt: skip
# Made anew for each half.
_MADE = (
    "forward_mode", "batch_size", "seq_lens_sum", "extend_num_tokens",
    "kv_loc_plan", "kv_loc_cols", "out_cache_loc_is_physical", "mrope_positions",
    "global_num_token_non_padded_cpu",
)  # fmt: skip
# Read only where tokens are sampled, which SGLang does for the whole batch.
_OF_SAMPLING = (
    "sampling_info", "extend_input_logprob_token_ids_gpu", "temperature", "top_p",
    "lora_ids", "mm_inputs",
)  # fmt: skip
# The same for both halves.
_SHARED = (
    "return_logprob", "is_prefill_only", "spec_algorithm", "is_extend_in_batch",
    "can_run_decode_cuda_graph", "can_run_dp_draft_cuda_graph",
    "can_run_dp_prefill_cuda_graph", "dp_prefill_cuda_graph_max_prefix_len",
    "global_forward_mode", "contains_last_prefill_chunk", "capture_hidden_mode",
    "split_index", "reuse_dsa_topk_indices", "attn_tp_sequence_sharded",
)  # fmt: skip
_KNOWN = frozenset(
    (*_OF_TOKENS, *_OF_ROWS, *_OF_EXTENDS, *_MADE, *_OF_SAMPLING, *_SHARED)
)


class BatchHalves(NamedTuple):
    """A mixed batch as two: the rows that decode, and those with prompts."""

    decodes: ForwardBatch
    prompts: ForwardBatch


def why_whole(batch: ForwardBatch, num_decodes: int) -> str | None:
    """What keeps a mixed batch from being split, or None if nothing does.

    num_decodes: rows that decode, the last ones of the batch.
    """
    if not batch.forward_mode.is_mixed():
        return f"a batch of kind {batch.forward_mode.name}"
    if not 0 < num_decodes < batch.batch_size:
        return f"{num_decodes} of {batch.batch_size} rows that decode"
    if batch.seq_lens_cpu is None or batch.extend_seq_lens_cpu is None:
        return "lengths that are on the device only"
    if any(length != 1 for length in batch.extend_seq_lens_cpu[-num_decodes:]):
        return "several tokens in a row that decodes"
    if batch.capture_hidden_mode not in (None, info.CaptureHiddenMode.NULL):
        return "hidden states that are returned"
    if batch.lora_ids is not None and any(batch.lora_ids):
        return "adapters"
    if batch.mm_inputs is not None and any(x is not None for x in batch.mm_inputs):
        return "images or sounds"
    if batch.spec_info is not None:
        return "drafts"
    if batch.return_logprob and wants_prompt_logprobs(
        batch.extend_seq_lens_cpu, batch.extend_logprob_start_lens_cpu
    ):
        return "log probabilities of prompts"
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if field.name not in _KNOWN and not _is_unset(value, field.default):
            return f"the field {field.name} of the batch"
    return None


def wants_prompt_logprobs(
    extend_lens: list[int], logprob_starts: list[int] | None
) -> bool:
    """Whether a batch returns log probabilities of tokens of its prompts.

    logprob_starts: of each row, how many of its new tokens come before the first one whose
        log probability is wanted.
    """
    pairs = zip(extend_lens, logprob_starts or extend_lens, strict=True)
    return any(length > start for length, start in pairs)


def _is_unset(value: Any, default: Any) -> bool:
    if value is None or value is False:
        return True
    if isinstance(value, torch.Tensor):
        return False
    if isinstance(value, list | tuple | dict):
        return not any(x is not None for x in value)
    return default is not dataclasses.MISSING and bool(value == default)


def split(batch: ForwardBatch, num_decodes: int, translator: Any) -> BatchHalves:
    """Split a mixed batch. Its tensors are not copied, and it stays as it is.

    batch: a batch for which :func:`why_whole` is None.
    num_decodes: rows that decode, the last ones.
    translator: the model runner's ``kv_index_translator``.
    """
    num_tokens, num_rows = len(batch.input_ids), batch.batch_size
    first_token, first_row = num_tokens - num_decodes, num_rows - num_decodes
    halves = []
    for decodes in (True, False):
        tokens = slice(first_token, num_tokens) if decodes else slice(0, first_token)
        rows = slice(first_row, num_rows) if decodes else slice(0, first_row)
        parts: dict[str, Any] = dict.fromkeys(_OF_SAMPLING)
        parts |= {name: _part(batch, name, tokens) for name in _OF_TOKENS}
        parts |= {name: _part(batch, name, rows) for name in _OF_ROWS}
        parts |= {
            name: None if decodes else _part(batch, name, rows) for name in _OF_EXTENDS
        }
        if batch.global_num_token_non_padded_cpu is not None:
            parts["global_num_token_non_padded_cpu"] = tokens.stop - tokens.start
        if batch.mrope_positions is not None:
            parts["mrope_positions"] = batch.mrope_positions[:, tokens]
        half = dataclasses.replace(
            batch,
            forward_mode=info.ForwardMode.DECODE
            if decodes
            else info.ForwardMode.EXTEND,
            batch_size=rows.stop - rows.start,
            seq_lens_sum=int(batch.seq_lens_cpu[rows].sum()),
            extend_num_tokens=None if decodes else tokens.stop - tokens.start,
            **parts,
        )
        # Slots that are no ids of the pool itself were refused with their field.
        translator.own_plan(half).bind(half, translator)
        halves.append(half)
    return BatchHalves(*halves)


def _part(batch: ForwardBatch, name: str, part: slice) -> Any:
    value = getattr(batch, name)
    return None if value is None else value[part]


def join(
    decodes: LogitsProcessorOutput, prompts: LogitsProcessorOutput
) -> LogitsProcessorOutput:
    """The output of the whole batch: logits ``[num_rows, vocab]`` in its order.

    Raises:
        ValueError: a half has more than logits, or of another type.
    """
    for output in (decodes, prompts):
        more = [
            field.name
            for field in dataclasses.fields(output)
            if field.name != "next_token_logits"
            and getattr(output, field.name) is not None
        ]
        if more:
            raise ValueError(f"the output of a half has {', '.join(more)}")
    first, last = prompts.next_token_logits, decodes.next_token_logits
    if first is None or last is None or first.dtype != last.dtype:
        raise ValueError("the halves have logits of different types")
    return LogitsProcessorOutput(next_token_logits=torch.cat([first, last]))


StockForward: TypeAlias = Callable[[ForwardBatch], Any]
"""SGLang's ``ModelRunner.forward`` of a batch."""

HalfOutputs: TypeAlias = tuple[LogitsProcessorOutput, LogitsProcessorOutput]
"""The outputs of decodes and prompts."""


class DirectForward:
    """A forward of a batch by the model, without CUDA graphs and static buffers.

    Two forwards of SGLang's eager runner cannot run at the same time: all its runners share
    buffers and one attention backend.
    """

    def __init__(self, model_runner: Any, backend: Any) -> None:
        self._runner = model_runner
        self.backend = backend

    def __call__(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        runner = self._runner
        if batch.forward_mode.is_decode():
            options = runner._pp_kwargs(None)
        else:
            options = runner._extend_forward_kwargs(batch, None)
        self.backend.init_forward_metadata(batch)
        return runner.model.forward(batch.input_ids, batch.positions, batch, **options)


@contextlib.contextmanager
def _published(model_runner: Any, backend: Any) -> Iterator[None]:
    """What SGLang sets around a forward of the model."""
    with (
        get_model().override(shared_experts=model_runner.model.shared_experts_config),
        forward_context(ForwardContext(attn_backend=backend)),
    ):
        yield


class ThreadedHalves:
    """On a CPU: decodes in one thread, prompts in the other, each on half of the cores.

    shares: the limits of SMs for prompts that it can be asked for.
    at_once: whether both halves run at the same time. Otherwise one follows the other,
        each with all cores, which tells what concurrency is worth.
    """

    shares: tuple[int | None, ...] = (None,)
    at_once = True

    def __init__(self, model_runner: Any) -> None:
        own = model_runner._get_attention_backend(init_new_workspace=True)
        self._decodes = DirectForward(model_runner, model_runner.attn_backend)
        self._prompts = DirectForward(model_runner, own)
        # SGLang's forward context is one for all threads. This backend passes each call
        # on by the mode of its batch, so both halves have the same context.
        self._both = HybridAttnBackend(model_runner, own, model_runner.attn_backend)
        self._runner = model_runner
        self._threads = ThreadPoolExecutor(1, "decodes")

    def run(
        self, stock_forward: StockForward, halves: BatchHalves, sm_share: int | None
    ) -> HalfOutputs:
        """The outputs of both halves, in work that follows the current one."""
        with _published(self._runner, self._both):
            if not self.at_once:
                return self._decodes(halves.decodes), self._prompts(halves.prompts)
            cores = torch.get_num_threads()
            half = max(1, cores // 2)
            waiting = self._threads.submit(
                contextvars.copy_context().run,
                self._decode,
                halves.decodes,
                half,
                torch.is_inference_mode_enabled(),
            )
            try:
                with _intra_op_threads(max(1, cores - half)):
                    prompts = self._prompts(halves.prompts)
            finally:
                # Also after a fault: nothing may run on when the step is run again.
                waiting.exception()
            return waiting.result(), prompts

    def alone(
        self, stock_forward: StockForward, half: ForwardBatch
    ) -> LogitsProcessorOutput:
        """The output of one half, without the other."""
        forward = self._decodes if half.forward_mode.is_decode() else self._prompts
        with _published(self._runner, self._both):
            return forward(half)

    def _decode(
        self, half: ForwardBatch, num_threads: int, inference: bool
    ) -> LogitsProcessorOutput:
        # Both settings are those of a thread.
        with torch.inference_mode(inference), torch.no_grad():
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)
            return self._decodes(half)


@contextlib.contextmanager
def _intra_op_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if before == number:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class StreamedHalves:
    """On a GPU: decodes as SGLang runs them, usually a CUDA graph, and prompts at the same time.

    lanes: the streams, by the SMs that prompts are limited to.
    """

    def __init__(
        self, model_runner: Any, lanes: Mapping[int | None, CudaLanes]
    ) -> None:
        own = model_runner._get_attention_backend(init_new_workspace=True)
        self._prompts = DirectForward(model_runner, own)
        self._runner = model_runner
        self._lanes = dict(lanes)
        self.shares = tuple(lanes)

    def run(
        self, stock_forward: StockForward, halves: BatchHalves, sm_share: int | None
    ) -> HalfOutputs:
        done = run_in_lanes(
            self._lanes[sm_share],
            lambda: self.alone(stock_forward, halves.decodes),
            lambda: self.alone(stock_forward, halves.prompts),
            lambda output: (output.next_token_logits,),
        )
        # SGLang may have noted that the decodes no longer read the page table, and would
        # change it while the prompts still do. Without a note it waits for the step.
        self._runner.shared_read_done_event = None
        return done

    def alone(
        self, stock_forward: StockForward, half: ForwardBatch
    ) -> LogitsProcessorOutput:
        if half.forward_mode.is_decode():
            return stock_forward(half).logits_output
        with _published(self._runner, self._prompts.backend):
            return self._prompts(half)


HalfForwards: TypeAlias = ThreadedHalves | StreamedHalves
"""Runs the halves of a step."""
