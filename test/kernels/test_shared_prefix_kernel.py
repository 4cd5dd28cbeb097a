"""The shared-prefix kernel against each request's own attention, interpreted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import (
    FORESTS,
    SMALL,
    Batch,
    assert_attention_close,
    features_of,
    ints,
    make_batch,
    make_planner,
    poisoned_outputs,
)
from example_counts import combinations

from sgl_kernel_ext.shared_prefix_attention import (
    AttentionPlan,
    AttentionPlanner,
    Features,
    launch,
    run,
    shared_prefix_reference,
    try_out,
)
from sgl_kernel_ext.shared_prefix_attention import tasks as fields

# Triton 3.6's interpreter reads loop bounds in a way that numpy is about to end.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


def check_run(
    batch: Batch, planner: AttentionPlanner, grid: tuple[int, ...] | None = None
) -> None:
    """AttentionPlan, run into poisoned memory, and compare."""
    plan = planner.plan(*batch.planned())
    out, lse = poisoned_outputs(batch, plan)
    options = {"features": batch.features, "lse": lse, "grid": grid}
    run(plan, *batch.tensors(), out, batch.scale, **options)  # type: ignore[arg-type]
    assert_attention_close(batch, out, lse)


@pytest.mark.parametrize(
    ("name", "page_size", "dtype"), combinations([*FORESTS], [1, 16], [*DTYPES])
)
def test_forests(name: str, page_size: int, dtype: str) -> None:
    batch = make_batch(**FORESTS[name], page_size=page_size, dtype=DTYPES[dtype])  # type: ignore[arg-type]
    planner = make_planner(batch)
    check_run(batch, planner)


@pytest.mark.parametrize("head_dim", [8, 16, 80, 96, 128, 512])
def test_head_dims(head_dim: int) -> None:
    batch = make_batch(**FORESTS["one-root"], head_dim=head_dim)  # type: ignore[arg-type]
    check_run(batch, make_planner(batch))


@pytest.mark.parametrize(
    ("sizes", "latent"),
    [((24, 8), False), ((192, 128), False), ((80, 64), True), ((576, 512), True)],
)
def test_keys_and_values_of_two_sizes(sizes: tuple[int, int], latent: bool) -> None:
    shape = {"head_dim": sizes[0], "v_head_dim": sizes[1], "latent": latent}
    forest = FORESTS["one-root" if sizes[1] > 100 else "chunks"]
    batch = make_batch(**forest, heads=(6, 1 if latent else 2), **shape)  # type: ignore[arg-type]
    planner = make_planner(batch)
    check_run(batch, planner)
    plan = planner.plan(*batch.planned())
    values = sizes[0] if latent else sum(sizes)
    heads = batch.k_cache.shape[1]
    assert plan.kv_bytes_unshared == batch.kv_len.sum() * values * heads * 4
    if sizes == (80, 64):
        try_out(planner)


def test_latents_of_more_heads_than_a_tile_holds() -> None:
    """Two halves of the heads read them as if they were two KV heads."""
    shape = {"head_dim": 48, "v_head_dim": 32, "latent": True, "heads": (20, 1)}
    batch = make_batch(**FORESTS["two-groups"], **shape)  # type: ignore[arg-type]
    caches = (each.expand(-1, 2, -1) for each in (batch.k_cache, batch.v_cache))
    batch = replace(batch, **dict(zip(("k_cache", "v_cache"), caches, strict=True)))
    planner = make_planner(batch, max_tile=16)
    check_run(batch, planner)
    unshared = planner.plan(*batch.planned()).kv_bytes_unshared
    assert unshared == batch.kv_len.sum() * 48 * 4
    with pytest.raises(ValueError, match=r"pass k_cache\[\.\.\., :32\]"):
        check_run(replace(batch, v_cache=batch.v_cache.clone()), make_planner(batch))


@pytest.mark.parametrize(
    ("heads", "max_tile"), [((3, 3), 16), ((6, 1), 64), ((20, 2), 64), ((8, 4), 128)]
)
def test_groups_and_tiles(heads: tuple[int, int], max_tile: int) -> None:
    batch = make_batch(**FORESTS["chunks"], heads=heads)  # type: ignore[arg-type]
    check_run(batch, make_planner(batch, max_tile=max_tile))


def test_wide_tiles_with_and_without_a_mask() -> None:
    batch = make_batch(
        node_parent=[-1],
        node_end=[40],
        request_node=[0, 0],
        own_len=[100, 80],
        q_len=[70, 64],
        heads=(2, 1),
    )
    planner = make_planner(batch, max_tile=128)
    plan = planner.plan(*batch.planned())
    assert (plan.task_table[:, fields.TILE] == 2).any()
    check_run(batch, planner)


def test_rows_that_see_nothing_of_a_split() -> None:
    """A split may begin inside the own tokens of a chunk, if they are many for one tile."""
    batch = make_batch(own_len=[300], q_len=[100], heads=(2, 2))
    planner = make_planner(batch)
    table = planner.plan(*batch.planned()).task_table
    assert (table[:, fields.KV_BEGIN] > table[:, fields.FIRST_POSITION]).any()
    check_run(batch, planner)


@pytest.mark.parametrize("grid", [1, 7, 200], ids="grid{}".format)
def test_any_grid_gives_the_same(grid: int) -> None:
    batch = make_batch(**FORESTS["three-levels"])  # type: ignore[arg-type]
    plan = make_planner(batch).plan(*batch.planned())
    exact, exact_lse = poisoned_outputs(batch, plan)
    run(plan, *batch.tensors(), exact, batch.scale, lse=exact_lse)
    out, lse = poisoned_outputs(batch, plan)
    run(plan, *batch.tensors(), out, batch.scale, lse=lse, grid=(grid,) * 3)
    assert torch.equal(out, exact)
    assert torch.equal(lse, exact_lse)


def test_one_fixed_grid_serves_batch_after_batch() -> None:
    first = make_batch(**FORESTS["three-levels"])  # type: ignore[arg-type]
    small = replace(SMALL, num_sms=1)
    planner = make_planner(first, config=small)
    for name in ("three-levels", "no-forest", "two-groups"):
        batch = make_batch(**FORESTS[name])  # type: ignore[arg-type]
        check_run(batch, planner, grid=planner.fixed_grid)


def test_tiles_are_branches_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide tiles have streams of their own, which the merge waits for."""
    batch = make_batch(**FORESTS["chunks"])  # type: ignore[arg-type]
    planner = make_planner(batch)
    plan = planner.plan(*batch.planned())
    log: list[str] = []

    class Stream(str):
        def wait_stream(self, other: str) -> None:
            log.append(f"{self} waits for {other}")

    now = [Stream("main")]

    @contextmanager
    def stream(side: Stream | None) -> Iterator[None]:
        now.append(side or now[-1])
        yield
        now.pop()

    kernel, merge = launch.shared_prefix_attention_kernel, launch.merge_parts

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def call(*args: object, **options: object) -> None:
                log.append(f"tile {options['TILE']} on {now[-1]}")
                kernel[grid](*args, **options)

            return call

    def merged(*args: object, **options: object) -> None:
        log.append(f"merge on {now[-1]}")
        merge(*args, **options)  # type: ignore[arg-type]

    planner.side_streams = [Stream("first"), Stream("second")]  # type: ignore[list-item]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: now[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(launch, "shared_prefix_attention_kernel", Kernel())
    monkeypatch.setattr(launch, "merge_parts", merged)
    assert plan.tile_tasks[1] and plan.tile_tasks[0]
    check_run(batch, planner, grid=(7, 7, 7))
    assert log == [
        "first waits for main",
        "tile 2 on first",
        "second waits for main",
        "tile 1 on second",
        "tile 0 on main",
        "main waits for first",
        "main waits for second",
        "merge on main",
    ]
    log.clear()
    out, _ = poisoned_outputs(batch, plan)
    planner.workspace.lse_parts.zero_()  # of the tiles that do not run
    run(plan, *batch.tensors(), out, batch.scale, grid=(7, 0, 0))
    assert log == ["tile 0 on main", "merge on main"]


