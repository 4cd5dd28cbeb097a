"""Planning of shared-prefix attention, and its execution in PyTorch."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import (
    FORESTS,
    SMALL,
    Batch,
    assert_attention_close,
    batches,
    features_of,
    ints,
    make_batch,
    make_planner,
    poisoned_outputs,
)
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kernel_ext.shared_prefix_attention import (
    PLAIN,
    AttentionPlan,
    AttentionPlanner,
    Features,
    TileConfig,
    pick_config,
    run_reference,
)
from sgl_kernel_ext.shared_prefix_attention import tasks as fields


def requests_of_tokens(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Request and position of every flat query token."""
    request = np.repeat(np.arange(len(batch.q_len)), batch.q_len)
    starts = np.repeat(np.cumsum(batch.q_len) - batch.q_len, batch.q_len)
    context = (batch.kv_len - batch.q_len)[request]
    return request, context + np.arange(len(request)) - starts


def check_covered_once(batch: Batch, plan: AttentionPlan) -> None:
    """Every token gets each KV position it sees from exactly one task."""
    request, position = requests_of_tokens(batch)
    assert sorted(plan.gather) == list(range(batch.num_tokens))
    spans: list[list[tuple[int, int]]] = [[] for _ in request]
    parts: list[list[int]] = [[] for _ in request]
    for task in plan.task_table:
        begin, end = int(task[fields.KV_BEGIN]), int(task[fields.KV_END])
        assert begin < end
        stop = task[fields.START] + task[fields.COUNT]
        if task[fields.TAIL_OF] == fields.PACKED:
            spans_of_packed(batch, plan, task, spans, parts)
            continue
        for j, place in enumerate(range(task[fields.START], stop)):
            token = plan.gather[place]
            sees = position[token] + 1
            if task[fields.FIRST_POSITION] == fields.NO_CAUSAL:
                assert end <= sees
            else:
                assert task[fields.FIRST_POSITION] + j == position[token]
                assert not task[fields.IS_NODE]
            if begin < sees:
                spans[token].append((begin, min(end, sees)))
            parts[place].append(int(task[fields.PART]))
            own_row = batch.table_row[request[token]]
            assert same_kv(batch, task[fields.TABLE_ROW], own_row, begin, end)
    for token, covered in enumerate(spans):
        covered.sort()
        assert covered[0][0] == 0
        assert covered[-1][1] == position[token] + 1
        assert all(a[1] == b[0] for a, b in itertools.pairwise(covered))
    counts = np.diff(plan.part_indptr)
    for place, numbers in enumerate(parts):
        wanted = [-1] if counts[place] == 0 else list(range(counts[place]))
        assert sorted(numbers) == wanted


def spans_of_packed(
    batch: Batch,
    plan: AttentionPlan,
    task: np.ndarray,
    spans: list[list[tuple[int, int]]],
    parts: list[list[int]],
) -> None:
    """A packed task has all of its decodes from one position on, in a tile of 16 rows."""
    begin = int(task[fields.KV_BEGIN])
    total = 0
    assert task[fields.COUNT] > 1 and task[fields.TILE] == 0
    assert task[fields.COUNT] * batch.q.shape[1] <= 16 * batch.k_cache.shape[1]
    for place in range(task[fields.START], task[fields.START] + task[fields.COUNT]):
        request = plan.gather[place]
        assert plan.rows[place] == batch.table_row[request]
        own = int(batch.kv_len[request]) - begin
        assert own > 0
        spans[request].append((begin, begin + own))
        parts[place].append(int(task[fields.PART]))
        total += own
    assert total == task[fields.KV_END] - begin


