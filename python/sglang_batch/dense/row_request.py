"""Requests, answers and settings of the dense engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..batch_api.stop_rules import NO_RULES, Cut, StopRules
from .admission import ByLength


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one row chooses its tokens. The defaults are greedy.

    temperature: 0 takes the most probable token.
    top_k: the k most probable tokens, -1 for all.
    top_p: the smallest set of tokens whose probabilities sum to this.
    min_p: tokens with at least this share of the largest probability.
    frequency_penalty, presence_penalty: subtracted from the logits of tokens in the answer, by
        count and once.
    repetition_penalty: divides positive logits of these tokens and multiplies negative ones.
    logit_bias: added to logits, by token id.
    seed: the same seed, row and logits give the same tokens, whatever other rows run. None
        draws one.
    grammar: a kind of :mod:`sglang_batch.srt.dense.grammars` and its text, or None.
    """

    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    grammar: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a row ends.

    max_new_tokens: most tokens of the answer, at least 1.
    min_new_tokens: no ending token is chosen before so many tokens.
    token_ids: tokens that end the answer, and are its last one. With those of the model
        unless ``ignore_eos``.
    strings, regexes: end the answer once its text has one.
    rules: end it where the rest is useless.
    skip_special_tokens: whether these are no part of the text that rules read.
    reasoning_end: tokens behind which rules read the text, none without reasoning.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    ignore_eos: bool = False
    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    regexes: tuple[str, ...] = ()
    rules: StopRules = NO_RULES
    skip_special_tokens: bool = True
    reasoning_end: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LogprobsWanted:
    """Log probabilities of an answer, and of its prompt.

    top: most probable tokens at each position.
    token_ids: further tokens at each position.
    prompt_from: first position of the prompt whose log probability is wanted, None for none
        of the prompt.
    """

    top: int = 0
    token_ids: tuple[int, ...] = ()
    prompt_from: int | None = None


@dataclass(frozen=True, slots=True)
class DenseRequest:
    """One row: a prompt and how it is continued.

    rid: unique among the open requests.
    input_ids: token ids of the prompt, at least one. Of an encoder-decoder, the encoder's.
    place: rows join in this order; smaller first, equal in the order of their arrival.
    priority: rows of a higher one join first, and may displace others.
    expected_len: tokens that the answer is expected to have, None for ``max_new_tokens``.
    by_length: how it joins among rows of similar length. None: in the order of ``place``.
    """

    rid: str
    input_ids: Sequence[int]
    stopping: Stopping
    sampling: Sampling = Sampling()
    logprobs: LogprobsWanted | None = None
    place: int = 0
    priority: int = 0
    expected_len: int | None = None
    by_length: ByLength | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at one position.

    of_token: of the token there. None for the first one of a prompt that was asked for.
    top: ``(token, log probability)``, most probable first.
    of_ids: of the ``token_ids`` that were asked for, in that order.
    """

    token: int
    of_token: float | None
    top: Sequence[tuple[int, float]] = ()
    of_ids: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class DenseAnswer:
    """The end of a row.

    output_ids: the tokens, with the one that ended it.
    reason: ``length``, ``stop`` or ``abort``.
    matched: for ``stop``, the token id, the text or the rule that ended it.
    error: for ``abort``, why, in a sentence.
    cached_tokens: tokens of the prompt that were computed for another row.
    vector: float32 numbers of an embedding, which has no tokens.
    """

    output_ids: Sequence[int]
    reason: str
    matched: int | str | Cut | None = None
    error: str | None = None
    cached_tokens: int = 0
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    vector: Sequence[float] = ()


OnAnswer = Callable[[DenseRequest, DenseAnswer], None]
"""Called in the engine's thread when a row has ended."""


@dataclass(frozen=True, slots=True)
class DenseSettings:
    """Limits of the batch.

    max_rows: most rows that decode together.
    max_cells: most KV cells, rows times columns, of the batch. None: as the memory allows.
    host_cells: most KV cells of rows that wait: those that ran are in host memory, and prompts
        that were computed ahead on the device. The rest is computed again.
    prefill_tokens: most tokens of a prefill, padding included, unless it is one prompt.
    shortest_shared: a shared prefix of fewer tokens is computed for each prompt.
    seed: of rows that name none.
    step_cells: KV cells that are read in the time of a decode step without rows, with which rows
        that join by length are compared. By default that of a model with 24 times as many
        parameters as numbers in a token's keys and values.
    """

    max_rows: int = 32
    max_cells: int | None = None
    host_cells: int = 1 << 20
    prefill_tokens: int = 4096
    shortest_shared: int = 16
    seed: int = 0
    step_cells: float = 8000.0
