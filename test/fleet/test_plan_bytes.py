"""Plans and machines travel as bytes that hold data, and cannot do anything."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
import zlib
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from builders import make_machine
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_batch.config import POLICIES, OfflineBatchConfig
from sglang_batch.errors import InputError
from sglang_batch.fleet import plan_bytes
from sglang_batch.job.job_planner import JobPlanner
from sglang_batch.planner.costs.cost_model import (
    ALWAYS_MIXED,
    CostModel,
    MixingCost,
    StepExtras,
    linear_table,
)
from sglang_batch.planner.machine_model import Machine, PoolShares
from sglang_batch.planner.requests import UNKNOWN, PlanRequests
from sglang_batch.scheduling.job_plan import JobPlan, unplanned


def a_plan(
    policy: str = "dual-scan", n: int = 40, max_wait_steps: int | None = None
) -> JobPlan:
    prompts = [[1, 2, 3, i % 4, i] for i in range(n)]
    requests = PlanRequests(
        np.concatenate([np.array(p, np.int32) for p in prompts]),
        np.arange(0, 5 * n + 1, 5),
        np.full(n, 16, np.int32),
        np.full(n, UNKNOWN, np.int32),
    )
    machine = make_machine()
    config = OfflineBatchConfig(policy=policy, max_wait_steps=max_wait_steps)
    planner = JobPlanner(requests, np.arange(n), machine, config)
    return planner.plans()[0].for_scheduler(machine)


def full_machine() -> Machine:
    """A machine that has every kind of value that a machine can have."""
    machine = make_machine()
    cost = dataclasses.replace(
        machine.cost,
        table=linear_table(1e-6, 1e-3),
        extras=StepExtras(*(float(i) for i in range(10))),
        interference_exponent=float("inf"),
        window=np.int64(3),
        padded=np.bool_(True),
        state_reads=np.float64(0.25),
    )
    limits = dataclasses.replace(
        machine.limits, second_pool=PoolShares(7, 2, 3), max_running=None
    )
    return Machine(cost, limits, machine.cost)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, and their arrays of one dtype and shape."""
    if isinstance(one, np.ndarray):
        return (
            one.dtype == other.dtype
            and np.array_equal(one, other)
            and other.flags.writeable
        )
    if dataclasses.is_dataclass(one):
        return type(one) is type(other) and all(
            same(getattr(one, f.name), getattr(other, f.name))
            for f in dataclasses.fields(one)
        )
    return bool(one == other)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_of_each_policy_arrives_as_it_was(policy: str) -> None:
    plan = a_plan(policy)
    assert same(plan, plan_bytes.plan_of(plan_bytes.to_bytes(plan)))
    for other in (plan.without_prefixes(), plan.from_one_end()):
        assert same(other, plan_bytes.plan_of(plan_bytes.to_bytes(other)))


def test_a_plan_with_all_that_it_may_have_arrives_as_it_was() -> None:
    matrices = (1e-300, *ALWAYS_MIXED.matrices_s[1:])
    mixing = MixingCost(1.0, 2.0, float("inf"), 0.5, matrices)
    plan = a_plan()
    plan = dataclasses.replace(
        plan,
        cost=dataclasses.replace(plan.cost, mixing=mixing),
        compute_s=float("inf"),
        length_key=np.arange(40, dtype=np.int32),
        family=np.zeros(40, np.int32),
        max_wait_steps=3,
    )
    assert same(plan, plan_bytes.plan_of(plan_bytes.to_bytes(plan)))
    none = unplanned(make_machine())
    assert same(none, plan_bytes.plan_of(plan_bytes.to_bytes(none)))


@pytest.mark.parametrize("policy", ["length-tree", "length-aligned"])
def test_a_limit_of_steps_may_be_larger_than_any_count(policy: str) -> None:
    plan = a_plan(policy, max_wait_steps=10**30)
    assert same(plan, plan_bytes.plan_of(plan_bytes.to_bytes(plan)))


def test_a_machine_arrives_as_it_was() -> None:
    for machine in (make_machine(), full_machine()):
        assert same(machine, plan_bytes.machine_of(plan_bytes.to_bytes(machine)))


class _Attack:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/attacked",)


