"""SGLang's tokenizer manager over the dense engine.

SGLang's serving classes need nothing but a tokenizer manager. This one has no sockets. Its
messages to a scheduler go to the dense engine, and each answer comes back through SGLang's
own detokenizer, so usage, log probabilities, stop strings, tool calls and reasoning are
SGLang's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedEmbeddingReqInput,
    BatchTokenizedGenerateReqInput,
    FlushCacheReqOutput,
    FreezeGCReq,
    ShutdownReq,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.tokenizer_manager import ServerStatus, TokenizerManager
from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang.srt.runtime_context import get_serving

from ...dense.admission import ByLength
from ...dense.embedding import EmbeddingModel
from ...dense.model import LoadedModel
from ...dense.row_request import DenseAnswer, DenseRequest
from ...dense.worker import DenseWorker
from ..calls.call_items import Message
from ..calls.list_calls import counted
from ..compat.server_types import OfflineArgs
from ..engine.request_ids import has_our_id
from ..engine.serving_call import SPENT
from ..scheduler.answer_ends import trim_matched_stop
from .conversion import dense_request, embedding_output, embedding_request, token_output

logger = logging.getLogger(__name__)

_BATCHES = BatchTokenizedGenerateReqInput | BatchTokenizedEmbeddingReqInput


class PlannedPlace(NamedTuple):
    """Where a request is in a plan, as :class:`~sglang_batch.dense.row_request` has it."""

    place: int
    priority: int
    expected_len: int | None = None
    by_length: ByLength | None = None


class DenseModelConfig(ModelConfig):  # type: ignore[misc]
    """The fields of a text model's configuration that SGLang's manager and serving classes read.
    Its own class refuses or misreads models that it does not know.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.hf_config = loaded.model.config
        if not self.hf_config.architectures:
            self.hf_config.architectures = [type(loaded.model).__name__]
        self.hf_text_config = self.hf_config.get_text_config()
        self.hf_generation_config = getattr(loaded.model, "generation_config", None)
        self.sampling_defaults = get_serving().sampling_defaults
        self.model_path, self.revision = loaded.model.name_or_path, None
        self.vocab_size = loaded.vocab_size
        self.hidden_size = int(getattr(self.hf_text_config, "hidden_size", 0))
        self.context_len = loaded.context_len
        self.is_generation = not isinstance(loaded, EmbeddingModel)
        if isinstance(loaded, EmbeddingModel):
            self.hidden_size = loaded.dims
        self.matryoshka_dimensions = getattr(
            self.hf_config, "matryoshka_dimensions", None
        )
        self.is_matryoshka = self.matryoshka_dimensions or getattr(
            self.hf_config, "is_matryoshka", False
        )
        self.is_multimodal = self.is_embedding_gemma = False
        self.is_image_understandable_model = self.is_audio_understandable_model = False
        self.dtype = loaded.model.dtype
        self.image_token_id = self.joint_head_config = self.pointer_head = None
        self.decision_config = self.think_end_ids = None


class AnswerDetokenizer(DetokenizerManager):  # type: ignore[misc]
    """SGLang's detokenizer in this process."""

    def __init__(self, tokenizer: Any, server_args: OfflineArgs) -> None:
        # No super().__init__(), which opens sockets and loads the tokenizer again.
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.init_running_status(server_args)

    def trim_matched_stop(
        self, output: Any, finished_reason: Any, no_stop_trim: bool
    ) -> Any:
        stock = DetokenizerManager.trim_matched_stop
        return trim_matched_stop(stock, self, output, finished_reason, no_stop_trim)