def test_a_plan_is_reused_while_decodes_grow() -> None:
    batch = make_batch(**FORESTS["two-groups"], room=16)  # type: ignore[arg-type]
    plan = make_planner(batch).plan(*batch.planned())
    for tokens in ([1] * 7, [0, 3, 16, 1, 2, 0, 16]):
        grown = batch.grown(tokens)
        assert plan.still_valid(grown.kv_len)
        out, lse = poisoned_outputs(grown, plan)
        run(plan, *grown.tensors(), out, grown.scale, lse=lse)
        assert_attention_close(grown, out, lse)


def test_strided_tensors_and_padded_rows() -> None:
    batch = make_batch(**FORESTS["chunks"], page_size=16)  # type: ignore[arg-type]
    plan = make_planner(batch).plan(*batch.planned())
    rows, heads, dim = batch.q.shape

    def strided(tensor: torch.Tensor, extra_rows: int) -> torch.Tensor:
        shape = (tensor.shape[0] + extra_rows, tensor.shape[1] + 1, tensor.shape[2] + 8)
        wide = torch.full(shape, torch.nan)
        wide[: tensor.shape[0], 1:, :dim] = tensor
        return wide[:, 1:, :dim]

    out = strided(poisoned_outputs(batch, plan)[0], 5)
    wide_lse = torch.full((rows + 5, heads + 3), torch.nan)
    run(
        plan,
        strided(batch.q, 5),
        strided(batch.k_cache, 0),
        strided(batch.v_cache, 0),
        torch.cat([batch.table, batch.table], dim=1)[:, : batch.table.shape[1]],
        batch.device_kv_len.long(),
        out,
        batch.scale,
        lse=wide_lse[:, :heads],
    )
    assert_attention_close(batch, out, wide_lse[:, :heads])
    assert out[rows:].isnan().all()
    assert wide_lse[rows:].isnan().all()
    assert wide_lse[:, heads:].isnan().all()


