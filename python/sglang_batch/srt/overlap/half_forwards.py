"""Both halves of a mixed step, on a CPU in two threads, on a GPU on two streams.

The prompts have an attention backend of their own: each backend keeps what it prepared
for a forward until the next one.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_model

from .batch_halves import BatchHalves
from .step_lanes import StepLanes, run_in_lanes


class HalfForwards(Protocol):
    """Runs the halves of a step.

    shares: the limits of SMs for prompts that it can be asked for.
    """

    shares: tuple[int | None, ...]

    def run(
        self,
        stock_forward: Callable[[ForwardBatch], Any],
        halves: BatchHalves,
        sm_share: int | None,
    ) -> tuple[LogitsProcessorOutput, LogitsProcessorOutput]:
        """The outputs of decodes and prompts, in work that follows the current one.

        Args:
            stock_forward: SGLang's ``ModelRunner.forward`` of a batch.
        """
        ...

    def alone(
        self, stock_forward: Callable[[ForwardBatch], Any], half: ForwardBatch
    ) -> LogitsProcessorOutput:
        """The output of one half, without the other."""
        ...


class DirectForward:
    """A forward of a batch by the model, without CUDA graphs and static buffers.

    SGLang's eager runner copies a batch into buffers that all its runners share, also
    those of CUDA graphs, and prepares the model runner's one attention backend. So two
    of its forwards cannot run at the same time.
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
    """On a CPU: decodes in one thread, prompts in the other.

    PyTorch's operators release Python's lock, and each thread computes with half of the
    cores that PyTorch uses otherwise.

    Attributes:
        at_once: whether both halves run at the same time. Otherwise one follows the
            other, each with all cores, which tells what concurrency is worth.
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
        self,
        stock_forward: Callable[[ForwardBatch], Any],
        halves: BatchHalves,
        sm_share: int | None,
    ) -> tuple[LogitsProcessorOutput, LogitsProcessorOutput]:
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
        self, stock_forward: Callable[[ForwardBatch], Any], half: ForwardBatch
    ) -> LogitsProcessorOutput:
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

    Args:
        lanes: the streams, by the SMs that prompts are limited to.
    """

    def __init__(
        self, model_runner: Any, lanes: Mapping[int | None, StepLanes]
    ) -> None:
        own = model_runner._get_attention_backend(init_new_workspace=True)
        self._prompts = DirectForward(model_runner, own)
        self._runner = model_runner
        self._lanes = dict(lanes)
        self.shares = tuple(lanes)

    def run(
        self,
        stock_forward: Callable[[ForwardBatch], Any],
        halves: BatchHalves,
        sm_share: int | None,
    ) -> tuple[LogitsProcessorOutput, LogitsProcessorOutput]:
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
        self, stock_forward: Callable[[ForwardBatch], Any], half: ForwardBatch
    ) -> LogitsProcessorOutput:
        if half.forward_mode.is_decode():
            return stock_forward(half).logits_output
        with _published(self._runner, self._prompts.backend):
            return self._prompts(half)
