"""Things the tests are made of: lines, files, requests, and an engine without a GPU.

Every builder has defaults; a test names only what it is about.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sglang_batch.batch_api.protocol import ACTIVE_STATUSES, error_body
from sglang_batch.config import OfflineBatchConfig
from sglang_batch.engine import PreparedRequest
from sglang_batch.planner.cost_model import CostModel
from sglang_batch.planner.plan import Machine
from sglang_batch.planner.simulator import EngineLimits
from sglang_batch.request import BatchRequestInput, RequestOutput, Usage
from sglang_batch.scheduling.job_plan import JobPlan
from sglang_batch.service import BatchService
from sglang_batch.store.batch_store import BatchStore, Row

CHAT = "/v1/chat/completions"
MODEL = "demo"
# Far above what any scenario takes: reached only by one that hangs.
PATIENCE_S = 20.0
NO_USAGE = Usage()


T = TypeVar("T")


def run(scenario: Coroutine[Any, Any, T]) -> T:
    """Run an asynchronous scenario; one that hangs fails."""

    async def limited() -> T:
        async with asyncio.timeout(PATIENCE_S):
            return await scenario

    return asyncio.run(limited())


def make_body(
    text: str = "hello", *, without: str = "", **fields: Any
) -> dict[str, Any]:
    """The body of a chat completion; ``without`` leaves one key out."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
    body.pop(without, None)
    return body


def make_line(
    custom_id: object = "a",
    text: str = "hello",
    *,
    method: object = "POST",
    url: object = CHAT,
    body: object = None,
    without: str = "",
) -> str:
    """One line of an input file; ``without`` leaves one key out."""
    line = {
        "custom_id": custom_id,
        "method": method,
        "url": url,
        "body": make_body(text) if body is None else body,
    }
    line.pop(without, None)
    return json.dumps(line)


def make_lines(num_lines: int, text: str = "prompt {}") -> list[str]:
    """Valid lines ``r0``, ``r1``, ...; ``{}`` in the text becomes the number."""
    return [make_line(f"r{i}", text.format(i)) for i in range(num_lines)]


def make_file(
    directory: Path,
    lines: Iterable[str | bytes] | bytes | None = None,
    name: str = "input.jsonl",
) -> Path:
    """A file of these lines, each ended by a newline; bytes are written as they are."""
    path = directory / name
    if lines is None:
        lines = [make_line()]
    if not isinstance(lines, bytes):
        encoded = [line.encode() if isinstance(line, str) else line for line in lines]
        lines = b"".join(line + b"\n" for line in encoded)
    path.write_bytes(lines)
    return path


def make_request(
    index: int = 0, text: str = "hello", custom_id: str | None = None
) -> BatchRequestInput:
    body = json.dumps(make_body(text)).encode()
    return BatchRequestInput(index, custom_id or f"r{index}", CHAT, body)


def make_requests(texts: Sequence[str]) -> list[BatchRequestInput]:
    """Requests ``r0``, ``r1``, ... with these prompts."""
    return [make_request(i, text) for i, text in enumerate(texts)]


def make_output(
    status_code: int = 200, body: object = None, usage: Usage = NO_USAGE
) -> RequestOutput:
    if body is None:
        body = (
            {"object": "chat.completion"}
            if status_code < 400
            else error_body("It failed.", status_code=status_code)
        )
    return RequestOutput(status_code, "req-1", json.dumps(body).encode(), usage)


def make_machine(kv_capacity_tokens: int = 100_000, **limits: Any) -> Machine:
    """Costs of Llama-3-8B on an A100 as BlendServe has them, without weights' reads."""
    cost = CostModel(token_time_s=16e9 / 312e12, kv_read_time_s=131_072 / 2.039e12)
    return Machine(cost, EngineLimits(kv_capacity_tokens, **limits))


@dataclass(frozen=True, slots=True)
class FakePrepared:
    """What :class:`FakeEngine` renders a request to."""

    custom_id: str
    rid: str
    text: str
    input_ids: list[int] | None
    max_new_tokens: int | None = None
    ignore_eos: bool = False