def test_a_tail_that_is_empty_is_the_identity() -> None:
    """A length below the planned one must not occur, and yet gives no NaN."""
    batch = make_batch(own_len=[80, 80])
    plan = make_planner(batch).plan(*batch.planned())
    assert plan.num_parts > 0
    shorter = batch.grown([-79, -79])
    out, lse = poisoned_outputs(batch, plan)
    cut = plan.task_table[:, fields.TAIL_OF] < 0
    run(plan, *shorter.tensors(), out, batch.scale, lse=lse)
    assert cut.any()
    assert not out.isnan().any()
    assert not lse.isnan().any()


def test_int64_slot_addresses_and_large_logits() -> None:
    batch = make_batch(own_len=[20, 33], head_dim=64)
    large = replace(batch, q=batch.q * 100)
    check_run(large, make_planner(large))


@pytest.mark.parametrize("max_tile", [16, 64, 128])
@pytest.mark.parametrize("features", features_of(6), ids=["cap", "sinks", "both"])
def test_features(features: Features, max_tile: int) -> None:
    """With wide tiles, whose blocks without a mask have a loop of their own."""
    batch = make_batch(**FORESTS["chunks"], heads=(6, 2))  # type: ignore[arg-type]
    batch = replace(batch, q=batch.q * 4, features=features)
    check_run(batch, make_planner(batch, max_tile=max_tile))


@pytest.mark.parametrize("v_scale", [1.0, 0.25])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("fp32", 32), ("fp32", 80), ("fp16", 64)]
)
def test_a_cache_of_fp8(dtype: str, head_dim: int, v_scale: float) -> None:
    """The truth is attention to the values that the cache holds."""
    shape = {"dtype": DTYPES[dtype], "kv_dtype": torch.float8_e4m3fn}
    batch = make_batch(**FORESTS["chunks"], head_dim=head_dim, **shape)  # type: ignore[arg-type]
    planner = make_planner(batch)
    plain = make_planner(batch, kv_dtype=None).plan(*batch.planned())
    assert planner.plan(*batch.planned()).kv_bytes < plain.kv_bytes
    check_run(replace(batch, features=Features(v_scale=v_scale)), planner)
    if v_scale == 1.0:  # the trial has one of its own
        try_out(planner)


@pytest.mark.parametrize("sink", [-1e4, 0.0, 1e4])
def test_small_and_large_sinks(sink: float) -> None:
    """Of tokens with one part and with several, and of a chunk's last tokens."""
    batch = make_batch(**FORESTS["chunks"])  # type: ignore[arg-type]
    sinks = torch.full((4,), sink)
    batch = replace(batch, features=Features(sinks=sinks))
    planner = make_planner(batch)
    counts = np.diff(planner.plan(*batch.planned()).part_indptr)
    assert (counts == 0).any() and (counts > 1).any()
    check_run(batch, planner)