def same_kv(batch: Batch, row: int, other: int, begin: int, end: int) -> bool:
    at = torch.arange(begin, end)
    page = batch.table[:, at // batch.page_size].long()
    slots = page * batch.page_size + at % batch.page_size
    return torch.equal(batch.k_cache[slots[row]], batch.k_cache[slots[other]])


def check_reference(batch: Batch, plan: AttentionPlan) -> None:
    out, lse = poisoned_outputs(batch, plan)
    tensors = batch.tensors()
    run_reference(plan, *tensors, out, batch.scale, features=batch.features, lse=lse)
    assert_attention_close(batch, out, lse)


@given(
    batch=batches(),
    max_tile=st.sampled_from([16, 64, 128]),
    programs=st.sampled_from([1, 8]),
)
@settings(max_examples=examples(120), deadline=None)
def test_any_plan_covers_all_kv_once_and_computes_attention(
    batch: Batch, max_tile: int, programs: int
) -> None:
    """With few places, at which tasks are long and suffixes are packed, and with many."""
    tiles = replace(SMALL.tiles, programs=(programs,) * 3)
    config = replace(SMALL, num_sms=1, tiles=tiles)
    planner = make_planner(batch, max_tile=max_tile, config=config)
    plan = planner.plan(*batch.planned())
    check_covered_once(batch, plan)
    for features in (PLAIN, *features_of(batch.q.shape[1])):
        check_reference(replace(batch, features=features), plan)


@pytest.mark.parametrize("page_size", [1, 16], ids="page{}".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FORESTS)
def test_reference_of_known_forests(
    name: str, page_size: int, dtype: torch.dtype
) -> None:
    batch = make_batch(**FORESTS[name], page_size=page_size, dtype=dtype)  # type: ignore[arg-type]
    plan = make_planner(batch).plan(*batch.planned())
    out, lse = poisoned_outputs(batch, plan)
    run_reference(plan, *batch.tensors(), out, batch.scale, lse=lse)
    wanted, wanted_lse = batch.truth()
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out.float(), wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, wanted_lse, atol=2e-5, rtol=2e-5)


def test_the_cpu_needs_no_splits() -> None:
    batch = make_batch(**FORESTS["three-levels"])  # type: ignore[arg-type]
    planner = make_planner(batch, config=None)
    plan = planner.plan(*batch.planned())
    table = plan.task_table
    packed = table[table[:, fields.TAIL_OF] == fields.PACKED, fields.COUNT]
    saved = (packed - 1).sum()
    assert plan.num_tasks == len(batch.q_len) + plan.num_kept_nodes - saved
    check_reference(batch, plan)


def test_tokens_below_a_kept_node_lie_together() -> None:
    batch = make_batch(**FORESTS["three-levels"])  # type: ignore[arg-type]
    plan = make_planner(batch).plan(*batch.planned())
    assert plan.num_kept_nodes == 4
    # Children first, in the order of their indices, then the node's own requests.
    assert plan.gather.tolist() == [0, 1, 6, 2, 3, 4, 5]


def test_the_same_batch_gives_the_same_plan() -> None:
    batch = make_batch(**FORESTS["chunks"])  # type: ignore[arg-type]
    planner, other = make_planner(batch), make_planner(batch)
    first = planner.plan(*batch.planned())
    table, gather = first.task_table.copy(), first.gather.copy()
    planner.plan(*make_batch(own_len=[9] * 7).planned())
    for again in (planner.plan(*batch.planned()), other.plan(*batch.planned())):
        assert np.array_equal(again.task_table, table)
        assert np.array_equal(again.gather, gather)


def test_the_dearest_tasks_of_a_tile_come_first() -> None:
    batch = make_batch(**FORESTS["chunks"])  # type: ignore[arg-type]
    planner = make_planner(batch)
    table = planner.plan(*batch.planned()).task_table
    is_node = table[:, fields.IS_NODE] == 1
    spans = table[:, fields.KV_END] - table[:, fields.KV_BEGIN]
    cost = spans * planner._settings[fields.TOKEN_BYTES + table[:, fields.TILE]]
    assert 0 < is_node.sum() < len(table)
    assert (np.diff(table[:, fields.TILE]) >= 0).all()
    for tile in range(3):
        assert (np.diff(cost[table[:, fields.TILE] == tile]) <= 0).all()


