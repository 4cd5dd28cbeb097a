"""Requests of a job that must have equal answers: one of them is computed for all.

Two requests are equal if endpoint and body are, whatever the order of the body's keys, and apart
from ``user``. Values are compared byte for byte: the order of keys in a tool or a schema is that of
its text in the prompt. Their answers must be equal where nothing is drawn at random, or all of it from the same
seed. Requests whose sampling is left to a default are not merged, as the default may be the
model's own.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..request import BatchRequestInput, RequestOutput, Requests, Sink

# Endpoints whose answers have nothing random.
_EXACT = {"/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/classify"}
# A body without any of these leaves its sampling to defaults.
_SAMPLING = ("temperature", "top_k", "seed", "sampling_seed")
_NAMES = tuple(name.encode() for name in _SAMPLING)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_number = msgspec.json.Decoder(int | float | None)
# Hashes are compared in so many parts.
_PARTS = 16


def request_key(request: BatchRequestInput) -> bytes | None:
    """16 bytes, the same for equal requests. None if its answer may differ from theirs."""
    exact = request.url in _EXACT
    if not exact and not any(name in request.body for name in _NAMES):
        return None
    try:
        fields = _fields.decode(request.body)
        if not exact and not _is_settled(fields):
            return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    fields.pop("user", None)
    key = hashlib.blake2b(request.url.encode(), digest_size=16)
    for name in sorted(fields):
        # Lengths tell where a name and a value end.
        key.update(b"%d %d " % (len(name), len(fields[name])))
        key.update(name.encode())
        key.update(fields[name])
    return key.digest()


def _is_settled(body: dict[str, msgspec.Raw]) -> bool:
    """Whether nothing is drawn, or all of it from a seed.

    Raises:
        msgspec.DecodeError: a value is none that an engine takes.
    """
    params = body
    if "sampling_params" in body:  # as SGLang's own endpoint has them
        params = _fields.decode(body["sampling_params"])
    temperature, top_k, seed, own_seed = (
        _number.decode(params[name]) if name in params else None for name in _SAMPLING
    )
    seeded = isinstance(seed, int) or isinstance(own_seed, int)
    return temperature == 0 or top_k == 1 or seeded


@dataclass(frozen=True, slots=True)
class EqualRequests:
    """The requests of a job that are computed, and those that get their answers.

    todo: int64, numbers of the former, in the order given.
    merged: the numbers of the latter, by that of the request whose answer they get.
    """

    todo: NDArray[np.int64]
    merged: dict[int, NDArray[np.int64]]
    requests: Requests

    @property
    def num_merged(self) -> int:
        return sum(map(len, self.merged.values()))

    def sharing(self, sink: Sink) -> Sink:
        """A sink that passes each answer on to all that are equal."""

        def share(request: BatchRequestInput, output: RequestOutput) -> None:
            sink(request, output)
            others = self.merged.get(request.index)
            if others is None:
                return
            shared = dataclasses.replace(output, merged_with=request.custom_id)
            for number in others.tolist():
                sink(self.requests[number], shared)

        return share


def find_equal(
    requests: Requests,
    todo: Sequence[int] | NDArray[np.int64],
    dedupe: str = "auto",
    first: Iterable[int] = (),
) -> EqualRequests:
    """Find equal requests among those of ``todo``, with a hash and a place for each.

    The first of equal requests is computed.

    Args:
        dedupe: the setting of :class:`~sglang_batch.config.OfflineBatchConfig`.
        first: numbers of requests that come before all others.
    """
    numbers = np.asarray(todo, np.int64)
    if dedupe == "off":
        return EqualRequests(numbers, {}, requests)
    before = set(first)
    if before:
        early = np.isin(numbers, list(before))
        numbers = np.concatenate([numbers[early], numbers[~early]])
    hashes = np.zeros(len(numbers), np.uint64)
    for place in range(len(numbers)):
        key = request_key(requests[int(numbers[place])])
        if key is not None:
            hashes[place] = int.from_bytes(key[:8], "little") or 1
    merged: dict[int, NDArray[np.int64]] = {}
    for places in _places_of_equal(hashes):
        alike: dict[bytes | None, list[int]] = {}
        for number in numbers[places].tolist():
            # The hash has half of the key.
            alike.setdefault(request_key(requests[number]), []).append(number)
        for computed, *others in alike.values():
            if others:
                merged[computed] = np.array(others, np.int64)
    if not merged:
        return EqualRequests(np.asarray(todo, np.int64), {}, requests)
    dropped = np.concatenate(list(merged.values()))
    kept = np.setdiff1d(np.asarray(todo, np.int64), dropped, assume_unique=True)
    return EqualRequests(kept, merged, requests)


def _places_of_equal(hashes: NDArray[np.uint64]) -> Iterator[NDArray[np.int64]]:
    """The places of each hash that is there several times, rising. 0 is no hash."""
    # One byte of each hash divides them into parts, as sorting all takes 8 bytes a hash.
    part_of = hashes.view(np.uint8)[:: hashes.itemsize] % _PARTS
    for part in range(_PARTS):
        places = np.flatnonzero((part_of == part) & (hashes != 0))
        places = places[hashes[places].argsort(kind="stable")]
        found = hashes[places]
        equal_to_next = np.flatnonzero(found[1:] == found[:-1])
        if not len(equal_to_next):
            continue
        ends = np.flatnonzero(np.diff(equal_to_next) > 1) + 1
        for stretch in np.split(equal_to_next, ends):
            yield places[stretch[0] : stretch[-1] + 2]
