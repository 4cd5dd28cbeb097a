"""One request of a batch, its ids, its key and its answer, and JSON as lines."""

from __future__ import annotations

import hashlib
import operator
import os
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import msgspec

from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class BatchRequestInput:
    """One request of a job.

    index: place among the job's requests in the input, from 0.
    custom_id: the client's id for the request, unique in the job.
    url: the endpoint, such as ``/v1/chat/completions``.
    body: the JSON body, byte for byte as the client wrote it.
    """

    index: int
    custom_id: str
    url: str
    body: bytes


def named_job_id(name: str) -> str:
    """The id of the job with a name, the same whenever and wherever it runs."""
    return f"batch_{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}"


def engine_request_id(job_id: str, index: int) -> str:
    """The engine's id for a request of a job.

    All ids of a job have the same length, because the engine aborts every request whose
    id begins with the given one.
    """
    return f"{job_id}-{index:08d}"


def attempt_request_id(request_id: str, attempt: int) -> str:
    """The engine's id for a further attempt at a request, from 1."""
    return f"{request_id}.try{attempt:06d}"


def part_request_id(request_id: str, part: int) -> str:
    """The engine's id for part ``part``, from 0, of a request that is split."""
    return f"{request_id}.{part:06d}"


def line_request_id(request_id: str) -> str:
    """The id of a line's first request, from that of any attempt, part or later call."""
    return _SUFFIXES.sub("", request_id)


def parse_request_id(request_id: str) -> tuple[str, int, int]:
    """The job id, index and part in an engine's id. The index is -1 if there is none.

    The part is 0 for a request of one sequence, and for the first of several. Those of
    further attempts count as further parts: a plan has each request once.
    """
    job_id, _, number = request_id.rpartition("-")
    found = _NUMBER.fullmatch(number)
    if found is None:
        return job_id, -1, 0
    index, attempt, part = found.groups()
    return job_id, int(index), int(part or 0) + (attempt is not None)


_SUFFIXES = re.compile(r"(\.[a-z]*\d{6})+$", re.ASCII)
_NUMBER = re.compile(r"(\d+)(?:\.try(\d+))?(?:\.(\d+))?", re.ASCII)


class Counts:
    """Counts that are added field by field."""

    __slots__: tuple[str, ...] = ()

    def counts(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(operator.add, self.counts(), other.counts()))

    def __sub__(self, other: Self) -> Self:
        return type(self)(*map(operator.sub, self.counts(), other.counts()))


@dataclass(frozen=True, slots=True)
class Usage(Counts):
    """Token counts of one answer, or sums over many."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def possible_hit_rate(self, shared: float | None) -> float | None:
        """The fraction that a perfect cache would have saved, of these tokens.

        Args:
            shared: the fraction that the job's prompts have in common, if it is known. More
                than that comes from the cache where it holds what other jobs computed.
        """
        if shared is None or not self.input_tokens:
            return None
        return max(shared, self.cache_hit_rate)

    @property
    def cache_hit_rate(self) -> float:
        """Fraction of the prompt tokens that came from the cache, 0 to 1."""
        return self.cached_tokens / self.input_tokens if self.input_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Cuts(Counts):
    """Answers that each stop rule has ended.

    length: those that ended at their limit of tokens, ``finish_reason`` ``length``.
    """

    json: int = 0
    regex: int = 0
    repetition: int = 0
    length: int = 0


@dataclass(frozen=True, slots=True)
class Work(Counts):
    """What an engine did for a request, in the terms of the cost model.

    tokens: those of prompts that were computed, and of answers.
    attended: tokens before each computed one, twice, as
        :attr:`~.planner.costs.cost_model.CostModel.attention_time_s` counts them.
    reads: tokens of KV that its decode steps read.
    """

    tokens: int = 0
    attended: int = 0
    reads: int = 0

    @classmethod
    def of_sequence(cls, computed: int, cached: int, generated: int) -> Work:
        """That of one answer.

        Args:
            computed, cached: tokens of its prompt.
            generated: its own.
        """
        # The first token comes with the prompt.
        steps = max(0, generated - 1)
        return cls(
            computed + generated,
            computed * (2 * cached + computed),
            steps * (computed + cached) + steps * (steps + 1) // 2,
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one request, as HTTP would have returned it.

    status_code: HTTP status, 200 for an answer, 4xx/5xx for an error.
    request_id: the engine's id for the request.
    body: JSON body of the answer, or ``{"error": {...}}``.
    merged_with: the ``custom_id`` of an equal request whose answer this is. None if it was
        computed.
    from_cache: whether an earlier job computed it.
    cuts: those of its answers, of which there are several with ``n``.
    work: of the engine for it, None where the engine does not tell.
    """

    status_code: int
    request_id: str
    body: bytes
    usage: Usage = Usage()
    merged_with: str | None = None
    from_cache: bool = False
    cuts: Cuts = Cuts()
    work: Work | None = None

    @property
    def is_computed(self) -> bool:
        """Whether the job computed it."""
        return self.merged_with is None and not self.from_cache

    @property
    def ok(self) -> bool:
        return self.status_code < 400