@pytest.mark.parametrize("page_size", [1, 48], ids="page{}".format)
def test_splits_where_there_are_too_few_tasks(page_size: int) -> None:
    batch = make_batch(own_len=[1000], page_size=page_size)
    planner = make_planner(batch)
    plan = planner.plan(*batch.planned())
    table = plan.task_table[np.argsort(plan.task_table[:, fields.KV_BEGIN])]
    assert 1 < plan.num_tasks <= SMALL.num_sms * SMALL.tiles.programs[0]
    lengths = np.diff(table[:, fields.KV_BEGIN])
    assert (lengths % math.lcm(page_size, SMALL.tiles.block_n[0]) == 0).all()
    assert (lengths >= SMALL.min_split_tokens).all()
    unit = planner._settings[fields.QUANTUM]
    assert np.ptp(table[:, fields.KV_END] - table[:, fields.KV_BEGIN]) <= unit
    assert (table[:-1, fields.TAIL_OF] == -1).all()
    assert table[-1, fields.TAIL_OF] == 0
    many = make_batch(own_len=[150] * 64, page_size=page_size)
    plan = make_planner(many).plan(*many.planned())
    assert plan.num_parts == 0 and (plan.task_table[:, fields.TAIL_OF] != -1).all()


@given(
    st.lists(st.tuples(st.integers(0, 300), st.floats(0.01, 9)), min_size=6, max_size=6)
)
@settings(max_examples=examples(60), deadline=None)
def test_the_end_of_launches_is_that_of_a_list_schedule(
    groups: list[tuple[int, float]],
) -> None:
    """Six groups of equal tasks on 64 places, each task on the place that is free first."""
    launches = np.zeros((3, 1, 7))
    launches[:, 0, fields.LARGE : fields.MERGED] = np.reshape(groups, (3, 4))
    launches[:, 0, [fields.LARGE, fields.SMALL]] /= 64
    launches[1, 0, fields.MERGED] = 5.0
    free = [0.0] * 64
    for tile in (2, 1, 0):
        for count, time_of_each in groups[2 * tile : 2 * tile + 2]:
            for _ in range(count):
                heapq.heapreplace(free, free[0] + time_of_each)
    found = fields.end_of_launches(launches, np.zeros(3, np.int64))
    assert found == pytest.approx(max(free) + 5.0)


def test_launches_share_the_places_of_a_small_batch() -> None:
    """Long and short spans in two tiles: all tasks run at once, for about as long."""
    batch = make_batch(
        node_parent=[-1], node_end=[2048], request_node=[0] * 10, own_len=[200] * 10
    )
    config = replace(SMALL, num_sms=16, task_bytes=1 << 15)
    planner = make_planner(batch, config=config)
    plan = planner.plan(*batch.planned())
    assert plan.tile_tasks[0] > 10 and plan.tile_tasks[1] > 1
    places = planner._settings[fields.PLACES : fields.PLACES + 3]
    taken = np.array(plan.tile_tasks) * planner.num_kv_heads / places
    assert 0.7 < taken.sum() <= 1


def test_one_tail_per_decode_and_none_for_a_chunk() -> None:
    batch = make_batch(**FORESTS["chunks"])  # type: ignore[arg-type]
    plan = make_planner(batch).plan(*batch.planned())
    tails = plan.task_table[:, fields.TAIL_OF]
    assert sorted(tails[tails >= 0]) == np.flatnonzero(batch.q_len == 1).tolist()
    assert not plan.reusable
    assert not plan.still_valid(batch.kv_len)


def test_how_long_a_plan_is_good() -> None:
    batch = make_batch(**FORESTS["two-groups"], room=16)  # type: ignore[arg-type]
    plan = make_planner(batch).plan(*batch.planned())
    assert plan.still_valid(batch.kv_len)
    for tokens in ([1] * 7, [0, 3, 16, 1, 2, 0, 16]):
        grown = batch.grown(tokens)
        assert plan.still_valid(grown.kv_len)
        check_reference(grown, plan)
    assert not plan.still_valid(ints(batch.kv_len + 17))
    assert not plan.still_valid(ints(batch.kv_len - np.eye(7)[2]))
    assert not plan.still_valid(batch.kv_len[:-1])


