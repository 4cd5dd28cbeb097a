"""Synthetic workloads against the published statistics that they reproduce."""

from __future__ import annotations

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from long_documents import (
    LONGEST,
    SHORTEST,
    documents,
)

from sglang_batch.errors import ConfigError
from sglang_batch.planner.prefixes.prefix_tree import build_prefix_tree
from sglang_batch.planner.requests import UNKNOWN
from sglang_batch.prediction.synthetic_jobs import TRACES
from sglang_batch.prediction.workloads.mix import (
    Workload,
    assemble,
    blend,
    blend_counts,
    combine,
    industry,
    seeds_of,
    shared_prefix_groups,
)
from sglang_batch.prediction.workloads.sources import (
    ARXIV,
    AZURE_CONV,
    BURSTGPT,
    MMLU,
    OPENVID,
    SHAREGPT,
    VOCAB_SIZE,
    Source,
    draw_sample,
    lognormal_lengths,
    random_tokens,
)

SOURCES = (BURSTGPT, AZURE_CONV, ARXIV, SHAREGPT, OPENVID, MMLU)

# An A100 and Llama-3.1-8B, as in BlendServe: 8e9 parameters, 131,072 bytes of KV.
TOKEN_TIME_S = 16e9 / 312e12
KV_READ_TIME_S = 131_072 / 2.039e12

# Requests of BurstGPT, OpenVid and MMLU in 400,000 of each trace.
RECIPE = {
    1: (326_634, 196, 73_168),
    2: (325_113, 320, 74_565),
    3: (394_621, 217, 5_160),
    4: (394_313, 356, 5_330),
}


def mix(counts: dict[Source, int], seed: int, *, known: bool = True) -> Workload:
    """So many requests of every source."""
    name = "+".join(f"{source.name}:{count}" for source, count in counts.items())
    seeds = seeds_of(seed, name)
    rng = np.random.default_rng(seeds)
    samples = [draw_sample(source, count, rng) for source, count in counts.items()]
    return assemble(samples, name, seeds, known=known)


def prompts(workload: Workload) -> list[list[int]]:
    offsets = workload.requests.offsets
    return [
        workload.requests.tokens[offsets[i] : offsets[i + 1]].tolist()
        for i in range(len(workload))
    ]


def saved_tokens(workload: Workload) -> int:
    requests = workload.requests
    tree = build_prefix_tree(requests.tokens, requests.offsets)
    return int(tree.lcp.sum(dtype=np.int64))


def num_tokens(workload: Workload) -> int:
    output = int(workload.output_len.sum(dtype=np.int64))
    return len(workload.requests.tokens) + output


def density_and_sharing(workload: Workload) -> tuple[float, float]:
    sharing = saved_tokens(workload) / num_tokens(workload)
    output = workload.output_len.astype(float)
    reads = (workload.requests.input_len * output + output**2 / 2).sum()
    compute_s = (1 - sharing) * TOKEN_TIME_S * num_tokens(workload)
    return compute_s / (KV_READ_TIME_S * reads), sharing


def assert_well_formed(workload: Workload) -> None:
    requests = workload.requests
    n = len(workload)
    assert len(requests) == n > 0
    assert requests.tokens.dtype == np.int32
    assert requests.tokens.min() >= 0
    assert requests.tokens.max() < VOCAB_SIZE
    assert requests.offsets.dtype == np.int64
    assert requests.offsets[0] == 0
    assert requests.offsets[-1] == len(requests.tokens)
    assert requests.input_len.min() >= 1
    for lengths in (
        workload.output_len,
        requests.max_new_tokens,
        requests.known_output_len,
    ):
        assert lengths.dtype == np.int32
        assert lengths.shape == (n,)
    assert workload.output_len.min() >= 1
    assert (workload.output_len <= requests.max_new_tokens).all()
    known = requests.known_output_len
    assert ((known == UNKNOWN) | (known == workload.output_len)).all()


def equal(a: Workload, b: Workload) -> bool:
    return (
        np.array_equal(a.requests.tokens, b.requests.tokens)
        and np.array_equal(a.requests.offsets, b.requests.offsets)
        and np.array_equal(a.requests.max_new_tokens, b.requests.max_new_tokens)
        and np.array_equal(a.requests.known_output_len, b.requests.known_output_len)
        and np.array_equal(a.output_len, b.output_len)
    )


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_a_source_has_its_published_statistics(source: Source) -> None:
    workload = mix({source: 3000}, seed=1)
    assert_well_formed(workload)
    output = workload.output_len.astype(float)
    assert workload.requests.input_len.mean() == pytest.approx(
        source.input_mean, rel=0.01
    )
    assert output.mean() == pytest.approx(source.output_mean, rel=0.01)
    assert (output**2).mean() == pytest.approx(source.output_square, rel=0.01)
    # Table 3 rounds to two digits. A system prompt has a whole number of tokens.
    sharing = saved_tokens(workload) / num_tokens(workload)
    assert sharing == pytest.approx(source.sharing, abs=0.005)


