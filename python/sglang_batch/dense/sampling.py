"""The next token of each row, chosen from the logits of one step.

Rows with different settings share a step. The logits are changed in the order of
SGLang: frequency and presence penalties, ending tokens that come too early, repetition
penalty, grammar, bias, temperature; then top-k, top-p and min-p, each of which looks at
the probabilities before any of them.

Each row draws one uniform number per token, which is a hash of its seed and the number
of its answer tokens. So its tokens do not depend on other rows or on its place in the
batch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from .row_request import LogprobsWanted, Sampling, TokenLogprobs

Changes: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float32]]

GREEDY_BELOW = 1e-6
"""A temperature below this takes the most probable token."""

# Rows of logits whose log probabilities are computed at once, so that a long prompt
# needs little memory apart from its logits.
_CHUNK = 256


class RowSampler:
    """The sampling settings of one row, and the tokens that its penalties count.

    Args:
        seed: of the row if ``sampling`` has none; see :func:`drawn_seed`.
        ending_ids: tokens that are not chosen before ``min_new_tokens``.
    """

    def __init__(
        self,
        sampling: Sampling,
        *,
        vocab_size: int,
        seed: int,
        ending_ids: Iterable[int] = (),
        min_new_tokens: int = 0,
    ) -> None:
        self.sampling = sampling
        self.seed = seed if sampling.seed is None else sampling.seed
        self.num_tokens = 0
        self.greedy = sampling.temperature < GREEDY_BELOW or sampling.top_k == 1
        self.temperature = (
            1.0 if sampling.temperature < GREEDY_BELOW else sampling.temperature
        )
        self._min_new_tokens = min_new_tokens
        self._ending = _ids(i for i in ending_ids if 0 <= i < vocab_size)
        self._bias_ids = _ids(sampling.logit_bias)
        self._bias = np.array(list(sampling.logit_bias.values()), dtype=np.float32)
        # How often each token of the answer came, in the order of their first coming.
        self._counts: Counter[int] = Counter()
        self._counted = bool(
            sampling.frequency_penalty
            or sampling.presence_penalty
            or sampling.repetition_penalty != 1.0
        )

    def append(self, token: int) -> None:
        self.num_tokens += 1
        if self._counted:
            self._counts[token] += 1

    def uniform(self) -> float:
        """The number in (0, 1) that draws the next token."""
        # With 50 bits, the product with any sum of probabilities is less than that sum.
        return ((_hash(self.seed, self.num_tokens) >> 14) + 0.5) / 2.0**50

    # Each returns token ids, int64, and as many float32 values; or None for no change.

    def additive(self) -> Changes | None:
        each, once = self.sampling.frequency_penalty, self.sampling.presence_penalty
        if not self._counts or not (each or once):
            return None
        counts = np.array(list(self._counts.values()), np.int64)
        return _ids(self._counts), (-each * counts - once).astype(np.float32)

    def scaling(self) -> Changes | None:
        penalty = self.sampling.repetition_penalty
        if not self._counts or penalty == 1.0:
            return None
        return _ids(self._counts), np.full(len(self._counts), penalty, np.float32)

    def forbidden(self) -> Changes | None:
        if self.num_tokens >= self._min_new_tokens or not len(self._ending):
            return None
        return self._ending, np.full(len(self._ending), -np.inf, np.float32)

    def bias(self) -> Changes | None:
        return (self._bias_ids, self._bias) if len(self._bias_ids) else None


@dataclass(frozen=True, slots=True)
class Chosen:
    """The outcome of a step.

    tokens: one per row, -1 for a row in ``failed``.
    failed: why no token could be chosen, in a sentence, by row.
    logprobs: one per row, None where none are wanted or the row failed.
    """

    tokens: Sequence[int]
    failed: Mapping[int, str]
    logprobs: Sequence[TokenLogprobs | None]


def drawn_seed(engine_seed: int, number: int) -> int:
    """The seed of the ``number``-th row that brought none, the same in every run."""
    return _hash(engine_seed, number)


def choose(
    logits: Any,
    samplers: Sequence[RowSampler],
    *,
    mask: Any = None,
    wanted: Sequence[LogprobsWanted | None] | None = None,
) -> Chosen:
    """Choose a token for each row. The caller adds it with the sampler's ``append``.

    Log probabilities are those that SGLang reports: of the logits with penalties, grammar, bias
    and temperature, where 0 counts as 1, before top-k, top-p and min-p.

    Args:
        logits: ``[rows, vocab]``, float32 on any device. Changed in place.
        mask: of the rows that have a grammar, called to change the logits in place.
        wanted: log probabilities, one per row.
    """
    with torch.inference_mode():
        best, tokens = _most_probable(logits)
        failed = {
            int(row): "the model's logits have NaN or infinity in them"
            for row in (~best.isfinite()).nonzero().flatten().tolist()
        }
        if _change(logits, samplers, mask):
            best, tokens = _most_probable(logits)
            for row in (~best.isfinite()).nonzero().flatten().tolist():
                failed.setdefault(
                    int(row),
                    "grammar, min_new_tokens and logit_bias together leave no token "
                    "that may be chosen; loosen one of them",
                )
        chosen: list[int] = tokens.tolist()
        drawn = [
            row
            for row, sampler in enumerate(samplers)
            if not sampler.greedy and row not in failed
        ]
        if drawn:
            at_rows = [samplers[row] for row in drawn]
            probs = _scaled(_select(logits, drawn), at_rows).softmax(dim=-1)
            _filter(probs, [sampler.sampling for sampler in at_rows])
            for row, token in zip(drawn, _draw(probs, at_rows), strict=True):
                chosen[row] = token
        for row in failed:
            chosen[row] = -1
        found: list[TokenLogprobs | None] = [None] * len(samplers)
        asked = {
            row: want
            for row, want in enumerate(wanted or ())
            if want is not None and chosen[row] >= 0
        }
        if rows := list(asked):
            scaled = _scaled(_select(logits, rows), [samplers[row] for row in rows])
            tokens_of = [chosen[row] for row in rows]
            at_places = _token_logprobs(scaled, tokens_of, list(asked.values()))
            for row, logprobs in zip(rows, at_places, strict=True):
                found[row] = logprobs
        return Chosen(chosen, failed, found)


def prompt_logprobs(
    logits: Any, tokens: Sequence[int], wanted: LogprobsWanted
) -> list[TokenLogprobs]:
    """Log probabilities of tokens of a prompt. ``prompt_from`` is not looked at.

    Args:
        logits: ``[tokens, vocab]``, of any floating type; row i is the model's output at the
            position before that of ``tokens[i]``.
    """
    with torch.inference_mode():
        found: list[TokenLogprobs] = []
        for start in range(0, len(tokens), _CHUNK):
            part = tokens[start : start + _CHUNK]
            rows = logits[start : start + _CHUNK].float()
            found += _token_logprobs(rows, part, [wanted] * len(part))
        return found


def _hash(seed: int, number: int) -> int:
    """64 well-mixed bits of two integers."""
    text = f"{seed} {number}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def _ids(ids: Iterable[int]) -> NDArray[np.int64]:
    return np.array(list(ids), dtype=np.int64)


def _select(logits: Any, rows: Sequence[int]) -> Any:
    """Those rows, which are only copied if others are left out."""
    if len(rows) == len(logits):
        return logits
    return logits[torch.tensor(rows, device=logits.device)]


def _most_probable(logits: Any) -> tuple[Any, Any]:
    """The largest logit of each row, NaN if the row has one, and its token."""
    tokens = logits.argmax(dim=-1, keepdim=True)
    return logits.gather(-1, tokens).squeeze(-1), tokens.squeeze(-1)


def _change(logits: Any, samplers: Sequence[RowSampler], mask: Any) -> bool:
    """Apply penalties, grammar and bias in place. Whether there were any."""
    changed = mask is not None
    scaling = RowSampler.scaling
    for step in (RowSampler.additive, RowSampler.forbidden, scaling, RowSampler.bias):
        if step is RowSampler.bias and mask is not None:
            mask(logits)
        if at := _gathered(logits, [step(sampler) for sampler in samplers]):
            rows, ids, values = at
            old = logits[rows, ids]
            if step is scaling:
                logits[rows, ids] = torch.where(old < 0, old * values, old / values)
            else:
                logits[rows, ids] = old + values
            changed = True
    return changed


def _gathered(
    logits: Any, of_rows: Sequence[Changes | None]
) -> tuple[Any, Any, Any] | None:
    """Row, token id and value of each entry, on the device of the logits."""
    found = [(row, *entry) for row, entry in enumerate(of_rows) if entry is not None]
    if not found:
        return None
    rows, ids, values = zip(*found, strict=True)
    at = (
        np.repeat(rows, list(map(len, ids))),
        np.concatenate(ids),
        np.concatenate(values),
    )
    first, second, third = (torch.from_numpy(each).to(logits.device) for each in at)
    return first, second, third


def _scaled(logits: Any, samplers: Sequence[RowSampler]) -> Any:
    """Logits, less the largest of their row, divided by its temperature."""
    temperatures = torch.tensor(
        [[sampler.temperature] for sampler in samplers],
        dtype=torch.float32,
        device=logits.device,
    )
    # Without the subtraction, a low temperature could make large logits infinite.
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperatures


def _filter(probs: Any, settings: Sequence[Sampling]) -> None:
    """Set the probabilities of tokens outside top-k, top-p or min-p to 0, in place.

    A token is in top-p if those before it in descending order sum to at most ``top_p``.
    """
    vocab = probs.shape[-1]
    least = [sampling.min_p for sampling in settings]
    if any(least):
        thresholds = probs.amax(dim=-1) * torch.tensor(least, device=probs.device)
    ranked: defaultdict[int, list[int]] = defaultdict(list)
    for row, sampling in enumerate(settings):
        k = vocab if sampling.top_k == -1 else min(sampling.top_k, vocab)
        if k < vocab or sampling.top_p < 1.0:
            ranked[k].append(row)
    # Rows of one k at a time: the order of equal probabilities may depend on k.
    for k, rows in ranked.items():
        index = torch.tensor(rows, device=probs.device)
        part = probs[index]
        top_ps = torch.tensor(
            [[settings[row].top_p] for row in rows],
            dtype=torch.float64,
            device=probs.device,
        )
        if k == vocab:
            keep_nucleus(part, top_ps)
            probs[index] = part
            continue
        ordered, ids = part.topk(k, dim=-1)
        # All of the probabilities may sum to a little more than 1.
        ordered[outside(ordered, top_ps) & (top_ps < 1.0)] = 0.0
        probs[index] = torch.zeros_like(part).scatter_(-1, ids, ordered)
    if any(least):
        probs[probs < thresholds[:, None]] = 0.0


def _draw(probs: Any, samplers: Sequence[RowSampler]) -> list[int]:
    """One token per row by its weight, ``[rows, vocab]``, which need not sum to 1."""
    sums = probs.double().cumsum(dim=-1)
    uniforms = torch.tensor(
        [[sampler.uniform()] for sampler in samplers],
        dtype=torch.float64,
        device=probs.device,
    )
    found = torch.searchsorted(sums, uniforms * sums[:, -1:], right=True)
    tokens: list[int] = found.squeeze(-1).tolist()
    return tokens


def _token_logprobs(
    logits: Any, tokens: Sequence[int], wanted: Sequence[LogprobsWanted]
) -> list[TokenLogprobs]:
    """Of float32 logits ``[tokens, vocab]``; minus infinity becomes the least float."""
    logprobs = logits.log_softmax(dim=-1).clamp_(min=torch.finfo(torch.float32).min)
    device = logits.device
    of_tokens = logprobs.gather(-1, torch.tensor(tokens, device=device)[:, None])
    top: list[list[tuple[int, float]]] = [[] for _ in tokens]
    by_count: defaultdict[int, list[int]] = defaultdict(list)
    for row, want in enumerate(wanted):
        if want.top:
            by_count[min(want.top, logits.shape[-1])].append(row)
    for count, rows in by_count.items():
        values, ids = _select(logprobs, rows).topk(count, dim=-1)
        for row, some_ids, some_values in zip(
            rows, ids.tolist(), values.tolist(), strict=True
        ):
            top[row] = list(zip(some_ids, some_values, strict=True))
    return [
        TokenLogprobs(
            token=token,
            of_token=of_token,
            top=tuple(top[row]),
            of_ids=tuple(logprobs[row, list(want.token_ids)].tolist())
            if want.token_ids
            else (),
        )
        for row, (token, of_token, want) in enumerate(
            zip(tokens, of_tokens.squeeze(-1).tolist(), wanted, strict=True)
        )
    ]


def keep_nucleus(probs: Any, top_ps: Any) -> None:
    """Set the probabilities of tokens outside top-p to 0, in place.

    A token is in top-p if those before it in descending order sum to at most ``top_p``.
    Of equal probabilities, that of the smaller id comes first.

    Args:
        probs: float32 ``[rows, vocab]``, not negative.
        top_ps: float64 ``[rows, 1]``, from 0 to less than 1.
    """
    ordered = _descending(probs)
    num_kept = (~outside(ordered, top_ps)).sum(dim=-1, keepdim=True)
    least = ordered.gather(-1, num_kept - 1)
    following = ordered.gather(-1, num_kept.clamp(max=probs.shape[-1] - 1))
    probs.masked_fill_(probs < least, 0.0)
    split = ((following == least) & (num_kept < probs.shape[-1])).squeeze(-1)
    if bool(split.any()):  # some of those that equal the least are outside
        num_equal = num_kept - (ordered > least).sum(dim=-1, keepdim=True)
        part = probs[split]
        equal = part == least[split]
        late = equal & (equal.cumsum(dim=-1) > num_equal[split])
        probs[split] = part.masked_fill_(late, 0.0)


def outside(ordered: Any, top_ps: Any) -> Any:
    """Which tokens are outside top-p, bool like ``ordered``.

    Args:
        ordered: probabilities in descending order, float32 ``[rows, tokens]``.
        top_ps: float64 ``[rows, 1]``.
    """
    before = ordered.double().cumsum(dim=-1) - ordered
    return before > top_ps


def _descending(probs: Any) -> Any:
    if probs.device.type != "cpu":
        return probs.sort(dim=-1, descending=True).values
    # On a CPU, numpy sorts numbers by vector instructions, in a thirtieth of the time.
    return torch.from_numpy(np.sort(probs.numpy(), axis=-1)).flip(-1)