def test_the_reference_reads_fp8() -> None:
    batch = make_batch(**FORESTS["chunks"], kv_dtype=torch.float8_e4m3fn)  # type: ignore[arg-type]
    scaled = replace(batch, features=Features(v_scale=3.0))
    check_reference(scaled, make_planner(batch).plan(*batch.planned()))
    exact = make_batch(**FORESTS["chunks"])  # type: ignore[arg-type]
    out, wanted = batch.truth()[0], exact.truth()[0]
    assert 1e-4 < (out - wanted).norm() / wanted.norm() < 0.1


def test_estimates() -> None:
    shared = make_batch(
        node_parent=[-1], node_end=[500], request_node=[0] * 8, own_len=[10] * 8
    )
    plan = make_planner(shared).plan(*shared.planned())
    token_bytes = 2 * 2 * 32 * 4
    assert plan.kv_bytes == (500 + 80) * token_bytes
    assert plan.kv_bytes_unshared == 8 * 510 * token_bytes
    assert plan.predicted_gain > 2
    alone = make_batch(own_len=[100] * 64)
    plan = make_planner(alone).plan(*alone.planned())
    assert plan.kv_bytes == plan.kv_bytes_unshared
    assert plan.predicted_gain == 1
    assert plan.num_parts == 0


def test_a_planner_keeps_its_addresses() -> None:
    batch = make_batch(**FORESTS["chunks"])  # type: ignore[arg-type]
    planner = make_planner(batch)
    buffers, workspace = planner.buffers, planner.workspace
    tensors = [buffers.header, buffers.tasks, buffers.gather, buffers.part_indptr]
    tensors += [buffers.num_tokens, workspace.o_parts, workspace.lse_parts]
    before = [tensor.data_ptr() for tensor in tensors]
    plan = planner.plan(*batch.planned())
    assert [tensor.data_ptr() for tensor in tensors] == before
    assert buffers.num_tokens.item() == batch.num_tokens
    counts = np.diff(buffers.header[:4].numpy()).tolist()
    assert counts == list(plan.tile_tasks)
    assert sum(counts) == plan.num_tasks
    table = buffers.tasks[: plan.num_tasks * fields.NUM_FIELDS].view(plan.num_tasks, -1)
    assert np.array_equal(table.numpy(), plan.task_table)
    sharing = make_planner(batch, workspace=workspace)
    assert sharing.max_parts == planner.max_parts


def running(num_requests: int, num_nodes: int) -> tuple[np.ndarray, ...]:
    """Decodes of a batch in three levels of shared prefixes."""
    random = np.random.default_rng(0)
    parents = ints([-1] + [0] * 7 + [1 + i % 7 for i in range(num_nodes - 8)])
    ends = ints([100] + [700] * 7 + [900] * (num_nodes - 8))
    nodes = ints(random.integers(8, num_nodes, num_requests))
    kv_len = ints(ends[nodes] + random.integers(1, 500, num_requests))
    ones, rows = np.ones(num_requests), np.arange(num_requests)
    return ints(ones), kv_len, ints(rows), parents, ends, nodes


def test_planning_is_quick() -> None:
    """Bounds that hold on a slow and busy core. The targets are 150 and 20 us."""
    config = replace(
        pick_config(torch.device("cpu"), 128, 2),
        num_sms=132,
        min_split_tokens=128,
        tiles=TileConfig((64, 64, 64), (3, 3, 3)),
    )
    planner = AttentionPlanner(
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
        page_size=1,
        device="cpu",
        max_requests=512,
        max_tokens=512,
        max_nodes=64,
        config=config,
    )
    batch = running(512, 64)
    plan = planner.plan(*batch)
    assert plan.num_kept_nodes > 50
    times, reuse_times = [], []
    for _ in range(50):
        began = time.perf_counter()
        plan = planner.plan(*batch)
        planned = time.perf_counter()
        assert plan.still_valid(batch[1])
        times.append(planned - began)
        reuse_times.append(time.perf_counter() - planned)
    assert np.median(times) < 5e-3
    assert np.median(reuse_times) < 5e-4