class DenseTokenizerManager(TokenizerManager):  # type: ignore[misc]
    """SGLang's tokenizer manager, with the dense engine for a scheduler.

    Args:
        server_args: SGLang's, published for the role ``tokenizer``.
        place_of: where a request is in the plans of the open jobs, by its id.

    Attributes:
        on_failure: called on the event loop if the worker has failed, before its rows are
            answered.
        drains: whether SIGTERM ends the process as it ends SGLang's server: after the
            requests that run.
    """

    def __init__(
        self,
        server_args: OfflineArgs,
        loaded: LoadedModel,
        place_of: Callable[[str], PlannedPlace],
    ) -> None:
        self.event_loop: asyncio.AbstractEventLoop | None = None
        self._loaded = loaded
        self._place_of = place_of
        self._worker: DenseWorker | None = None
        self.on_failure: Callable[[], None] | None = None
        self.drains = False
        # Requests that the worker has, by id.
        self._sent: dict[str, Message] = {}
        self._answers: asyncio.Queue[tuple[str, DenseAnswer]] = asyncio.Queue()
        # It takes SGLang's channels from init_ipc_channels().
        super().__init__(server_args, None, start_pd_bootstrap_service=False)
        self._detokenizer = AnswerDetokenizer(self.tokenizer, server_args)
        self._end_ids = _end_ids(self.tokenizer)
        self._think_end_ids = self._reasoning_end()
        self.server_status = ServerStatus.Up

    def attach(self, worker: DenseWorker) -> None:
        """Send requests to this worker, whose answers come to :meth:`answered`."""
        self._worker = worker

    def answered(self, request: DenseRequest, answer: DenseAnswer) -> None:
        """The end of a row, called in the worker's thread."""
        if self.event_loop is not None:  # nobody waits before the first request
            self.event_loop.call_soon_threadsafe(
                self._answers.put_nowait, (request.rid, answer)
            )

    def init_model_config(self) -> None:
        self.model_path = self._loaded.model.name_or_path
        self.served_model_name = get_serving().served_model_name
        self.model_config = DenseModelConfig(self._loaded)
        self.is_generation = self.model_config.is_generation
        self.context_len = self._loaded.context_len
        self.image_token_id = self.max_req_input_len = None
        self.enable_priority_scheduling = False
        self.default_priority_value = None
        self.num_reserved_tokens = 0
        self.validate_total_tokens = True

    def init_ipc_channels(self, port_args: object) -> None:
        self.tokenizer_ipc_name = None

    def auto_create_handle_loop(self) -> None:
        if self.drains:
            super().auto_create_handle_loop()
        elif self.event_loop is None:
            self.event_loop = loop = asyncio.get_running_loop()
            self.asyncio_tasks.add(loop.create_task(self.handle_loop()))

    def _handle_batch_request(
        self, obj: Any, request: Any, request_states: dict[str, Any]
    ) -> AsyncGenerator[Any]:
        stock = TokenizerManager._handle_batch_request
        answers: AsyncGenerator[Any]
        if not has_our_id(obj):
            answers = stock(self, obj, request, request_states)
            return answers
        # A line, whose samples are counted with any door.
        return counted(stock, self, obj, request, request_states)

    async def handle_loop(self) -> None:
        while True:
            rid, answer = await self._answers.get()
            self.last_receive_tstamp = time.time()  # SGLang's health check looks at it
            if self._worker and self._worker.failure and self.on_failure:
                self.on_failure()
            message = self._sent.pop(rid, None)
            if message is None:  # it was aborted meanwhile
                continue
            try:
                await self._finish(message, answer)
            except Exception as error:
                logger.exception("Request %s has an answer that cannot be given", rid)
                # Its tokens are noted at the request.
                if (state := self.rid_to_state.get(rid)) is not None:
                    report = {
                        "prompt_tokens": len(message.input_ids),
                        "cached_tokens": answer.cached_tokens,
                        "completion_tokens": len(answer.output_ids),
                    }
                    setattr(state.obj, SPENT, {"meta_info": report})
                self._give_up(rid, FINISH_ABORT(f"{error}", 500).to_json())

    async def _finish(self, message: Message, answer: DenseAnswer) -> None:
        if isinstance(self._loaded, EmbeddingModel):
            unit = self._loaded.pooling.normalizes
            vector = embedding_output(message, answer, normalizes=unit)
            await self._handle_batch_output(vector)
            return
        found = token_output(
            message, answer, reasoning_tokens=self._num_reasoning(message, answer)
        )
        text = self._detokenizer.handle_batch_token_id_out(found)
        await self._handle_batch_output(text)

    def _give_up(self, rid: str, reason: dict[str, Any] | None = None) -> None:
        self._result_dispatcher(AbortReq(rid=rid, finished_reason=reason))

    def _dispatch_to_scheduler(self, obj: Any) -> None:
        if self._worker is None:
            raise RuntimeError("attach() a worker before the first request")
        if isinstance(obj, AbortReq):
            self._abort(self._worker, obj)
            return
        if isinstance(obj, FreezeGCReq | ShutdownReq):  # there is no other process
            return
        messages = obj.batch if isinstance(obj, _BATCHES) else [obj]
        if not all(isinstance(each, Message) for each in messages):
            raise ValueError(
                f"--backend transformers does not know {type(obj).__name__}"
            )
        # All are converted before any is sent: one that cannot be ends the call.
        requests = [self._planned(each) for each in messages]
        for message, request in zip(messages, requests, strict=True):
            self._sent[request.rid] = message
            self._worker.submit(request)

    async def get_internal_state(self) -> list[dict[str, Any]]:
        """Of one scheduler, as ``/server_info`` shows it."""
        return [{"backend": "transformers", "requests": len(self._sent)}]

    async def flush_cache(self, timeout_s: float | None = None) -> FlushCacheReqOutput:
        """Nothing outlives its requests."""
        return FlushCacheReqOutput(success=True)

    def _planned(self, message: Message) -> DenseRequest:
        planned = self._place_of(message.rid)
        return replace(self._converted(message), **planned._asdict())

    def _converted(self, message: Message) -> DenseRequest:
        if isinstance(message, TokenizedEmbeddingReqInput):
            return embedding_request(message)
        assert not isinstance(self._loaded, EmbeddingModel), "it is refused before"
        longest = self.context_len
        if not self._loaded.is_encoder_decoder:  # whose answers have their own context
            longest -= len(message.input_ids)
        return dense_request(
            message,
            longest=max(1, longest),
            end_ids=self._end_ids,
            reasoning_end=self._think_end_ids if message.require_reasoning else (),
        )

    def _abort(self, worker: DenseWorker, request: AbortReq) -> None:
        rids = [
            rid
            for rid in self._sent
            if request.abort_all or rid.startswith(request.rid)
        ]
        for rid in rids:
            del self._sent[rid]
            worker.abort(rid)
            self._give_up(rid)

    def _reasoning_end(self) -> list[int]:
        """Tokens that end the reasoning, empty if there is none or they are unknown."""
        name = get_serving().reasoning_parser
        if not name:
            return []
        parser = ReasoningParser(
            model_type=name, stream_reasoning=False, tokenizer=self.tokenizer
        )
        return list(parser.detector.get_think_end_token_ids(self.tokenizer) or ())

    def _num_reasoning(
        self, message: TokenizedGenerateReqInput, answer: DenseAnswer
    ) -> int:
        """Tokens up to the end of the reasoning, or all if it does not end."""
        end, ids = self._think_end_ids, list(answer.output_ids)
        if not end or not message.require_reasoning:
            return 0
        starts = range(len(ids) - len(end) + 1)
        found = (i + len(end) for i in starts if ids[i : i + len(end)] == end)
        return next(found, len(ids))


def _end_ids(tokenizer: Any) -> frozenset[int]:
    """The tokenizer's tokens that end an answer, as SGLang's scheduler has them."""
    own: Sequence[int] = tuple(
        getattr(tokenizer, "additional_stop_token_ids", None) or ()
    )
    end = tokenizer.eos_token_id
    return frozenset(own if end is None else (*own, end))