@pytest.mark.parametrize("count", [20, 200, 356])
def test_few_videos_carry_the_load_of_their_distribution(count: int) -> None:
    output = mix({OPENVID: count}, seed=5).output_len.astype(float)
    assert output.mean() == pytest.approx(16_384, rel=0.002)
    assert (output**2).mean() == pytest.approx(5.23e8, rel=0.002)
    assert output.max() <= 131_072


@settings(deadline=None, max_examples=examples(60))
@given(
    st.integers(0, 300),
    st.floats(1.0, 500.0),
    st.floats(0.0, 20.0),
)
def test_lengths_are_sorted_and_in_range(
    count: int, mean: float, spread: float
) -> None:
    lengths = lognormal_lengths(count, mean, mean**2 * (1 + spread), 1, 1000)
    assert lengths.dtype == np.int32
    assert lengths.shape == (count,)
    assert (np.diff(lengths) >= 0).all()
    if count:
        assert 1 <= lengths[0] <= lengths[-1] <= 1000


def test_lengths_without_spread_are_constant() -> None:
    assert lognormal_lengths(5, 2.0, 4.0, 1, 16).tolist() == [2] * 5


def test_equal_keys_make_equal_runs_as_far_as_the_shorter_goes() -> None:
    seeds = np.random.SeedSequence(3)
    tokens = random_tokens(np.array([4, 0, 6, 4]), np.array([7, 7, 7, 8]), seeds)
    assert len(tokens) == 14
    assert tokens[:4].tolist() == tokens[4:8].tolist()
    assert tokens[10:].tolist() != tokens[:4].tolist()