def _class_write() -> bytes:
    """A pickle that sets an attribute of a class: BUILD with a slot state."""
    name = b"csglang_batch.planner.machine_model\nMachine\n"
    state = b"N}(X\x05\x00\x00\x00pwnedX\x03\x00\x00\x00yesu\x86b."
    return b"\x80\x02" + name + state


@pytest.mark.parametrize("read", [plan_bytes.plan_of, plan_bytes.machine_of])
@pytest.mark.parametrize(
    "data",
    [pickle.dumps(_Attack()), pickle.dumps(make_machine()), _class_write()],
    ids=["attack", "pickle", "class"],
)
def test_pickles_are_not_read(read: Any, data: bytes) -> None:
    for form in (data, zlib.compress(data), _packed(data)):
        with pytest.raises(InputError):
            read(form)
    assert not hasattr(Machine, "pwned")
    assert "pickle" not in vars(plan_bytes)


def _packed(value: object, arrays: bytes = b"") -> bytes:
    return msgspec.msgpack.encode((msgspec.msgpack.encode(value), arrays))


def _changed(path: str, value: object) -> bytes:
    """A plan of which one value is another, as msgpack has it."""
    head, arrays = msgspec.msgpack.decode(plan_bytes.to_bytes(a_plan()))
    fields = msgspec.msgpack.decode(head)
    fields[path] = value
    return _packed(fields, arrays)


def _replaced(**values: object) -> bytes:
    """A plan of which some values are others, which may not fit the rest."""
    return plan_bytes.to_bytes(dataclasses.replace(a_plan(), **values))  # type: ignore[arg-type]


def _ints(*values: int) -> Any:
    return np.array(values, np.int32)


def _cost(**values: Any) -> bytes:
    return _replaced(cost=dataclasses.replace(a_plan().cost, **values))


_BAD = {
    "empty": b"",
    "text": b"plan",
    "number": _packed(7),
    "list": _packed([1, 2]),
    "other record": plan_bytes.to_bytes(make_machine()),
    "nested": b"\x91" * 100_000,
    "nested in an unknown field": b"\x81\xa1x" + b"\x91" * 100_000,
    "huge list": b"\xdd\xff\xff\xff\xff",
    "huge map": b"\xdf\xff\xff\xff\xff",
    "cut": plan_bytes.to_bytes(a_plan())[:-3],
    "more": plan_bytes.to_bytes(a_plan()) + b"x",
    "no array": _changed("parent", 3),
    "dtype of objects": _changed("parent", ["|O", [1]]),
    "dtype of records": _changed("parent", ["i4,i4", [1]]),
    "other dtype": _changed("parent", ["<f4", [1]]),
    "huge shape": _changed("parent", ["<i4", [1 << 40]]),
    "product of shape overflows": _changed("parent", ["<i4", [1 << 62, 4]]),
    "negative shape": _changed("parent", ["<i4", [-1]]),
    "fewer arrays": _changed("number", ["<i4", [0]]),
    "many small values": _changed("policy", [{}] * plan_bytes.MAX_HEAD_BYTES),
    "other length": _replaced(input_len=_ints(1, 2)),
    "node without a parent": _replaced(parent=_ints(-1, -1, -1, -1, -1)),
    "circle": _replaced(parent=_ints(-1, 2, 1, 0, 0)),
    "no node": _replaced(node=_ints(*[1 << 30] * 40)),
    "negative position": _replaced(position=_ints(*range(-1, 39))),
    "position twice": _replaced(position=_ints(*[1] * 40)),
    "huge number": _replaced(number=_ints(*range(39), (1 << 31) - 1)),
    "node that ends before it begins": _replaced(leaf_end=np.zeros(5, np.int32)),
    "steps without end": _replaced(est_decode_steps=np.full(40, np.inf, np.float32)),
    "no steps": _replaced(est_decode_steps_sq=np.full(40, np.nan, np.float32)),
    "no density": _replaced(density=np.full(40, np.nan, np.float32)),
    "unknown rule": _replaced(length_rule=9),
    "wait below 1": _replaced(max_wait_steps=0),
    "no time": _cost(token_time_s=float("nan")),
    "negative time": _cost(kv_read_time_s=-1.0),
    "few matrices": _cost(mixing=MixingCost(1.0, 1.0, 1.0, 1.0, (0.0,))),
    "no matrices": _cost(mixing=ALWAYS_MIXED._replace(step_s=float("nan"))),
    "huge integer": _changed("num_left", (1 << 64) - 1),
}


