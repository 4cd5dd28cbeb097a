"""An engine without a GPU, controlled by a test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from builders import MODEL, make_machine

from sglang_batch.batch_api.protocol import error_body
from sglang_batch.job.engine import KvUse, PreparedRequest
from sglang_batch.request import (
    BatchRequestInput,
    RequestOutput,
    Usage,
    parse_request_id,
)
from sglang_batch.scheduling.job_plan import JobPlan
from sglang_batch.scheduling.running_tree import TreeNow


@dataclass(frozen=True, slots=True)
class FakePrepared:
    """A request as :class:`FakeEngine` renders it."""

    custom_id: str
    rid: str
    text: str
    input_ids: list[int] | None
    max_new_tokens: int | None = None
    ignore_eos: bool = False
    shareable_len: int | None = None
    has_media: bool = False
    adapter: str = ""
    namespace: str = ""
    native: bool = False


class FakeEngine:
    """An engine whose tokens are bytes and whose answer is the prompt.

    It decides nothing by time: a request ends when it is asked to, unless
    :meth:`hold` keeps it until :meth:`release`.

    Args:
        rejected: custom ids that cannot be rendered and are answered with 400.
        failing: custom ids that run and end with this error status.
        raising: custom ids at which the engine itself breaks.

    Attributes:
        executed: custom ids in the order in which they were sent.
        answered: custom ids in the order in which they ended.
        aborted: custom ids cancelled before their end.
        rids: rids in the order in which they were sent.
        max_running: most requests in the engine at any one time.
        ended_early: rids of samples that were ended early: their answers have one token.
        weight_version: of the answers to samples.
        tells: whether it tells which requests run.
    """

    def __init__(
        self,
        *,
        model_names: tuple[str, ...] = (MODEL,),
        default_max_inflight: int = 4,
        num_replicas: int = 1,
        rejected: Iterable[str] = (),
        failing: dict[str, int] | None = None,
        raising: dict[str, Exception] | None = None,
    ) -> None:
        self.model_names = model_names
        self.machine = make_machine()
        self.default_max_inflight = default_max_inflight
        self.num_replicas = num_replicas
        self.replica_changes = None
        self.kv: KvUse | None = None
        self.trees: list[TreeNow] | None = None
        # Requests that have not begun to run, by custom id, and when others did.
        self.queued: set[str] = set()
        self._began: dict[str, tuple[str, float]] = {}
        self.is_paused = False
        self.tells = True
        self.opened: dict[str, list[JobPlan]] = {}
        self.closed: list[str] = []
        self.watching: dict[str, Callable[[list[int]], None]] = {}
        self.priorities: dict[str, int] = {}
        self.replicas: dict[str, int] = {}
        self.executed: list[str] = []
        self.answered: list[str] = []
        self.aborted: list[str] = []
        self.rids: list[str] = []
        self.running: set[str] = set()
        self.max_running = 0
        self.max_running_requests = default_max_inflight
        self.num_prepared = 0
        self._rejected = set(rejected)
        self._failing = failing or {}
        self.raising = raising or {}
        self.ended_early: set[str] = set()
        self.weight_version = "default"
        self._failures: dict[str, RequestOutput] = {}
        self._gates: dict[str, asyncio.Event] = {}
        self._changed = asyncio.Event()

    # For tests -----------------------------------------------------------------

    def hold(self, custom_ids: Iterable[str]) -> None:
        """Keep these requests running until they are released."""
        self._gates |= {custom_id: asyncio.Event() for custom_id in custom_ids}

    def fail_line(
        self, custom_id: str, status_code: int, code: str, message: str
    ) -> None:
        """Have a request run and end with this error."""
        body = json.dumps(error_body(message, status_code=status_code, code=code))
        self._failures[custom_id] = RequestOutput(status_code, "", body.encode())

    def release(self, custom_ids: Iterable[str] | None = None) -> None:
        """Let these requests end, by default all of them."""
        for custom_id in self._gates if custom_ids is None else custom_ids:
            self._gates[custom_id].set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition on the records of this engine."""
        while not condition():
            await self._changed.wait()

    async def until_stalled(self, num_answered: int, num_running: int) -> None:
        """Wait until these numbers of requests have ended and are held."""
        await self.until(
            lambda: (
                len(self.answered) == num_answered and len(self.running) == num_running
            )
        )

    # The Engine protocol --------------------------------------------------------

    async def kv_use(self) -> KvUse | None:
        return self.kv

    async def running_tree(self, limit: int) -> list[TreeNow] | None:
        if self.trees is None:
            return None
        return [
            {"jobs": tree["jobs"], "nodes": tree["nodes"][:limit]}
            for tree in self.trees
        ]

    async def running_s(self) -> dict[str, float]:
        now = asyncio.get_running_loop().time()
        began = self._began.items()
        return {
            rid: now - at
            for rid, (custom_id, at) in began
            if custom_id not in self.queued
        }

    def begin(self, custom_ids: Iterable[str]) -> None:
        """Have requests that were queued begin to run."""
        now = asyncio.get_running_loop().time()
        for rid, (custom_id, _) in self._began.items():
            if custom_id in custom_ids:
                self._began[rid] = (custom_id, now)
        self.queued.difference_update(custom_ids)

    async def open_job(self, job_id: str, plans: Sequence[JobPlan]) -> None:
        self.opened[job_id] = list(plans)

    def watch_job(self, job_id: str, on_joined: Callable[[list[int]], None]) -> bool:
        self.watching[job_id] = on_joined
        return self.tells

    async def set_priority(self, job_id: str, priority: int) -> None:
        self.priorities[job_id] = priority

    async def close_job(self, job_id: str) -> None:
        self.closed.append(job_id)

    async def prepare(
        self, request: BatchRequestInput, rid: str, *, tokenize: bool
    ) -> PreparedRequest | RequestOutput:
        await asyncio.sleep(0)
        self.num_prepared += 1
        if request.custom_id in self._rejected:
            content = error_body("The prompt cannot be rendered.", param="messages")
            return RequestOutput(400, rid, json.dumps(content).encode())
        body = json.loads(request.body)
        text = _prompt(body)
        input_ids = list(text.encode()) if tokenize else None
        most = body.get("max_tokens")
        return FakePrepared(
            request.custom_id,
            rid,
            text,
            input_ids,
            most,
            body.get("ignore_eos", False),
            native="sampling_params" in body,
        )

    def stored(self, prepared: Any) -> bytes | None:
        kept = replace(prepared, input_ids=None, rid="")
        return json.dumps(asdict(kept)).encode()

    def restore(
        self,
        request: BatchRequestInput,
        rid: str,
        stored: bytes,
        input_ids: Sequence[int],
    ) -> PreparedRequest:
        fields = json.loads(stored)
        assert list(fields["text"].encode()) == list(input_ids)
        return FakePrepared(**fields | {"rid": rid})

    def end_early(self, rid: str) -> None:
        self.ended_early.add(rid)
        _, number, _ = parse_request_id(rid)
        if str(number) in self._gates:
            self._gates[str(number)].set()

    async def execute(self, prepared: Any, replica: int | None = None) -> RequestOutput:
        custom_id = prepared.custom_id
        self.replicas[custom_id] = replica or 0
        self.executed.append(custom_id)
        self.rids.append(prepared.rid)
        self.running.add(custom_id)
        began = asyncio.get_running_loop().time()
        self._began[prepared.rid] = (custom_id, began)
        self.max_running = max(self.max_running, len(self.running))
        self._note()
        try:
            await asyncio.sleep(0)
            self._joined(prepared)
            if custom_id in self._gates:
                await self._gates[custom_id].wait()
        except asyncio.CancelledError:
            self.aborted.append(custom_id)
            raise
        finally:
            self.running.discard(custom_id)
            del self._began[prepared.rid]
            self._note()
        if custom_id in self.raising:
            raise self.raising[custom_id]
        self.answered.append(custom_id)
        self._note()
        return self._answer(prepared)

    def _joined(self, prepared: FakePrepared) -> None:
        """Tell the job of a request that it runs."""
        if prepared.custom_id in self.queued:
            return
        job_id, number, _ = parse_request_id(prepared.rid)
        if job_id in self.watching:
            self.watching[job_id]([number])

    def _answer(self, prepared: FakePrepared) -> RequestOutput:
        if failed := self._failures.get(prepared.custom_id):
            return replace(failed, request_id=prepared.rid)
        if status_code := self._failing.get(prepared.custom_id):
            failure = error_body("The request failed.", status_code=status_code)
            return RequestOutput(
                status_code, prepared.rid, json.dumps(failure).encode()
            )
        num_tokens = len(prepared.text.encode())
        if prepared.native:
            early = prepared.rid in self.ended_early
            ids = list(prepared.text.encode())[: 1 if early else None]
            native = {
                "text": bytes(ids).decode(errors="replace"),
                "output_ids": ids,
                "meta_info": {
                    "finish_reason": {"type": "abort" if early else "stop"},
                    "output_token_logprobs": [[-1.0, each, None] for each in ids],
                    "prompt_tokens": num_tokens,
                    "weight_version": self.weight_version,
                },
            }
            return RequestOutput(200, prepared.rid, _encoded(native))
        message = {"role": "assistant", "content": prepared.text}
        content = {
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }
        usage = Usage(input_tokens=num_tokens, output_tokens=num_tokens)
        return RequestOutput(200, prepared.rid, _encoded(content), usage)

    def _note(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _encoded(body: dict[str, Any]) -> bytes:
    """JSON as SGLang writes it: only ASCII's control characters are escaped."""
    return json.dumps(body, ensure_ascii=False).encode()


def _prompt(body: dict[str, Any]) -> str:
    if "messages" in body:
        return "".join(message["content"] for message in body["messages"])
    if "input_ids" in body:
        return bytes(each % 128 for each in body["input_ids"]).decode()
    return str(body.get("prompt") or body.get("input") or body.get("text", ""))