def test_random_ids_spread_over_the_vocabulary() -> None:
    tokens = random_tokens(
        np.array([100_000]), np.array([1]), np.random.SeedSequence(3)
    )
    deciles = np.bincount(tokens * 10 // VOCAB_SIZE, minlength=10)
    assert deciles.min() > 9_500
    assert deciles.max() < 10_500


def test_requests_of_a_subject_share_its_prefix_only() -> None:
    workload = mix({MMLU: 984}, seed=2)
    tree = build_prefix_tree(workload.requests.tokens, workload.requests.offsets)
    # 984 questions are four subjects.
    assert int((tree.lcp < 5).sum()) == 4


def test_counts_and_limits_of_the_sources() -> None:
    workload = mix({MMLU: 30, OPENVID: 0, BURSTGPT: 70}, seed=2)
    limits = workload.requests.max_new_tokens
    assert np.unique(limits, return_counts=True)[0].tolist() == [16, 4096]
    assert np.unique(limits, return_counts=True)[1].tolist() == [30, 70]
    assert (workload.output_len[limits == 16] == 2).all()


def test_input_order_is_shuffled() -> None:
    shuffled = mix({MMLU: 300, BURSTGPT: 700}, seed=2)
    assert 150 < (shuffled.requests.max_new_tokens[:500] == 4096).sum() < 450


def test_video_lengths_are_known_beforehand_unless_hidden() -> None:
    workload = mix({OPENVID: 10, BURSTGPT: 10}, seed=2)
    is_video = workload.requests.max_new_tokens != BURSTGPT.max_output_len
    known = workload.requests.known_output_len
    assert (known[is_video] == workload.output_len[is_video]).all()
    assert (known[~is_video] == UNKNOWN).all()
    hidden = mix({OPENVID: 10, BURSTGPT: 10}, seed=2, known=False)
    assert (hidden.requests.known_output_len == UNKNOWN).all()
    assert (hidden.requests.max_new_tokens[is_video] == 131_072).all()
    assert np.array_equal(hidden.output_len, workload.output_len)


def test_the_seed_decides_everything() -> None:
    counts = {MMLU: 50, BURSTGPT: 100}
    assert equal(mix(counts, seed=4), mix(counts, seed=4))
    assert not equal(mix(counts, seed=4), mix(counts, seed=5))
    assert equal(industry(90, seed=4), industry(90, seed=4))
    assert not equal(industry(90, seed=4), industry(90, seed=5))
    a, b, c = (
        blend(1.4, 0.35, 4000, seed, TOKEN_TIME_S, KV_READ_TIME_S) for seed in (1, 1, 2)
    )
    assert equal(a, b)
    assert not equal(a, c)


@pytest.mark.parametrize("number", RECIPE)
def test_the_recipe_of_the_four_traces(number: int) -> None:
    counts = blend_counts(*TRACES[number], 400_000, TOKEN_TIME_S, KV_READ_TIME_S)
    assert sum(counts.values()) == 400_000
    expected = dict(zip((BURSTGPT, OPENVID, MMLU), RECIPE[number], strict=True))
    for source, count in expected.items():
        # One request is more than 0.5 % of the videos.
        assert abs(counts[source] - count) <= max(0.005 * count, 1)


@pytest.mark.slow
@pytest.mark.parametrize("density", [round(0.8 + 0.05 * i, 2) for i in range(13)])
def test_blends_of_the_papers_grid_meet_their_targets(density: float) -> None:
    for sharing in (0.05, 0.15, 0.25, 0.35, 0.45):
        workload = blend(density, sharing, 40_000, 3, TOKEN_TIME_S, KV_READ_TIME_S)
        assert len(workload) == 40_000
        realised = density_and_sharing(workload)
        assert realised == pytest.approx((density, sharing), rel=0.01)


def test_an_infeasible_density_names_the_range() -> None:
    with pytest.raises(ConfigError, match=r"density can be 0\.0546 to 18\.8"):
        blend_counts(60.0, 0.35, 400_000, TOKEN_TIME_S, KV_READ_TIME_S)


@settings(deadline=None, max_examples=examples(40))
@given(st.floats(0.03, 0.85), st.floats(0.01, 0.99))
def test_the_range_of_the_message_is_the_feasible_one(
    sharing: float, inside: float
) -> None:
    args = (sharing, 10**9, TOKEN_TIME_S, KV_READ_TIME_S)
    with pytest.raises(ConfigError) as caught:
        blend_counts(1e4, *args)
    low, high = (
        float(word)
        for word in str(caught.value).rstrip(".").split()[-3:]
        if word != "to"
    )
    blend_counts(low + inside * (high - low), *args)
    for outside in (0.98 * low, 1.02 * high):
        with pytest.raises(ConfigError):
            blend_counts(outside, *args)


@pytest.mark.parametrize(
    ("density", "sharing"), [(1.0, 0.9), (1.0, -0.1), (0.0, 0.3), (-1.0, 0.3)]
)
def test_impossible_targets_name_what_is_possible(
    density: float, sharing: float
) -> None:
    with pytest.raises(ConfigError, match=r"above 0 and sharing 0 to 0\.8646"):
        blend_counts(density, sharing, 400_000, TOKEN_TIME_S, KV_READ_TIME_S)


def test_too_few_requests_for_one_video_say_how_many_are_needed() -> None:
    with pytest.raises(ConfigError, match=r"use (\d+) or more") as caught:
        blend_counts(1.4, 0.35, 500, TOKEN_TIME_S, KV_READ_TIME_S)
    enough = int(str(caught.value).split("use ")[1].split()[0])
    counts = blend_counts(1.4, 0.35, enough, TOKEN_TIME_S, KV_READ_TIME_S)
    assert counts[OPENVID] == 1


@pytest.mark.parametrize(
    ("prefix_len", "distinct_len", "degree", "saving"),
    [(2000, 200, 4, 0.682), (2000, 200, 16, 0.852), (1000, 1000, 16, 0.469)],
)
def test_groups_save_what_the_closed_form_says(
    prefix_len: int, distinct_len: int, degree: int, saving: float
) -> None:
    workload = shared_prefix_groups(640, prefix_len, distinct_len, degree, 100, seed=1)
    assert_well_formed(workload)
    assert (workload.requests.input_len == prefix_len + distinct_len).all()
    assert (workload.requests.known_output_len == 100).all()
    ratio = saved_tokens(workload) / len(workload.requests.tokens)
    assert ratio == pytest.approx(saving, abs=0.001)


def test_one_large_group_has_exactly_the_lengths_asked_for() -> None:
    workload = shared_prefix_groups(70_000, 7, 2, 70_000, 1, seed=1)
    assert (workload.requests.input_len == 9).all()
    rows = workload.requests.tokens.reshape(-1, 9)
    assert (rows[:, :7] == rows[0, :7]).all()
    assert len(np.unique(rows[:, 7])) > 50_000


def test_groups_are_no_larger_than_the_sharing_degree() -> None:
    workload = shared_prefix_groups(10, 8, 3, 4, 5, seed=1)
    heads = [tuple(prompt[:8]) for prompt in prompts(workload)]
    assert sorted(heads.count(head) for head in set(heads)) == [3, 3, 4]


def test_a_sharing_degree_of_one_shares_nothing() -> None:
    assert saved_tokens(shared_prefix_groups(20, 50, 3, 1, 5, seed=1)) == 0


def test_groups_without_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be 1 or more"):
        shared_prefix_groups(10, 8, 3, 0, 5, seed=1)


def test_industry_has_its_published_statistics() -> None:
    workload = industry(8000, seed=1)
    assert_well_formed(workload)
    assert workload.requests.input_len.mean() == pytest.approx(1600, rel=0.02)
    assert workload.output_len.mean() == pytest.approx(100, rel=0.01)
    saving = saved_tokens(workload) / len(workload.requests.tokens)
    assert saving == pytest.approx(0.581, abs=0.01)
    heads = [tuple(prompt[:64]) for prompt in prompts(workload)]
    sizes = np.unique(np.array(heads), axis=0, return_counts=True)[1]
    assert (sizes**2).sum() / 8000 == pytest.approx(3, abs=0.15)
    assert len({head[:20] for head in heads}) == 1


def test_industry_without_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_requests=0"):
        industry(0)


@pytest.mark.parametrize(
    ("density", "sharing", "groups"),
    [(3.2, 0.5, (8, 100)), (4.0, 0.65, (40,)), (5.0, 0.6, (3, 20, 150))],
)
def test_documents_meet_density_and_sharing(
    density: float, sharing: float, groups: tuple[int, ...]
) -> None:
    workload = documents(
        1000, 1, density=density, sharing=sharing, groups=groups, input_mean=25_000,
        token_time_s=TOKEN_TIME_S, kv_read_time_s=KV_READ_TIME_S,
    )  # fmt: skip
    requests = workload.requests
    assert_well_formed(workload)
    assert (requests.known_output_len == UNKNOWN).all()
    input_len = requests.input_len
    assert SHORTEST <= input_len.min() <= input_len.max() <= LONGEST
    assert input_len.mean() == pytest.approx(25_000, rel=0.1)
    tree = build_prefix_tree(requests.tokens, requests.offsets)
    assert tree.prefix_sharing_ratio == pytest.approx(sharing, abs=0.05)
    # As many levels of shared prefixes as asked for, besides chance.
    assert len(np.unique(tree.depth[tree.depth > 10])) <= sum(groups)
    found = density_and_sharing(workload)[0]
    assert found == pytest.approx(density, rel=0.02)


def test_documents_depend_on_their_seed_alone() -> None:
    def of(seed: int) -> Workload:
        return documents(
            50, seed, density=3.0, sharing=0.5, groups=(2, 5), input_mean=20_000,
            token_time_s=TOKEN_TIME_S, kv_read_time_s=KV_READ_TIME_S,
        )  # fmt: skip

    assert equal(of(1), of(1))
    assert not equal(of(1), of(2))


@pytest.mark.parametrize(
    ("num_requests", "groups", "sharing", "message"),
    [
        (0, (2,), 0.5, "0 requests"),
        (5, (), 0.5, "in \\[\\] groups"),
        (5, (2, 0), 0.5, "must be 1 or more"),
        (10, (10,), 0.9, "use fewer groups"),
    ],
)
def test_documents_that_are_not_possible(
    num_requests: int, groups: tuple[int, ...], sharing: float, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        documents(
            num_requests, 0, density=3.0, sharing=sharing, groups=groups,
            input_mean=20_000, token_time_s=TOKEN_TIME_S,
            kv_read_time_s=KV_READ_TIME_S,
        )  # fmt: skip


def test_combining_shuffles_all_requests_with_what_belongs_to_them() -> None:
    parts = [mix({MMLU: 40, OPENVID: 5}, 1), mix({BURSTGPT: 30, MMLU: 20}, 2)]
    joined = combine(parts, seed=3)
    assert_well_formed(joined)

    def rows(workload: Workload) -> list[tuple[list[int], int, int, int]]:
        requests = workload.requests
        return [
            (prompt, int(output), int(cap), int(known))
            for prompt, output, cap, known in zip(
                prompts(workload),
                workload.output_len,
                requests.max_new_tokens,
                requests.known_output_len,
                strict=True,
            )
        ]

    together = [row for part in parts for row in rows(part)]
    assert sorted(rows(joined)) == sorted(together)
    assert rows(joined) != together
    assert equal(joined, combine(parts, seed=3))


def test_workloads_of_one_seed_do_not_share_prompts() -> None:
    joined = combine([mix({BURSTGPT: 40}, 1), mix({SHAREGPT: 40}, 1)], seed=3)
    alone = sum(saved_tokens(mix({source: 40}, 1)) for source in (BURSTGPT, SHAREGPT))
    assert saved_tokens(joined) == alone


def test_combining_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="no workloads"):
        combine([], seed=1)