class Requests(Protocol):
    """The requests of a job, by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> BatchRequestInput: ...


Sink = Callable[[BatchRequestInput, RequestOutput], None]
"""Takes the answer of a request."""


# Lines of JSON: how every line is written, and how lines are told apart.

_encoder = msgspec.json.Encoder()
# Line ends to str.splitlines and to clients such as httpx, but not to JSON, which has to
# escape only the others. Raw, they are in strings only: no other part of JSON has them.
_LINE_ENDS = {chr(code).encode(): b"\\u%04x" % code for code in (0x85, 0x2028, 0x2029)}


def json_line(value: Any) -> bytes:
    """A value as one line of JSON, ended by a newline.

    No reader finds another line end in it, whatever it takes for one.
    """
    return as_one_line(_encoder.encode(value)) + b"\n"


def as_one_line(encoded: bytes) -> bytes:
    """JSON in which U+0085, U+2028 and U+2029 are escaped."""
    for raw, escaped in _LINE_ENDS.items():
        encoded = encoded.replace(raw, escaped)
    return encoded


class LineSplitter:
    """The lines of a body that arrives in blocks. They end at ``\\n`` only."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def add(self, block: bytes) -> list[bytes]:
        """The lines that this block ends, without their ends."""
        self._parts.append(block)
        if b"\n" not in block:
            return []
        *lines, rest = b"".join(self._parts).split(b"\n")
        self._parts = [rest]
        return lines


# Prompts of which no two begin alike.


def random_prompts(
    lengths: Sequence[int], vocab_size: int, *, seed: int
) -> list[list[int]]:
    """Prompts of these lengths whose first tokens all differ.

    The ids are from the middle of the vocabulary, where no model has special tokens,
    unless there are more prompts than ids.

    Raises:
        ConfigError: there are more prompts than ids in the vocabulary.
    """
    if len(lengths) > vocab_size:
        raise ConfigError(
            f"--rows {len(lengths)} is more than the {vocab_size} tokens of the "
            "vocabulary, so that prompts cannot all differ; give fewer."
        )
    chance = random.Random(seed)
    ids = range(vocab_size // 8, vocab_size // 2)
    if len(ids) < len(lengths):
        ids = range(vocab_size)
    firsts = chance.sample(ids, len(lengths))
    return [
        [first, *chance.choices(ids, k=length - 1)]
        for first, length in zip(firsts, lengths, strict=True)
    ]


def authorization(api_key: str | None) -> dict[str, str]:
    """The headers of a call with a key, none without one. ConfigError: no header can have it."""
    if not api_key:
        return {}
    if not re.fullmatch("[!-~]([ -~]*[!-~])?", api_key):
        raise ConfigError(
            "the API key has a line break, a space at an end, or a character that is not "
            "ASCII, so it cannot be sent: copy it again."
        )
    return {"Authorization": f"Bearer {api_key}"}
