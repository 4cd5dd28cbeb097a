"""Planning of shared-prefix attention, and its execution in PyTorch."""

from __future__ import annotations

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
    ints,
    make_batch,
    make_planner,
    poisoned_outputs,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kernel_ext.shared_prefix_attention import (
    Plan,
    Planner,
    TileConfig,
    pick_config,
    run,
    run_reference,
)
from sgl_kernel_ext.shared_prefix_attention import tasks as fields
from sgl_kernel_ext.shared_prefix_attention.forest import keep_nodes


@st.composite
def batches(draw: st.DrawFn, longest: int = 60) -> Batch:
    """Any small forest with decodes and chunks below and beside it."""
    num_nodes = draw(st.integers(0, 6))
    parents = [draw(st.integers(-1, node - 1)) for node in range(num_nodes)]
    ends: list[int] = []
    for parent in parents:
        above = ends[parent] if parent >= 0 else 0
        ends.append(above + draw(st.integers(0, longest)))
    count = draw(st.integers(1, 8))
    q_len = [draw(st.sampled_from([1, 1, 1, 2, 17, 40])) for _ in range(count)]
    return make_batch(
        node_parent=parents,
        node_end=ends,
        request_node=[draw(st.integers(-1, num_nodes - 1)) for _ in range(count)],
        q_len=q_len,
        own_len=[size + draw(st.integers(0, longest)) for size in q_len],
        heads=draw(st.sampled_from([(2, 2), (4, 2), (3, 1), (7, 1)])),
        head_dim=16,
        page_size=draw(st.sampled_from([1, 4, 16])),
        seed=draw(st.integers(0, 3)),
    )


