"""A job of any size: one :class:`~.job.Job`, or one for each bucket of its requests.

A plan in one piece takes half a kilobyte for each request. A larger job is dealt to buckets of
requests whose prompts begin alike, each of which is planned as a job of its own. Two of them
are in the engine at a time, so that it never waits: the earlier one goes first.

Rendering all of a job to find its buckets would take as long as sending it. But prompts whose
text begins alike have tokens that begin alike, so the text in the lines is enough: the parts of
a body that a chat template puts into the prompt, in the order in which most of them do.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import msgspec
import numpy as np

from ..config import POLICY_TABLE, OfflineBatchConfig
from ..planner.prefixes.bucket_splitters import (
    buckets_of,
    choose_splitters,
    sample_numbers,
)
from ..planner.requests import Int32s, Int64s
from ..request import BatchRequestInput, RequestOutput, Requests, Sink
from .engine import Engine
from .job import Job, JobOptions, sharing_ratio
from .occupancy import Tail
from .rendering import Indices, task_group

logger = logging.getLogger(__name__)

# Buckets that are in the engine at a time.
OPEN_BUCKETS = 2


@dataclass(eq=False)
class BucketedJob:
    """Runs the requests ``todo`` of ``requests``, as :class:`~.job.Job` does.

    Attributes:
        in_one_piece: whether it is one job.
        tail: of the job in one piece, or of its last bucket.
        num_buckets: 1 for a job in one piece. Of another one, 0 until it is dealt.
    """

    job_id: str
    requests: Requests
    todo: Indices
    engine: Engine
    config: OfflineBatchConfig
    sink: Sink
    _: KW_ONLY
    on_rendered: Callable[[], None] = lambda: None
    directory: Path | None = None

    def __post_init__(self) -> None:
        self._prompt_tokens = self._unique_tokens = 0
        planned = POLICY_TABLE[self.config.policy].uses_prompts
        self.in_one_piece = (
            not planned or len(self.requests) <= self.config.bucket_requests
        )
        self.num_buckets = int(self.in_one_piece)
        self.tail = Tail()

    @property
    def prefix_sharing_ratio(self) -> float | None:
        """As of :class:`~.job.Job`, of the buckets that have ended."""
        return sharing_ratio(self._prompt_tokens, self._unique_tokens)

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Run until all requests are answered or ``stop`` is set.

        Raises:
            Exception: as of :meth:`.job.Job.run`.
        """
        if self.in_one_piece:
            job = self._job(self.job_id, self.requests, self.todo, self.sink)
            return await self._finish(job, stop)
        buckets = await asyncio.to_thread(
            deal_requests,
            self.requests,
            self.config.bucket_requests,
            self.config.seed,
        )
        self.num_buckets = len(buckets)
        logger.info(
            "Job %s: %d requests in %d buckets, the largest of %d",
            self.job_id,
            len(self.requests),
            len(buckets),
            max(map(len, buckets)),
        )
        is_left = np.zeros(len(self.requests), np.bool_)
        is_left[np.asarray(self.todo, np.int64)] = True
        room = asyncio.Semaphore(OPEN_BUCKETS)
        async with task_group() as group:
            for bucket, numbers in enumerate(buckets):
                left = np.flatnonzero(is_left[numbers]).astype(np.int64)
                if not len(left):
                    continue
                await room.acquire()
                if stop is not None and stop.is_set():
                    break
                job = self._bucket_job(bucket, numbers, left)
                running = group.create_task(self._finish(job, stop, numbers))
                running.add_done_callback(lambda _: room.release())

    async def _finish(
        self, job: Job, stop: asyncio.Event | None, numbers: Int64s | None = None
    ) -> None:
        """Run a job, of the bucket of ``numbers`` unless it is the whole one."""
        await job.run(stop)
        self.tail = tail = job.tail()
        if numbers is not None:
            last = tuple(numbers[list(tail.last)].tolist())
            self.tail = dataclasses.replace(tail, last=last)
        self._prompt_tokens += job.plan.num_prompt_tokens
        self._unique_tokens += job.plan.num_unique_tokens

    def _bucket_job(self, bucket: int, numbers: Int64s, todo: Int64s) -> Job:
        members = _Members(self.requests, numbers)

        def sink(request: BatchRequestInput, output: RequestOutput) -> None:
            index = int(numbers[request.index])
            self.sink(dataclasses.replace(request, index=index), output)

        # All ids of a job have one length.
        job_id = f"{self.job_id}-{bucket:06d}"
        return self._job(job_id, members, todo, sink, self.num_buckets - bucket)

    def _job(
        self,
        job_id: str,
        requests: Requests,
        todo: Indices,
        sink: Sink,
        priority: int = 0,
    ) -> Job:
        config = self.config
        if not self.in_one_piece and config.max_inflight is not None:
            share = max(1, config.max_inflight // OPEN_BUCKETS)
            config = dataclasses.replace(config, max_inflight=share)
        options = JobOptions(
            on_rendered=self.on_rendered,
            directory=self.directory,
            priority=priority,
            # Of several buckets, the next one needs all replicas.
            releases=self.in_one_piece,
        )
        return Job(job_id, requests, todo, self.engine, config, sink, options)


@dataclass(eq=False)
class _Members(Sequence[BatchRequestInput]):
    """The requests of a bucket, by their place in it."""

    requests: Requests
    numbers: Int64s

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> BatchRequestInput:  # type: ignore[override]
        request = self.requests[int(self.numbers[index])]
        return dataclasses.replace(request, index=index)


# Bytes of text compared at once, and of the sample. Four times as much is in memory.
MAX_BYTES = 1 << 26
# Of one prompt. Prompts that are equal up to there are in one bucket.
PROMPT_BYTES = 1 << 18


class _Prompt(msgspec.Struct):
    """What a body's prompt is made of. Its fields are in the order of the prompt."""

    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()
    items: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()
    file_url: msgspec.Raw = msgspec.Raw()


_FIELDS = _Prompt.__struct_fields__
_decoder = msgspec.json.Decoder(_Prompt)


def prompt_text(request: BatchRequestInput) -> bytes:
    """The text that a request's prompt begins with, as JSON."""
    try:
        prompt = _decoder.decode(request.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return b""
    return b"".join(getattr(prompt, name) for name in _FIELDS)[:PROMPT_BYTES]


def deal_requests(requests: Requests, bucket_requests: int, seed: int) -> list[Int64s]:
    """The numbers of the requests in each bucket, rising. They depend on nothing else.

    Args:
        bucket_requests: most in a bucket, about, but where prompts are equal.
    """
    num_buckets = -(-len(requests) // bucket_requests)
    # From as much of a sample as fits into memory.
    numbers = sample_numbers(len(requests), num_buckets, seed)
    prompts: dict[int, bytes] = {}
    size = 0
    for number in np.random.default_rng(seed).permutation(numbers).tolist():
        prompts[number] = text = prompt_text(requests[number])
        size += len(text)
        if size > MAX_BYTES:
            break
    sample = _arrays([prompts[number] for number in sorted(prompts)])
    splitters = choose_splitters(*sample, num_buckets)
    bucket = np.empty(len(requests), np.int32)
    first = 0
    for texts in _blocks(requests):
        bucket[first : first + len(texts)] = buckets_of(*_arrays(texts), splitters)
        first += len(texts)
    order = np.argsort(bucket, kind="stable")
    ends = np.cumsum(np.bincount(bucket, minlength=splitters.num_buckets))
    dealt = np.split(order.astype(np.int64), ends[:-1])
    return [numbers for numbers in dealt if len(numbers)]


def _blocks(requests: Requests) -> Iterator[list[bytes]]:
    """The texts of all requests, as many at a time as may be in memory."""
    texts: list[bytes] = []
    size = 0
    for number in range(len(requests)):
        text = prompt_text(requests[number])
        texts.append(text)
        size += len(text)
        if size > MAX_BYTES:
            yield texts
            texts, size = [], 0
    yield texts


def _arrays(texts: Sequence[bytes]) -> tuple[Int32s, Int64s]:
    """Texts as the planner takes prompts: a token is a byte."""
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(list(map(len, texts)), out=offsets[1:])
    return np.frombuffer(b"".join(texts), np.uint8).astype(np.int32), offsets