@pytest.mark.parametrize("data", _BAD.values(), ids=_BAD.keys())
def test_bytes_that_are_no_plan_are_refused(data: bytes) -> None:
    with pytest.raises(InputError):
        plan_bytes.plan_of(data)


_BAD_COSTS = {
    "table": np.zeros((2, 2)),
    "table of nothing": np.zeros((6, 0)),
    "table of NaN": np.full((6, 2), np.nan),
}


@pytest.mark.parametrize("table", _BAD_COSTS.values(), ids=_BAD_COSTS.keys())
def test_a_machine_that_cannot_be_is_refused(table: Any) -> None:
    machine = full_machine()
    bad = dataclasses.replace(machine.cost, table=table)
    with pytest.raises(InputError):
        plan_bytes.machine_of(plan_bytes.to_bytes(Machine(bad, machine.limits)))


def test_a_machine_with_impossible_numbers_is_refused() -> None:
    cost = CostModel(token_time_s=1.0, kv_read_time_s=1.0, state_reads=float("nan"))
    machine = full_machine()
    with pytest.raises(InputError, match="NaN"):
        plan_bytes.machine_of(plan_bytes.to_bytes(Machine(cost, machine.limits)))
    for wrong in ({"state_reads": float("inf")}, {"window": -1}):
        other = dataclasses.replace(machine.cost, **wrong)  # type: ignore[arg-type]
        with pytest.raises(InputError):
            plan_bytes.machine_of(plan_bytes.to_bytes(Machine(other, machine.limits)))
    limits = dataclasses.replace(machine.limits, kv_capacity_tokens=1 << 62)
    with pytest.raises(InputError, match=str(1 << 62)):
        plan_bytes.machine_of(plan_bytes.to_bytes(Machine(machine.cost, limits)))


_BOMBS = """
import msgspec, sys, zlib
from sglang_batch.errors import InputError
from sglang_batch.fleet import plan_bytes
def small(name, value):
    # Values of a byte in place of an array or of times.
    plain = msgspec.msgpack.encode({name: value})
    return [plain, msgspec.msgpack.encode((plain, b""))]
bombs = small("number", [{}] * 6_200_000)
bombs += small("cost", {"mixing": [0, 0, 0, 0, [0] * 6_200_000]})
bombs += [zlib.compress(bytes(1 << 28))]
open("/proc/self/clear_refs", "w").write("5")
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
before = peak()
for bomb in bombs:
    for read in (plan_bytes.plan_of, plan_bytes.machine_of):
        try:
            read(bomb)
        except InputError:
            continue
        sys.exit("was read")
print(peak() - before)
"""


@pytest.mark.slow
def test_bytes_that_expand_take_no_memory() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _BOMBS], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) < 32 << 10  # KiB


def test_more_bytes_than_a_machine_has_are_not_read() -> None:
    with pytest.raises(InputError, match="at most"):
        plan_bytes.machine_of(bytes(plan_bytes.MAX_MACHINE_BYTES + 1))


_GOOD = [plan_bytes.to_bytes(a_plan()), plan_bytes.to_bytes(full_machine())]


@st.composite
def _mutated(draw: st.DrawFn) -> bytes:
    """A message of which some bytes are others, are missing or come twice."""
    data = bytearray(draw(st.sampled_from(_GOOD)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        end = at + draw(st.integers(0, 8))
        data[at:end] = draw(st.binary(max_size=8))
    return bytes(data)


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=16),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from([f.name for f in dataclasses.fields(JobPlan)]), inner
        )
    ),
)


@settings(max_examples=examples(600), deadline=None)
@given(st.binary(max_size=300) | _VALUES.map(_packed) | _mutated())
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for read in (plan_bytes.plan_of, plan_bytes.machine_of):
        try:
            found = read(data)
        except InputError:
            continue
        assert isinstance(found, JobPlan | Machine)


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from([f.name for f in dataclasses.fields(JobPlan)]), _VALUES)
def test_a_plan_with_any_value_is_read_or_refused(name: str, value: object) -> None:
    with suppress(InputError):
        plan_bytes.plan_of(_changed(name, value))