def requests_of_tokens(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Request and position of every flat query token."""
    request = np.repeat(np.arange(len(batch.q_len)), batch.q_len)
    starts = np.repeat(np.cumsum(batch.q_len) - batch.q_len, batch.q_len)
    context = (batch.kv_len - batch.q_len)[request]
    return request, context + np.arange(len(request)) - starts


def check_covered_once(batch: Batch, plan: Plan) -> None:
    """Every token gets each KV position it sees from exactly one task."""
    request, position = requests_of_tokens(batch)
    assert sorted(plan.gather) == list(range(batch.num_tokens))
    spans: list[list[tuple[int, int]]] = [[] for _ in request]
    parts: list[list[int]] = [[] for _ in request]
    for task in plan.task_table:
        begin, end = int(task[fields.KV_BEGIN]), int(task[fields.KV_END])
        assert begin < end
        stop = task[fields.START] + task[fields.COUNT]
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


def same_kv(batch: Batch, row: int, other: int, begin: int, end: int) -> bool:
    at = torch.arange(begin, end)
    page = batch.table[:, at // batch.page_size].long()
    slots = page * batch.page_size + at % batch.page_size
    return torch.equal(batch.k_cache[slots[row]], batch.k_cache[slots[other]])


def check_reference(batch: Batch, plan: Plan) -> None:
    out, lse = poisoned_outputs(batch, plan)
    run_reference(plan, *batch.tensors(), out, batch.scale, lse=lse)
    assert_attention_close(batch, out, lse)


@given(batch=batches(), max_tile=st.sampled_from([16, 64, 128]))
@settings(max_examples=120, deadline=None)
def test_any_plan_covers_all_kv_once_and_computes_attention(
    batch: Batch, max_tile: int
) -> None:
    planner = make_planner(batch, max_tile=max_tile)
    plan = planner.plan(*batch.planned())
    check_covered_once(batch, plan)
    check_reference(batch, plan)


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
    assert plan.num_tasks == len(batch.q_len) + plan.num_kept_nodes
    check_reference(batch, plan)


def test_triton_refuses_cpu_tensors() -> None:
    batch = make_batch(own_len=[3])
    plan = make_planner(batch).plan(*batch.planned())
    with pytest.raises(ValueError, match="on CPU tensors use run_reference"):
        run(plan, *batch.tensors(), torch.empty_like(batch.q), batch.scale)


def test_tokens_below_a_kept_node_lie_together() -> None:
    batch = make_batch(**FORESTS["three-levels"])  # type: ignore[arg-type]
    plan = make_planner(batch).plan(*batch.planned())
    assert plan.num_kept_nodes == 4
    # Children first, in the order of their indices; then the node's own requests.
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


@pytest.mark.parametrize("separate", [False, True], ids=["mixed", "separate"])
def test_the_dearest_tasks_come_first(separate: bool) -> None:
    batch = make_batch(**FORESTS["chunks"])  # type: ignore[arg-type]
    planner = make_planner(batch, separate_nodes=separate)
    table = planner.plan(*batch.planned()).task_table
    is_node = table[:, fields.IS_NODE] == 1
    spans = table[:, fields.KV_END] - table[:, fields.KV_BEGIN]
    cost = spans * planner._settings[fields.TOKEN_BYTES + table[:, fields.TILE]]
    assert 0 < is_node.sum() < len(table)
    if separate:
        assert is_node[: is_node.sum()].all()
        assert (np.diff(cost[is_node]) <= 0).all()
        assert (np.diff(cost[~is_node]) <= 0).all()
    else:
        assert (np.diff(cost) <= 0).all()


def brute_force_cost(
    batch: Batch, kept: set[int], tile: int, kv: int, part: int, task: int
) -> int:
    """The documented cost of keeping exactly these nodes."""
    group = 3
    parents, ends = batch.node_parent, batch.node_end

    def start_of(node: int) -> int:
        while node >= 0 and node not in kept:
            node = parents[node]
        return int(ends[node]) if node >= 0 else 0

    def is_below(node: int, above: int) -> bool:
        while node >= 0 and node != above:
            node = parents[node]
        return node == above

    total = 0
    for node in kept:
        below = [is_below(each, node) for each in batch.request_node]
        rows = int(batch.q_len[below].sum()) * group
        tiles = math.ceil(rows / tile)
        total += tiles * (int(ends[node]) - start_of(parents[node])) * kv
        total += rows * part + tiles * task
    for i, node in enumerate(batch.request_node):
        tiles = math.ceil(int(batch.q_len[i]) * group / tile)
        total += tiles * (int(batch.kv_len[i]) - start_of(node)) * kv
    return total


@given(
    batch=batches(longest=200),
    part=st.sampled_from([1, 100, 500]),
    task=st.sampled_from([0, 3000]),
)
@settings(max_examples=60, deadline=None)
def test_no_other_choice_of_nodes_is_cheaper(
    batch: Batch, part: int, task: int
) -> None:
    num_nodes = len(batch.node_parent)
    keep = np.zeros(num_nodes, np.bool_)
    keep_nodes(
        batch.q_len,
        batch.node_parent,
        batch.node_end,
        batch.request_node,
        3,
        64,
        128,
        part,
        task,
        keep,
    )
    chosen = brute_force_cost(
        batch, set(np.flatnonzero(keep).tolist()), 64, 128, part, task
    )
    below = [0] * num_nodes
    for node in batch.request_node:
        while node >= 0:
            below[node] += 1
            node = batch.node_parent[node]
    shared = [node for node in range(num_nodes) if below[node] >= 2]
    assert not any(keep[node] for node in range(num_nodes) if below[node] < 2)
    for size in range(len(shared) + 1):
        for kept in itertools.combinations(shared, size):
            assert chosen <= brute_force_cost(batch, set(kept), 64, 128, part, task)


def kept_nodes(task_bytes: int = 0, **changes: object) -> int:
    """How many nodes are kept at float32, head_dim 32, two query heads per KV head."""
    batch = make_batch(**changes)  # type: ignore[arg-type]
    config = replace(SMALL, task_bytes=task_bytes)
    return make_planner(batch, config=config).plan(*batch.planned()).num_kept_nodes


def test_when_a_node_is_kept() -> None:
    """One node, n decodes: n * L * 256 bytes against L * 256 + n * 2 * 264."""
    group = {"node_parent": [-1], "own_len": [4] * 4, "request_node": [0] * 4}
    assert kept_nodes(node_end=[2], **group) == 0  # 2048 against 512 + 2112
    assert kept_nodes(node_end=[3], **group) == 1  # 3072 against 768 + 2112
    assert kept_nodes(node_end=[3], task_bytes=193, **group) == 0
    assert kept_nodes(node_end=[3], task_bytes=191, **group) == 1
    alone = {"node_parent": [-1], "own_len": [4, 4], "request_node": [0, -1]}
    assert kept_nodes(node_end=[500], **alone) == 0


def test_a_folded_root_makes_its_children_longer() -> None:
    """A few tokens that all share are read by each group, not by a task for all."""
    batch = make_batch(
        node_parent=[-1, 0, 0],
        node_end=[3, 80, 90],
        request_node=[1, 1, 1, 2, 2, 2],
        own_len=[4] * 6,
        heads=(16, 1),
    )
    plan = make_planner(batch, max_tile=64).plan(*batch.planned())
    assert plan.num_kept_nodes == 2
    nodes = plan.task_table[plan.task_table[:, fields.IS_NODE] == 1]
    assert nodes[:, fields.KV_BEGIN].min() == 0
    check_covered_once(batch, plan)


@pytest.mark.parametrize("page_size", [1, 48], ids="page{}".format)
def test_splits_where_there_are_too_few_tasks(page_size: int) -> None:
    batch = make_batch(own_len=[1000], page_size=page_size)
    plan = make_planner(batch).plan(*batch.planned())
    table = plan.task_table[np.argsort(plan.task_table[:, fields.KV_BEGIN])]
    assert 1 < plan.num_tasks <= 2 * SMALL.num_sms * SMALL.items_per_sm
    lengths = np.diff(table[:, fields.KV_BEGIN])
    assert (lengths % math.lcm(page_size, SMALL.tiles.block_n[0]) == 0).all()
    assert (lengths >= SMALL.min_split_tokens).all()
    assert (table[:-1, fields.TAIL_OF] == -1).all()
    assert table[-1, fields.TAIL_OF] == 0
    many = make_batch(own_len=[100] * 64, page_size=page_size)
    assert make_planner(many).plan(*many.planned()).num_tasks == 64


def test_one_tail_per_decode_and_none_for_a_chunk() -> None:
    batch = make_batch(**FORESTS["chunks"])  # type: ignore[arg-type]
    plan = make_planner(batch).plan(*batch.planned())
    tails = plan.task_table[:, fields.TAIL_OF]
    assert sorted(tails[tails >= 0]) == np.flatnonzero(batch.q_len == 1).tolist()
    assert not plan.reusable
    assert not plan.still_good(batch.kv_len)


def test_how_long_a_plan_is_good() -> None:
    batch = make_batch(**FORESTS["two-groups"], room=16)  # type: ignore[arg-type]
    plan = make_planner(batch).plan(*batch.planned())
    assert plan.still_good(batch.kv_len)
    for tokens in ([1] * 7, [0, 3, 16, 1, 2, 0, 16]):
        grown = batch.grown(tokens)
        assert plan.still_good(grown.kv_len)
        check_reference(grown, plan)
    assert not plan.still_good(ints(batch.kv_len + 17))
    assert not plan.still_good(ints(batch.kv_len - np.eye(7)[2]))
    assert not plan.still_good(batch.kv_len[:-1])


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
    assert buffers.header[0].item() == plan.num_tasks
    table = buffers.tasks[: plan.num_tasks * fields.NUM_FIELDS].view(plan.num_tasks, -1)
    assert np.array_equal(table.numpy(), plan.task_table)
    sharing = make_planner(batch, workspace=workspace)
    assert sharing.max_parts == planner.max_parts


def test_buffers_that_are_too_small() -> None:
    batch = make_batch(**FORESTS["two-groups"])  # type: ignore[arg-type]
    plan = make_planner(batch).plan(*batch.planned())
    needed = {
        "requests": 7,
        "nodes": 2,
        "tokens": 7,
        "tasks": plan.num_tasks,
        "parts": plan.num_parts,
    }
    for name, count in needed.items():
        enough = make_planner(batch, **{f"max_{name}": count})
        assert enough.plan(*batch.planned()).num_tasks == plan.num_tasks
        small = make_planner(batch, **{f"max_{name}": count - 1})
        with pytest.raises(ValueError, match=f"{count} {name}, .*: 1 too few"):
            small.plan(*batch.planned())


def test_what_plan_refuses() -> None:
    good = {
        "q_len": [1, 3],
        "kv_len": [10, 20],
        "table_row": [0, 1],
        "node_parent": [-1, 0],
        "node_end": [5, 9],
        "request_node": [1, 1],
    }
    planner = make_planner(make_batch())
    planner.plan(**{name: ints(values) for name, values in good.items()})
    refusals: list[tuple[dict[str, list[int]], str]] = [
        ({"node_parent": [-1, 1]}, r"node_parent\[1\] is 1; parents come before"),
        ({"node_parent": [-1, -2]}, r"node_parent\[1\] is -2"),
        ({"node_end": [5, 4]}, r"node_end\[1\] is 4, before the end"),
        ({"node_end": [-5, 9]}, r"node_end\[0\] is -5"),
        ({"q_len": [0, 3]}, r"q_len\[0\] is 0"),
        ({"q_len": [11, 3]}, r"kv_len\[0\] is 10; it counts the 11 queries"),
        ({"request_node": [1, 2]}, r"request_node\[1\] is 2; the forest has 2"),
        ({"request_node": [-2, 1]}, r"request_node\[0\] is -2"),
        ({"node_end": [5, 10]}, "ends at 10, but the queries begin at 9"),
        ({"table_row": [0, -1]}, r"table_row\[1\] is -1"),
        ({"kv_len": [10]}, "kv_len has 1 entries, q_len has 2"),
        ({"node_end": [5]}, "node_end has 1 entries, node_parent has 2"),
    ]
    for change, message in refusals:
        arrays = {name: ints(values) for name, values in (good | change).items()}
        with pytest.raises(ValueError, match=message):
            planner.plan(**arrays)
    arrays = {name: ints(values) for name, values in good.items()}
    with pytest.raises(ValueError, match="kv_len is int64"):
        planner.plan(**(arrays | {"kv_len": np.array([10, 20])}))
    nothing = {name: ints([]) for name in good}
    with pytest.raises(ValueError, match="no requests"):
        planner.plan(**nothing)


def test_what_a_planner_refuses() -> None:
    batch = make_batch()
    refusals: list[tuple[dict[str, object], str]] = [
        ({"num_q_heads": 3}, "3 query heads cannot be divided among 2"),
        ({"num_q_heads": 34, "max_tile": 16}, "17 query heads per KV head exceed"),
        ({"max_tile": 32}, "max_tile is 32"),
        ({"head_dim": 512}, "head_dim is 512"),
        ({"head_dim": 8}, "head_dim is 8"),
        ({"dtype": torch.float8_e4m3fn}, r"dtype is torch\.float8"),
        ({"page_size": 0}, "page_size is 0"),
        ({"max_tasks": 1 << 21}, "too few"),
    ]
    for change, message in refusals:
        with pytest.raises(ValueError, match=message):
            make_planner(batch, **change)


def test_features_that_run_reference_refuses() -> None:
    batch = make_batch(own_len=[3])
    plan = make_planner(batch).plan(*batch.planned())
    out = torch.empty_like(batch.q)
    for feature in ({"sliding_window": 4}, {"logit_cap": 1.0}):
        with pytest.raises(ValueError, match="another kernel"):
            run_reference(plan, *batch.tensors(), out, batch.scale, **feature)  # type: ignore[arg-type]
    run_reference(
        plan, *batch.tensors(), out, batch.scale, sliding_window=-1, logit_cap=0.0
    )
    assert_attention_close(batch, out)


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
    """Bounds that hold on a slow and busy core; the times aimed at are 150 and 20 us."""
    config = replace(
        pick_config(torch.device("cpu"), 128, 2),
        num_sms=132,
        min_split_tokens=128,
        items_per_sm=8,
        tiles=TileConfig((64, 64, 64), (3, 3, 3), 4, 8, "for this test"),
    )
    planner = Planner(
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
        assert plan.still_good(batch[1])
        times.append(planned - began)
        reuse_times.append(time.perf_counter() - planned)
    assert np.median(times) < 5e-3
    assert np.median(reuse_times) < 5e-4