class FakeEngine:
    """An engine whose tokens are bytes and whose answer is the prompt.

    It decides nothing by time: a request ends when it is asked to, unless
    :meth:`hold` keeps it until :meth:`release`.

    Args:
        rejected: custom ids that cannot be rendered; they are answered with 400.
        failing: custom ids that run and end with this error status.
        raising: custom ids at which the engine itself breaks.

    Attributes:
        executed: custom ids in the order in which they were sent.
        answered: custom ids in the order in which they ended.
        aborted: custom ids cancelled before their end.
        rids: rids in the order in which they were sent.
        max_running: most requests in the engine at any one time.
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
        self.opened: dict[str, list[JobPlan]] = {}
        self.closed: list[str] = []
        self.replicas: dict[str, int] = {}
        self.executed: list[str] = []
        self.answered: list[str] = []
        self.aborted: list[str] = []
        self.rids: list[str] = []
        self.running: set[str] = set()
        self.max_running = 0
        self.num_prepared = 0
        self._rejected = set(rejected)
        self._failing = failing or {}
        self.raising = raising or {}
        self._gates: dict[str, asyncio.Event] = {}
        self._changed = asyncio.Event()

    # What a test does with it -------------------------------------------------

    def hold(self, custom_ids: Iterable[str]) -> None:
        """Keep these requests running until they are released."""
        self._gates |= {custom_id: asyncio.Event() for custom_id in custom_ids}

    def release(self, custom_ids: Iterable[str] | None = None) -> None:
        """Let these requests end; all of them by default."""
        for custom_id in self._gates if custom_ids is None else custom_ids:
            self._gates[custom_id].set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition on what this engine records."""
        while not condition():
            await self._changed.wait()

    async def until_stalled(self, num_answered: int, num_running: int) -> None:
        """Wait until so many have ended and so many are held."""
        await self.until(
            lambda: (
                len(self.answered) == num_answered and len(self.running) == num_running
            )
        )

    # The Engine protocol --------------------------------------------------------

    async def open_job(self, job_id: str, plans: Sequence[JobPlan]) -> None:
        self.opened[job_id] = list(plans)

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
            request.custom_id, rid, text, input_ids, most, body.get("ignore_eos", False)
        )

    async def execute(self, prepared: Any, replica: int | None = None) -> RequestOutput:
        custom_id = prepared.custom_id
        self.replicas[custom_id] = replica or 0
        self.executed.append(custom_id)
        self.rids.append(prepared.rid)
        self.running.add(custom_id)
        self.max_running = max(self.max_running, len(self.running))
        self._note()
        try:
            await asyncio.sleep(0)
            if custom_id in self._gates:
                await self._gates[custom_id].wait()
        except asyncio.CancelledError:
            self.aborted.append(custom_id)
            raise
        finally:
            self.running.discard(custom_id)
            self._note()
        if custom_id in self.raising:
            raise self.raising[custom_id]
        self.answered.append(custom_id)
        self._note()
        return self._answer(prepared)

    def _answer(self, prepared: FakePrepared) -> RequestOutput:
        if status_code := self._failing.get(prepared.custom_id):
            failure = error_body("The request failed.", status_code=status_code)
            return RequestOutput(
                status_code, prepared.rid, json.dumps(failure).encode()
            )
        num_tokens = len(prepared.text.encode())
        message = {"role": "assistant", "content": prepared.text}
        content = {
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }
        usage = Usage(input_tokens=num_tokens, output_tokens=num_tokens)
        return RequestOutput(200, prepared.rid, json.dumps(content).encode(), usage)

    def _note(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _prompt(body: dict[str, Any]) -> str:
    if "messages" in body:
        return "".join(message["content"] for message in body["messages"])
    return str(body.get("prompt") or body.get("input") or body.get("text", ""))


def answer_text(line: dict[str, Any]) -> str:
    """What a line of an output file answers."""
    text: str = line["response"]["body"]["choices"][0]["message"]["content"]
    return text


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    """The lines of a result file."""
    assert data.endswith(b"\n") or not data
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


# A batch service ------------------------------------------------------------------


def make_service(
    directory: Path, server_name: str = "server", **config: Any
) -> BatchService:
    """A service that has not been started; its store is open."""
    return BatchService(
        BatchStore(directory), OfflineBatchConfig(**config), server_name
    )


@asynccontextmanager
async def running_service(
    directory: Path,
    engine: FakeEngine | None = None,
    *,
    closing: Callable[[], bool] = lambda: False,
    **kwargs: Any,
) -> AsyncIterator[BatchService]:
    """A service at work until the block ends, which stops it in the middle."""
    service = make_service(directory, **kwargs)
    try:
        await service.start(engine or FakeEngine(), closing)
        yield service
    finally:
        await service.stop()
        service.store.close()


def submit(
    service: BatchService,
    lines: Iterable[str | bytes],
    *,
    endpoint: str = CHAT,
    metadata: dict[str, str] | None = None,
) -> str:
    """Upload a file of these lines and start a batch over it; returns its id."""
    data = b"".join(
        (line.encode() if isinstance(line, str) else line) + b"\n" for line in lines
    )
    file = service.create_file(io.BytesIO(data), "in.jsonl", "batch", None)
    batch_id: str = service.create_batch(file["id"], endpoint, "24h", metadata)["id"]
    return batch_id


def batch_row(service: BatchService, batch_id: str) -> Row:
    row = service.store.get_batch(batch_id)
    assert row is not None
    return row


async def until_over(service: BatchService, batch_id: str) -> Row:
    """Wait for a batch's final status, as clients do: by asking again."""
    while (row := batch_row(service, batch_id))["status"] in ACTIVE_STATUSES:
        await asyncio.sleep(0.002)
    return row


def result_lines(service: BatchService, row: Row, name: str) -> list[dict[str, Any]]:
    """The lines of a batch's ``output`` or ``error`` file; none if it has no file."""
    file_id = row[f"{name}_file_id"]
    if file_id is None:
        return []
    data = service.store.file_path(file_id).read_bytes()
    assert data, "a file that would be empty does not exist"
    return parse_lines(data)
