"""Requests of a job that must have equal answers: one of them is computed for all.

Two requests are equal if endpoint and body are, whatever the order of the body's keys, and apart
from fields on which no answer depends: ``rid``, and ``user`` unless the answer repeats it. Values are
compared byte for byte: the order of keys in a tool or a schema is that of its text in the prompt.

Their answers must be equal where nothing is drawn at random. Which fields say so depends on the
endpoint: one that SGLang does not read there says nothing. A seed does not settle an answer,
because SGLang draws from it only with ``--enable-deterministic-inference``. Requests whose
sampling is left to a default are not merged, as the default may be the model's own.
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
from .protocol import ENDPOINTS, TRANSCRIPTIONS_URL

_RESPONSES_URL = "/v1/responses"
_GENERATE_URL = "/generate"  # calls of programs
# The values that make an endpoint's answers greedy, by the field that SGLang reads there.
_GREEDY_TEXT = {"temperature": 0, "top_k": 1}
_GREEDY: dict[str, dict[str, int]] = {
    "/v1/chat/completions": _GREEDY_TEXT,
    "/v1/completions": _GREEDY_TEXT,
    _RESPONSES_URL: _GREEDY_TEXT,
    "/v1/messages": _GREEDY_TEXT,
    TRANSCRIPTIONS_URL: {"temperature": 0},
    # Theirs are in an object, or in a list of one for each prompt.
    _GENERATE_URL: _GREEDY_TEXT,
}
# A body without any of these leaves its sampling to defaults.
_NAMES = tuple(name.encode() for name in _GREEDY_TEXT)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_params = msgspec.json.Decoder(dict[str, msgspec.Raw] | list[dict[str, msgspec.Raw]])
_number = msgspec.json.Decoder(int | float | None)


def request_key(request: BatchRequestInput) -> bytes | None:
    """16 bytes, the same for equal requests. None if its answer may differ from theirs."""
    url = request.url
    endpoint = ENDPOINTS.get(url)
    # Vectors and scores have nothing random.
    exact = endpoint is not None and not endpoint.generates
    if not exact and not any(name in request.body for name in _NAMES):
        return None
    try:
        fields = _fields.decode(request.body)
        if not exact and not _is_greedy(url, fields):
            return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    fields.pop("rid", None)
    if url != _RESPONSES_URL:  # its answers repeat it
        fields.pop("user", None)
    key = hashlib.blake2b(request.url.encode(), digest_size=16)
    for name in sorted(fields):
        # Lengths tell where a name and a value end.
        key.update(b"%d %d " % (len(name), len(fields[name])))
        key.update(name.encode())
        key.update(fields[name])
    return key.digest()


def _is_greedy(url: str, body: dict[str, msgspec.Raw]) -> bool:
    """Whether nothing is drawn. Raises msgspec.DecodeError for unusable values."""
    greedy = _GREEDY.get(url)
    if greedy is None:
        return False
    params: dict[str, msgspec.Raw] | list[dict[str, msgspec.Raw]] = body
    if url == _GENERATE_URL:
        if "sampling_params" not in body:
            return False
        params = _params.decode(body["sampling_params"])
    each = params if isinstance(params, list) else [params]
    return bool(each) and all(_has_any(one, greedy) for one in each)


def _has_any(params: dict[str, msgspec.Raw], values: dict[str, int]) -> bool:
    """Whether one of these fields has its value. All of them are read."""
    found = [
        _number.decode(params[name]) == value
        for name, value in values.items()
        if name in params
    ]
    return any(found)


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

    The first of equal ones is computed, and before all others those of ``first``.
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
    places = np.flatnonzero(hashes)
    places = places[hashes[places].argsort(kind="stable")]
    found = hashes[places]
    equal_to_next = np.flatnonzero(found[1:] == found[:-1])
    ends = np.flatnonzero(np.diff(equal_to_next) > 1) + 1
    for stretch in np.split(equal_to_next, ends):
        if len(stretch):
            yield places[stretch[0] : stretch[-1] + 2]
