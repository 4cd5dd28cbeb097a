"""Tokens chosen from logits, against direct computation of the distributions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_batch.dense.row_request import LogprobsWanted, Sampling
from sglang_batch.dense.sampling import (
    Chosen,
    RowSampler,
    choose,
    drawn_seed,
    prompt_logprobs,
)

VOCAB = 12


def sampler(sampling: Sampling, *, seed: int = 0, answer: Sequence[int] = ()):
    row = RowSampler(sampling, vocab_size=VOCAB, seed=seed)
    for token in answer:
        row.append(token)
    return row


def some_logits(rows: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randn(rows, VOCAB, generator=generator)


def shares(logits: Sequence[float], sampling: Sampling, draws: int) -> list[float]:
    """How often each token comes, by draws of rows that differ only in their seeds."""
    rows = [sampler(sampling, seed=drawn_seed(7, i)) for i in range(draws)]
    chosen = choose(torch.tensor([logits] * draws), rows)
    counts = Counter(chosen.tokens)
    return [counts[token] / draws for token in range(len(logits))]


def expected(logits: Sequence[float], sampling: Sampling) -> list[float]:
    """The distribution, in plain Python."""
    weights = [math.exp(logit / sampling.temperature) for logit in logits]
    probs = [weight / sum(weights) for weight in weights]
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept, before = [], 0.0
    for place, token in enumerate(order):
        within_k = sampling.top_k == -1 or place < sampling.top_k
        within_p = before <= sampling.top_p
        if within_k and within_p and probs[token] >= sampling.min_p * max(probs):
            kept.append(token)
        before += probs[token]
    total = sum(probs[token] for token in kept)
    return [p / total if token in kept else 0.0 for token, p in enumerate(probs)]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5),
        Sampling(temperature=2.0, top_k=4),
        Sampling(temperature=1.0, top_k=400),
        Sampling(temperature=1.5, top_p=0.7),
        Sampling(temperature=1.5, min_p=0.2),
        Sampling(temperature=3.0, top_k=8, top_p=0.8, min_p=0.1),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_the_settings_say(sampling: Sampling) -> None:
    logits = some_logits(1)[0].tolist()
    draws = 20_000
    wanted = expected(logits, sampling)
    found = shares(logits, sampling, draws)
    for share, probability in zip(found, wanted, strict=True):
        if probability == 0.0:
            assert share == 0.0
    possible = sum(1 for probability in wanted if probability)
    chi_square = sum(
        draws * (share - probability) ** 2 / probability
        for share, probability in zip(found, wanted, strict=True)
        if probability
    )
    # Its mean is the degrees of freedom and its variance twice that.
    freedom = possible - 1
    assert chi_square <= freedom + 4 * math.sqrt(2 * freedom)


def test_tokens_of_one_row_at_successive_places_are_independent() -> None:
    row = sampler(Sampling(temperature=1.0), seed=3)
    logits = torch.zeros(1, 4)
    pairs: Counter[tuple[int, int]] = Counter()
    last = 0
    for _ in range(4000):
        token = choose(logits.clone(), [row]).tokens[0]
        row.append(token)
        pairs[last, token] += 1
        last = token
    chi_square = sum((count - 250) ** 2 / 250 for count in pairs.values())
    assert len(pairs) == 16
    assert chi_square <= 15 + 4 * math.sqrt(30)


def test_greedy_rows_take_the_first_of_the_most_probable_tokens() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, 0.0, -1.0]])
    rows = [
        RowSampler(Sampling(), vocab_size=3, seed=0),
        RowSampler(Sampling(temperature=0.9, top_k=1), vocab_size=3, seed=0),
    ]
    assert choose(logits, rows) == Chosen([1, 0], {}, [None, None])


SETTINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 1, 3, 5, 100]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([{}, {2: 1.5, 7: -3.0}]),
    seed=st.integers(0, 5),
)
ANSWERS = st.lists(st.integers(0, VOCAB - 1), max_size=5)


@settings(deadline=None, max_examples=examples(150))
@given(
    rows=st.lists(st.tuples(SETTINGS, ANSWERS), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
    logit_seed=st.integers(0, 1000),
)
def test_a_row_chooses_alone_as_among_others(rows, order, logit_seed) -> None:
    logits = some_logits(len(rows), logit_seed)
    want = LogprobsWanted(top=3, token_ids=(0, 5))
    alone = []
    for row, (sampling, answer) in enumerate(rows):
        chosen = choose(
            logits[row : row + 1].clone(),
            [sampler(sampling, answer=answer)],
            wanted=[want],
        )
        alone.append((chosen.tokens[0], chosen.logprobs[0]))
    places = list(range(len(rows)))
    order.shuffle(places)
    together = choose(
        logits[places].clone(),
        [sampler(rows[place][0], answer=rows[place][1]) for place in places],
        wanted=[want] * len(places),
    )
    found = zip(together.tokens, together.logprobs, strict=True)
    assert dict(zip(places, found, strict=True)) == dict(enumerate(alone))


def test_rows_with_the_same_seed_agree_and_others_differ() -> None:
    sampling = Sampling(temperature=1.0, seed=11)

    def answer(sampling: Sampling, seed: int) -> list[int]:
        row = sampler(sampling, seed=seed)
        for step in range(40):
            row_logits = 0.1 * some_logits(1, step)
            row.append(token := choose(row_logits, [row]).tokens[0])
            tokens.append(token)
        return tokens[-40:]

    tokens: list[int] = []
    assert answer(sampling, 1) == answer(sampling, 2)
    assert answer(sampling, 1) != answer(replace(sampling, seed=12), 1)
    unseeded = replace(sampling, seed=None)
    assert answer(unseeded, 1) == answer(unseeded, 1)
    assert answer(unseeded, 1) != answer(unseeded, 2)


def test_drawn_seeds_differ_between_rows_and_engines() -> None:
    seeds = {drawn_seed(engine, row) for engine in range(20) for row in range(20)}
    assert len(seeds) == 400
    assert drawn_seed(3, 4) == drawn_seed(3, 4)


def changed_logits(sampling: Sampling, answer: Sequence[int], **more) -> list[float]:
    row = RowSampler(sampling, vocab_size=4, seed=0, **more)
    for token in answer:
        row.append(token)
    logits = torch.tensor([[2.0, -2.0, 1.0, -1.0]])
    choose(logits, [row])
    return logits[0].tolist()


def test_penalties_count_the_tokens_of_the_answer() -> None:
    both = Sampling(frequency_penalty=0.5, presence_penalty=0.25)
    assert changed_logits(both, [0, 1, 0]) == [0.75, -2.75, 1.0, -1.0]
    assert changed_logits(both, []) == [2.0, -2.0, 1.0, -1.0]


def test_repetition_penalty_sees_the_answer_after_other_penalties() -> None:
    sampling = Sampling(repetition_penalty=2.0)
    assert changed_logits(sampling, [0, 1, 3, 3]) == [1.0, -4.0, 1.0, -2.0]
    with_presence = replace(sampling, presence_penalty=1.0)
    assert changed_logits(with_presence, [0]) == [0.5, -2.0, 1.0, -1.0]


def test_bias_is_added_after_the_repetition_penalty() -> None:
    sampling = Sampling(repetition_penalty=2.0, logit_bias={0: 10.0, 1: -1.0})
    assert changed_logits(sampling, [0]) == [11.0, -3.0, 1.0, -1.0]


def test_ending_tokens_wait_for_min_new_tokens() -> None:
    row = RowSampler(
        Sampling(), vocab_size=3, seed=0, ending_ids=[2, 1, 77], min_new_tokens=2
    )
    found = []
    for _ in range(3):
        found.append(choose(torch.tensor([[0.0, 1.0, 2.0]]), [row]).tokens[0])
        row.append(found[-1])
    assert found == [0, 0, 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_finite_logits_fails_alone(bad, temperature) -> None:
    logits = some_logits(3)
    sampling = Sampling(temperature=temperature, frequency_penalty=0.1)
    rows = [sampler(sampling, seed=i, answer=[1]) for i in range(3)]
    good = choose(logits.clone(), rows).tokens
    logits[1, 4] = bad
    wanted = [LogprobsWanted(top=1)] * 3
    chosen = choose(logits, rows, wanted=wanted)
    assert list(chosen.failed) == [1]
    assert "NaN or infinity" in chosen.failed[1]
    assert list(chosen.tokens) == [good[0], -1, good[2]]
    assert [logprobs is None for logprobs in chosen.logprobs] == [False, True, False]


def test_minus_infinity_forbids_a_token_and_fails_a_row_of_nothing_else() -> None:
    logits = torch.full((2, VOCAB), -math.inf)
    logits[0, 3] = 0.0
    rows = [sampler(Sampling(temperature=1.0), seed=i) for i in range(2)]
    chosen = choose(logits, rows)
    assert chosen.tokens[0] == 3
    assert list(chosen.failed) == [1]


def test_a_row_whose_tokens_are_all_forbidden_says_what_to_loosen() -> None:
    row = RowSampler(
        Sampling(), vocab_size=2, seed=0, ending_ids=[0, 1], min_new_tokens=1
    )
    chosen = choose(torch.zeros(1, 2), [row])
    assert "min_new_tokens" in chosen.failed[0]


def test_a_very_low_temperature_is_still_finite() -> None:
    logits = torch.tensor([[1e34, 1e33, 0.0]])
    row = RowSampler(Sampling(temperature=1e-5), vocab_size=3, seed=0)
    assert choose(logits, [row]).tokens == [0]


def test_log_probabilities_are_of_the_changed_logits_after_temperature() -> None:
    sampling = Sampling(
        temperature=0.5, top_k=2, presence_penalty=1.0, logit_bias={1: -math.inf}
    )
    logits = some_logits(2)
    changed = logits[0].clone()
    changed[4] -= 1.0
    changed[1] = -math.inf
    direct = (changed / 0.5).log_softmax(-1)
    want = LogprobsWanted(top=4, token_ids=(4, 1))
    rows = [sampler(sampling, answer=[4]), sampler(Sampling())]
    chosen = choose(logits.clone(), rows, wanted=[want, None])
    found = chosen.logprobs[0]
    assert found is not None and chosen.logprobs[1] is None
    assert found.token == chosen.tokens[0]
    assert found.of_token == pytest.approx(direct[found.token].item(), abs=1e-5)
    values, ids = direct.topk(4)
    assert [token for token, _ in found.top] == ids.tolist()
    assert [p for _, p in found.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert found.of_ids[0] == pytest.approx(direct[4].item(), abs=1e-5)
    assert found.of_ids[1] == torch.finfo(torch.float32).min


def test_prompt_log_probabilities_are_of_the_logits_as_they_are() -> None:
    logits = some_logits(600).to(torch.bfloat16)
    tokens = [row % VOCAB for row in range(600)]
    direct = logits.float().log_softmax(-1)
    found = prompt_logprobs(logits, tokens, LogprobsWanted(top=2, token_ids=(3,)))
    assert [entry.token for entry in found] == tokens
    for row, entry in enumerate(found):
        assert entry.of_token == pytest.approx(direct[row, tokens[row]].item())
        assert entry.of_ids == pytest.approx([direct[row, 3].item()])
        values = direct[row].topk(2).values.tolist()
        assert [p for _, p in entry.top] == pytest.approx(values)