# Which is as it should be, see the kernel.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_caps_of_small_and_large_logits(size: float) -> None:
    batch = make_batch(**FORESTS["one-root"])  # type: ignore[arg-type]
    capped = replace(batch, q=batch.q * size, features=Features(logit_cap=5.0))
    check_run(capped, make_planner(capped))
    largest = capped.truth()[1].max()
    assert largest < 5.0 + np.log(163)


def test_random_forests() -> None:
    for seed in range(4):
        random = np.random.default_rng(seed)
        nodes = int(random.integers(1, 5))
        parents = [int(random.integers(-1, node)) for node in range(nodes)]
        ends: list[int] = []
        for parent in parents:
            above = ends[parent] if parent >= 0 else 0
            ends.append(above + int(random.integers(0, 50)))
        count = int(random.integers(2, 7))
        q_len = random.choice([1, 1, 1, 5, 20], count)
        batch = make_batch(
            node_parent=parents,
            node_end=ends,
            request_node=random.integers(-1, nodes, count),
            q_len=q_len,
            own_len=ints(q_len + random.integers(0, 40, count)),
            page_size=int(random.choice([1, 4])),
            seed=seed,
        )
        check_run(batch, make_planner(batch, max_tile=int(random.choice([16, 64]))))


def test_what_run_refuses() -> None:
    batch = make_batch(own_len=[5, 9], page_size=4)
    plan = make_planner(batch).plan(*batch.planned())
    q, k, v, table, kv_len = batch.tensors()
    good: dict[str, object] = {
        "q": q,
        "k_cache": k,
        "v_cache": v,
        "table": table,
        "kv_len": kv_len,
        "out": torch.empty_like(q),
        "scale": batch.scale,
    }
    refusals: list[tuple[dict[str, object], str]] = [
        ({"scale": 0.0}, "scale is 0.0"),
        ({"features": Features(logit_cap=-1.0)}, "logit_cap is -1.0"),
        (
            {"features": Features(v_scale=2.0)},
            "v_scale is 2.0 with a cache of torch.fl",
        ),
        ({"features": Features(sinks=torch.ones(2))}, r"sinks has shape \[2\]"),
        ({"features": Features(sinks=torch.ones(4).int())}, "sinks is torch.int32"),
        (
            {"v_cache": v[..., :16]},
            r"v_cache has shape \[24, 2, 16\]; expected \[24, 2, 32\]",
        ),
        ({"q": q.half()}, "q is torch.float16"),
        ({"k_cache": k.bfloat16()}, "k_cache is torch.bfloat16"),
        ({"q": q[:1]}, "q has 1 rows; this batch needs 2"),
        ({"out": torch.empty(2, 4, 16)}, r"out has shape \[2, 4, 16\]"),
        ({"k_cache": k[:, :1], "v_cache": v[:, :1]}, r"k_cache has shape .* 1, 32\]"),
        ({"table": table.long()}, "table is torch.int64"),
        ({"table": table[:, :1]}, "table has 1 pages of 4 tokens"),
        ({"table": table[:1]}, "table has 1 rows"),
        ({"kv_len": kv_len[:1]}, "kv_len has 1 rows; this batch needs 2"),
        ({"kv_len": kv_len.float()}, "kv_len is torch.float32"),
        ({"lse": torch.empty(2, 3)}, r"lse has shape \[2, 3\]"),
        ({"lse": torch.empty(2, 4).half()}, "lse is torch.float16"),
        ({"q": torch.empty(2, 4, 64)[..., ::2]}, "q has stride 2"),
    ]
    for change, message in refusals:
        with pytest.raises(ValueError, match=message):
            run(plan, **(good | change))  # type: ignore[arg-type]


def test_the_kernel_passes_its_trial() -> None:
    """With a chunk of a prompt, in pages. Few drafts leave room for a shorter one."""
    batch = make_batch(page_size=16)
    small = make_planner(batch, max_requests=8, max_tokens=20)
    try_out(small)
    assert small.buffers.results[fields.NUM_TAILS] == 6  # 7 requests, of which 6 decode
    planner = make_planner(batch, max_requests=8, max_tokens=256)
    try_out(planner, table_width=100)
    for features in features_of(4):
        try_out(planner, features=features)


