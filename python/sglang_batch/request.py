"""What travels between the rooms: one line of a batch, and its answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchRequestInput:
    """One request of a job.

    index: position among the job's requests, from 0.
    custom_id: the client's name for it; unique in the job.
    url: the endpoint it is for, such as ``/v1/chat/completions``.
    body: its JSON body, byte for byte as the client wrote it.
    """

    index: int
    custom_id: str
    url: str
    body: bytes


def engine_request_id(job_id: str, index: int) -> str:
    """The engine's name for a request of a job.

    Of one length within a job: the engine takes an id to be aborted for a prefix.
    """
    return f"{job_id}-{index:08d}"


def part_request_id(request_id: str, part: int) -> str:
    """The name of one of several sequences that a request is split into, from 0."""
    return f"{request_id}.{part:06d}"


def parse_request_id(request_id: str) -> tuple[str, int, int]:
    """The job, the index and the part in an id; an index of -1 where there is none.

    The part is 0 for a request that is one sequence, and for the first of several.
    """
    job_id, _, number = request_id.rpartition("-")
    index, _, part = number.partition(".")
    if not index.isdecimal() or not (part or "0").isdecimal():
        return job_id, -1, 0
    return job_id, int(index), int(part or 0)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer, or summed over many."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )

    @property
    def cache_hit_rate(self) -> float:
        """Share of the prompt tokens that came from the cache, 0..1."""
        return self.cached_tokens / self.input_tokens if self.input_tokens else 0.0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one request: what HTTP would have returned for it.

    status_code: HTTP status; 200 for an answer, 4xx/5xx for an error.
    request_id: the engine's name for the request.
    body: JSON body of the answer, or ``{"error": {...}}``.
    """

    status_code: int
    request_id: str
    body: bytes
    usage: Usage = Usage()

    @property
    def ok(self) -> bool:
        return self.status_code < 400
