"""Prefill of prompts, apart from decode (Baton 4.2), each shared prefix once.

Prompts of a batch end differently, so they are padded behind: in a causal model no token
sees the padding, and columns of a row stay its positions. Those of about the same length
are computed together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from .model import LoadedModel
from .row_request import DenseRequest
from .slab import RowKv

# Costs of a forward pass besides those of its tokens, in tokens: it reads all weights and calls
# hundreds of kernels. Unmeasured on accelerators.
_PASS = {"cpu": 16}
_PASS_OF_OTHERS = 512


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt whose KV is computed.

    kv: of the row, for :meth:`.rows.Rows.join`.
    logits: float32 ``[vocab]``, for the first token of the answer.
    prompt_logits: float32 ``[tokens, vocab]`` from ``logprobs.prompt_from`` on, or None.
    cached_tokens: tokens of it that were computed before, for another prompt.
    """

    request: DenseRequest
    kv: Any
    logits: torch.Tensor
    prompt_logits: torch.Tensor | None
    cached_tokens: int


class Prefill:
    """Computes prompts in the order of a plan, in which those that share a prefix follow each
    other: the KV of the last prompt is all that has to be kept.

    Args:
        max_tokens: of a batch, padding included.
        shortest: a shared prefix of fewer tokens is computed again.

    Attributes:
        computed_tokens: of all prompts so far, without padding.
    """

    def __init__(self, model: LoadedModel, max_tokens: int, shortest: int) -> None:
        self._model = model
        self._max_tokens = max_tokens
        self._shortest = shortest
        self._path: list[int] = []
        self._path_kv: RowKv | None = None
        self.computed_tokens = 0

    def compute(
        self, requests: Sequence[DenseRequest], following: DenseRequest | None = None
    ) -> Iterator[Prefilled]:
        """Prefill requests, in their order as far as prefixes are concerned. ``following``: the
        request after the last of these, if it is known.
        """
        todo = list(requests)
        while todo:
            first = todo[0]
            shared, had = self._prepare_path(first, [*todo[1:], following][0])
            group = [first]
            if prompt_from(first) is None:
                group += self._companions(todo, shared, following)
            todo = todo[len(group) :]
            for batch in padded_batches(
                group, self._model.device, self._max_tokens, shared
            ):
                # The tokens of the prefix that are new were computed for the first.
                cached = [had if each is first else shared for each in batch]
                yield from self._run(batch, shared, cached)

    def forget(self) -> None:
        """Release the KV of the last prompt."""
        self._path, self._path_kv = [], None

    def _prepare_path(
        self, first: DenseRequest, second: DenseRequest | None
    ) -> tuple[int, int]:
        """Have the prefix that a request shares, with the one before or after it. Returns its
        length, 0 if it is too short, and how much of it was there before.
        """
        limit = len(first.input_ids) - 1
        start = prompt_from(first)
        if start is not None:
            limit = min(limit, start)
        before = min(_common(self._path, first.input_ids), limit)
        after = 0
        if second is not None:
            after = min(_common(second.input_ids, first.input_ids), limit)
            after = min(after, len(second.input_ids) - 1)
        before = before if before >= self._shortest else 0
        if after < self._shortest or after - before < self._shortest:
            return before, before
        prefix = list(first.input_ids[:after])
        cache, _ = self._forward([prefix[before:]], before, [after - before - 1])
        self._path, self._path_kv = prefix, row_of(cache, 0, after)
        return after, before

    def _companions(
        self, todo: Sequence[DenseRequest], shared: int, following: DenseRequest | None
    ) -> list[DenseRequest]:
        """The requests behind the first that need no more of the path."""
        found: list[DenseRequest] = []
        others = todo[1:]
        after = [*others[1:], following]
        for request, then in zip(others, after, strict=False):
            if prompt_from(request) is not None:
                break
            ids = request.input_ids
            if shared and (len(ids) <= shared or _common(self._path, ids) < shared):
                break
            if _common(todo[0].input_ids, ids) - shared >= self._shortest:
                break
            if then is not None and (
                _common(ids, then.input_ids) - shared >= self._shortest
            ):
                break  # the two will share more
            found.append(request)
        return found

    def _run(
        self, batch: Sequence[DenseRequest], shared: int, cached: Sequence[int]
    ) -> Iterator[Prefilled]:
        """Compute the tokens after the path. ``cached``: see :class:`Prefilled`."""
        suffixes = [list(request.input_ids[shared:]) for request in batch]
        start = prompt_from(batch[0])
        last = None if start is not None else [len(ids) - 1 for ids in suffixes]
        cache, logits = self._forward(suffixes, shared, last)
        for row, request in enumerate(batch):
            kv = row_of(cache, row, len(request.input_ids))
            if row == len(batch) - 1:
                self._path, self._path_kv = list(request.input_ids), kv
            if start is None:
                yield Prefilled(request, kv, logits[row], None, cached[row])
            else:
                yield Prefilled(
                    request, kv, logits[row, -1], logits[row, start - shared :],
                    cached[row],
                )  # fmt: skip

    def _forward(
        self, suffixes: Sequence[list[int]], shared: int, last: Sequence[int] | None
    ) -> tuple[DynamicCache, torch.Tensor]:
        """The cache and logits of tokens after ``shared`` ones of the path."""
        device, rows = self._model.device, len(suffixes)
        longest = max(map(len, suffixes))
        padded = [ids + ids[-1:] * (longest - len(ids)) for ids in suffixes]
        new = torch.tensor(padded, device=device)
        cache = self._cache(shared, rows)
        positions = torch.arange(shared, shared + longest, device=device)
        mask = torch.ones(rows, shared + longest, dtype=torch.int64, device=device)
        logits = self._model.logits(new, mask, positions.expand(rows, -1), cache, last)
        self.computed_tokens += sum(map(len, suffixes))
        return cache, logits

    def _cache(self, length: int, rows: int) -> DynamicCache:
        """A cache that holds so many tokens of the path, for each row."""
        cache = DynamicCache()
        if length:
            assert self._path_kv is not None
            for number, (keys, values) in enumerate(self._path_kv.layers):
                cache.update(
                    keys[None, :, :length].expand(rows, -1, -1, -1),
                    values[None, :, :length].expand(rows, -1, -1, -1),
                    number,
                )
        return cache