def test_a_wrong_kernel_fails_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_a_task(plan: AttentionPlan, *args: object, **options: object) -> None:
        table = plan.task_table
        table[0, fields.KV_END] = table[0, fields.KV_BEGIN] + 1
        run(plan, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(shared_prefix_reference, "run", forgets_a_task)
    with pytest.raises(RuntimeError, match="differs from PyTorch's by"):
        try_out(make_planner(make_batch(), max_requests=8))


def test_a_kernel_that_writes_nothing_fails_its_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_prefix_reference, "run", lambda *args, **kwargs: None)
    with pytest.raises(RuntimeError, match="nan of its norm"):
        try_out(make_planner(make_batch(), max_requests=8))


# Ragged suffixes below two nodes, one of them longer than what is packed; some without a node.
PACKABLE = {
    "node_parent": [-1, -1],
    "node_end": [70, 33],
    "request_node": [0, 1, 0, 0, 1, 0, 0, -1, 0, 1, -1, 0],
    "own_len": [1, 17, 33, 16, 2, 128, 140, 5, 31, 64, 9, 15],
}
# Few places, so that a task may have many tokens, and starts that cost something.
FEW_PLACES = replace(
    SMALL, num_sms=1, task_bytes=4096, tiles=replace(SMALL.tiles, programs=(1, 1, 1))
)


@pytest.mark.parametrize(
    ("heads", "page_size"), [((4, 4), 1), ((6, 2), 4), ((8, 2), 1), ((8, 1), 16)]
)
def test_packed_suffixes(heads: tuple[int, int], page_size: int) -> None:
    """With groups of 1, 3, 4 and 8, so that up to 16 requests are one task."""
    batch = make_batch(**PACKABLE, heads=heads, page_size=page_size, room=16)  # type: ignore[arg-type]
    planner = make_planner(batch, config=FEW_PLACES)
    plan = planner.plan(*batch.planned())
    assert (plan.task_table[:, fields.TAIL_OF] == fields.PACKED).any()
    check_run(batch, planner)
    check_run(batch, planner, grid=planner.fixed_grid)
    for features in features_of(heads[0]):
        check_run(replace(batch, features=features), planner)


def test_packed_suffixes_grow_while_their_plan_is_kept() -> None:
    """Past the end of a block, and past the length that is packed."""
    batch = make_batch(**PACKABLE, heads=(8, 2), room=16)  # type: ignore[arg-type]
    plan = make_planner(batch, config=FEW_PLACES).plan(*batch.planned())
    count = len(batch.kv_len)
    for tokens in ([1] * count, [16] * count, [0, 16, 3] * (count // 3)):
        grown = batch.grown(tokens)
        assert plan.still_valid(grown.kv_len)
        out, lse = poisoned_outputs(grown, plan)
        run(plan, *grown.tensors(), out, grown.scale, lse=lse)
        assert_attention_close(grown, out, lse)
    assert not plan.still_valid(batch.grown([17] * count).kv_len)
    assert not plan.still_valid(batch.grown([-1] * count).kv_len)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_values_of_one_packed_request_reach_no_other() -> None:
    """Also where they are infinite or no numbers."""
    batch = make_batch(**PACKABLE, heads=(8, 2))  # type: ignore[arg-type]
    plan = make_planner(batch, config=FEW_PLACES).plan(*batch.planned())
    packed = plan.task_table[plan.task_table[:, fields.TAIL_OF] == fields.PACKED]
    assert len(packed) and (packed[:, fields.COUNT] > 1).any()
    broken = plan.gather[packed[:, fields.START]]
    last = batch.table[batch.table_row[broken], batch.kv_len[broken] - 1]
    batch.k_cache[last], batch.v_cache[last] = torch.nan, torch.inf
    out, lse = poisoned_outputs(batch, plan)
    run(plan, *batch.tensors(), out, batch.scale, lse=lse)
    others = np.setdiff1d(np.arange(batch.num_tokens), broken)
    for found, wanted in zip((out, lse), batch.truth(), strict=True):
        torch.testing.assert_close(found[others], wanted[others], atol=2e-5, rtol=2e-5)


def test_nothing_is_packed_beside_a_chunk() -> None:
    batch = make_batch(**FORESTS["chunks"])  # type: ignore[arg-type]
    plan = make_planner(batch, config=FEW_PLACES).plan(*batch.planned())
    assert (plan.task_table[:, fields.TAIL_OF] != fields.PACKED).all()
