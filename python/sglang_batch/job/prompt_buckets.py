"""Requests dealt to buckets by how their prompts begin, before anything is rendered.

A job that is too large to be planned in one piece is planned bucket by bucket. Rendering all
of it to find them would take as long as sending it. But prompts whose text begins alike have
tokens that begin alike, so the text in the lines is enough: the parts of a body that a chat
template puts into the prompt, in the order in which most of them do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from ..planner.prefixes.bucket_splitters import (
    Splitters,
    buckets_of,
    choose_splitters,
    sample_numbers,
)
from ..planner.requests import Int32s, Int64s
from ..request import BatchRequestInput, Requests

# Bytes of text compared at once, and of the sample. Four times as much is in memory.
MAX_BYTES = 1 << 26
# Of one prompt. Prompts that are equal up to there are in one bucket.
PROMPT_BYTES = 1 << 18
# Memory is what buckets are for. So a family is divided, where there is no better place, unless
# its prefix is longer than all that its requests on one side have for themselves.
MAX_REPEATED = 1.0


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
        bucket_requests: most in a bucket, about. It has more where prompts are equal, or where
            cutting a family does not pay.
    """
    num_buckets = -(-len(requests) // bucket_requests)
    splitters = _splitters(requests, num_buckets, seed)
    bucket = np.empty(len(requests), np.int32)
    first = 0
    for texts in _blocks(requests):
        bucket[first : first + len(texts)] = buckets_of(*_arrays(texts), splitters)
        first += len(texts)
    order = np.argsort(bucket, kind="stable")
    ends = np.cumsum(np.bincount(bucket, minlength=splitters.num_buckets))
    dealt = np.split(order.astype(np.int64), ends[:-1])
    return [numbers for numbers in dealt if len(numbers)]


def _splitters(requests: Requests, num_buckets: int, seed: int) -> Splitters:
    """From as much of a sample as fits into memory."""
    numbers = sample_numbers(len(requests), num_buckets, seed)
    texts: dict[int, bytes] = {}
    size = 0
    for number in np.random.default_rng(seed).permutation(numbers).tolist():
        texts[number] = text = prompt_text(requests[number])
        size += len(text)
        if size > MAX_BYTES:
            break
    sample = _arrays([texts[number] for number in sorted(texts)])
    return choose_splitters(
        *sample, len(requests), num_buckets, max_repeated=MAX_REPEATED
    )


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