def row_of(cache: Cache, row: int, length: int) -> RowKv:
    """A copy of a row's first tokens of a cache, ``[rows, heads, tokens, head_dim]``."""
    return RowKv(
        [
            (layer.keys[row, :, :length].clone(), layer.values[row, :, :length].clone())
            for layer in cache.layers
        ]
    )


def prompt_from(request: DenseRequest) -> int | None:
    return None if request.logprobs is None else request.logprobs.prompt_from


def padded_batches(
    requests: Sequence[DenseRequest],
    device: torch.device,
    max_tokens: int,
    shared: int = 0,
) -> list[list[DenseRequest]]:
    """The batches of requests that cost least, longest first.

    Args:
        max_tokens: of a batch, padding included, unless it is one request.
        shared: tokens of each prompt that are there already.
    """
    ordered = sorted(requests, key=lambda request: -len(request.input_ids))
    lengths = [len(request.input_ids) - shared for request in ordered]
    each = _PASS.get(device.type, _PASS_OF_OTHERS)
    cuts = cheapest_cuts(lengths, each, max_tokens)
    return [ordered[begin:end] for begin, end in cuts]


def cheapest_cuts(
    lengths: Sequence[int], each: int, most: int
) -> list[tuple[int, int]]:
    """Where to cut prompts of falling length into batches, as ranges. A batch costs ``each`` and
    its tokens, prompts times the longest: at most ``most`` unless it is one prompt.
    """
    costs, begins = [0], [0]
    for end in range(1, len(lengths) + 1):
        options = [(costs[end - 1] + each + lengths[end - 1], end - 1)]
        for begin in range(end - 2, -1, -1):
            tokens = lengths[begin] * (end - begin)
            if tokens > most:
                break
            options.append((costs[begin] + each + tokens, begin))
        cost, begin = min(options)
        costs.append(cost)
        begins.append(begin)
    cuts = []
    end = len(lengths)
    while end:
        cuts.append((begins[end], end))
        end = begins[end]
    return cuts[::-1]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length
