"""Plans and machines as bytes that can only hold data.

They are msgpack, read by the types of :class:`JobPlan` and :class:`Machine`; nothing in them
names a class or a function. An array is its dtype and shape, and the bytes of all arrays
follow the rest, which is small. What was read is checked before it is used, since compiled
code follows the numbers of a plan without checks of its own.
"""

from __future__ import annotations

import math
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np

from ..errors import InputError
from ..planner.costs.cost_model import ALWAYS_MIXED, HEAD_MEMORY, TOKENS, CostModel
from ..planner.kv_lengths.batch_state import GROUPS, TREE
from ..planner.machine_model import EngineLimits, Machine
from ..scheduling.job_plan import JobPlan

# Most bytes of a plan and of a machine. A plan has about 40 for each request, which is little
# beside the request itself: it is not compressed.
MAX_PLAN_BYTES = 1 << 30
MAX_MACHINE_BYTES = 1 << 24
# Most bytes besides those of arrays. A plan and a machine have a few hundred.
MAX_HEAD_BYTES = 1 << 14
# Numbers of a request in its job are below. A table of so many is made to look them up.
MAX_NUMBER = 1 << 27
# Integers of a machine are below: products of two of them are computed in floats.
_MOST_INT = 1 << 53

T = TypeVar("T", JobPlan, Machine)


def to_bytes(value: JobPlan | Machine) -> bytes:
    arrays: list[bytes] = []
    head = msgspec.msgpack.encode(value, enc_hook=partial(_plain, arrays))
    return msgspec.msgpack.encode((head, b"".join(arrays)))


def plan_of(data: bytes) -> JobPlan:
    """The plan of :func:`to_bytes`. Raises InputError if the bytes are something else, too
    large, or a plan that contradicts itself.
    """
    plan = _read(data, JobPlan, MAX_PLAN_BYTES)
    _check_plan(plan)
    return plan


def machine_of(data: bytes) -> Machine:
    """The machine of :func:`to_bytes`. Raises InputError if the bytes are something else, too
    large, or no machine that can be.
    """
    machine = _read(data, Machine, MAX_MACHINE_BYTES)
    _check_numbers([*_values(machine.limits), *machine.limits.second_pool])
    _check_cost(machine.cost)
    if machine.datasheet is not None:
        _check_cost(machine.datasheet)
    if min(machine.limits.second_pool) < 0:
        raise InputError("A machine has a number below 0 where there can be none.")
    return machine


def _check_cost(cost: CostModel) -> None:
    table = cost.table
    if table is not None and not (
        table.ndim == 2
        and table.shape[0] == HEAD_MEMORY + 1
        and table.shape[1] > 1
        and np.isfinite(table).all()
        and (np.diff(table[TOKENS]) > 0).all()
    ):
        raise InputError("A machine's table of steps is none.")
    _check_numbers([*_values(cost), *cost.extras])
    more = (cost.state_reads, cost.window, cost.window_reads, *cost.extras)
    if not all(map(math.isfinite, more)):
        raise InputError("A machine has a cost without end.")
    if min(more[:3]) < 0:
        raise InputError("A machine has a number below 0 where there can be none.")


def _values(part: EngineLimits | CostModel) -> list[object]:
    return [getattr(part, field.name) for field in fields(part)]


def _check_numbers(values: list[object]) -> None:
    for value in values:
        if isinstance(value, int) and not -_MOST_INT < value < _MOST_INT:
            raise InputError(f"A machine has the number {value}.")
        if isinstance(value, float) and math.isnan(value):
            raise InputError("A machine has a number that is none (NaN).")


def _plain(arrays: list[bytes], value: object) -> object:
    """Arrays and numbers of numpy as msgpack has them. Bytes of arrays go to ``arrays``."""
    if isinstance(value, np.ndarray):
        arrays.append(value.tobytes())
        return value.dtype.str, value.shape
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be in a plan")


class _Arrays:
    """The bytes of all arrays, which are taken in the order of writing."""

    def __init__(self, data: memoryview) -> None:
        self.left = data

    def take(self, kind: Any, value: object) -> Any:
        """The array that :func:`_plain` made. ``kind``: its type, such as ``Int32s``."""
        dtype, shape = msgspec.convert(value, tuple[str, list[int]])
        (expected,) = get_args(get_args(kind)[1])
        if dtype != np.dtype(expected).str:
            raise ValueError(
                f"an array of {dtype[:20]!r} in place of {expected.__name__}"
            )
        if min(shape, default=0) < 0 or len(shape) > 4:
            raise ValueError(f"an array cannot have the shape {shape[:5]}")
        size = math.prod(shape) * np.dtype(expected).itemsize
        if size > len(self.left):
            raise ValueError(f"too few bytes for an array of the shape {shape}")
        data, self.left = self.left[:size], self.left[size:]
        # What is read from bytes cannot be written, so a copy.
        return np.frombuffer(data, expected).reshape(shape).copy()


def _read(data: bytes, kind: type[T], limit: int) -> T:
    try:
        if len(data) > limit:
            raise ValueError(f"at most {limit} bytes are allowed")
        head, rest = msgspec.msgpack.decode(data, type=tuple[memoryview, memoryview])
        if len(head) > MAX_HEAD_BYTES:
            raise ValueError(f"{len(head)} bytes besides those of arrays")
        arrays = _Arrays(rest)
        value = msgspec.msgpack.decode(head, type=kind, dec_hook=arrays.take)
        if arrays.left:
            raise ValueError(f"{len(arrays.left)} bytes belong to no array")
        return value
    except (RecursionError, msgspec.MsgspecError, ValueError, TypeError) as error:
        reason = f"These {len(data)} bytes are no {kind.__name__}: {error}."
        raise InputError(reason) from None


def _check_plan(plan: JobPlan) -> None:
    """Raise InputError for a plan whose arrays do not fit each other."""
    n, m = plan.num_requests, len(plan.parent)
    _check_arrays(plan, n, m)
    if (plan.leaf_begin > plan.leaf_end).any():
        raise InputError("A plan's nodes end before they begin.")
    for name in ("est_decode_steps", "est_decode_steps_sq"):
        array = getattr(plan, name)
        if not ((array >= 0) & np.isfinite(array)).all():
            raise InputError(
                f"A plan's {name} has a number that is no number of steps."
            )
    if plan.density is not None and np.isnan(plan.density).any():
        raise InputError("A plan's density has a number that is none (NaN).")
    if plan.length_rule not in (0, TREE, GROUPS):
        raise InputError(f"A plan has length_rule={plan.length_rule}.")
    if plan.max_wait_steps is not None and plan.max_wait_steps < 1:
        raise InputError(f"A plan has max_wait_steps={plan.max_wait_steps}.")
    for field in fields(plan.cost):
        value = getattr(plan.cost, field.name)
        if isinstance(value, float) and not value >= 0:
            raise InputError(f"A plan's cost has {field.name}={value}.")
    if (mixing := plan.cost.mixing) is not None:
        if len(mixing.matrices_s) != len(ALWAYS_MIXED.matrices_s):
            raise InputError(
                f"A plan has times of {len(mixing.matrices_s)} matrices, and not "
                f"{len(ALWAYS_MIXED.matrices_s)}."
            )
        if any(map(math.isnan, (*mixing[:-1], *mixing.matrices_s))):
            raise InputError("A plan's cost has a time that is none (NaN).")
    for name in ("number", "position"):
        array = getattr(plan, name)
        if (np.diff(np.sort(array)) == 0).any():
            raise InputError(f"A plan's {name} has a number twice.")
    # Parents come before their children, so no walk to the root goes in circles.
    if m < 1 or (plan.parent >= np.arange(m)).any() or (plan.parent[1:] < 0).any():
        raise InputError("A plan's nodes are no tree.")
    if not 0 <= plan.num_left <= n:
        raise InputError(f"A plan of {n} requests has num_left={plan.num_left}.")


def _check_arrays(plan: JobPlan, n: int, m: int) -> None:
    """The length of each array, its least number and the end of its numbers, if any."""
    anything = (None, None)
    limits: dict[str, tuple[int, int | None, int | None]] = {
        "number": (n, 0, MAX_NUMBER),
        "position": (n, 0, n),
        "node": (n, 0, m),
        "input_len": (n, 0, None),
        "read_len": (n, 0, None),
        "est_decode_steps": (n, *anything),
        "est_decode_steps_sq": (n, *anything),
        "density": (n, *anything),
        "length_key": (n, *anything),
        "family": (n, *anything),
        "parent": (m, -1, m),
        "depth": (m, 0, None),
        "leaf_begin": (m, 0, n + 1),
        "leaf_end": (m, 0, n + 1),
    }
    for name, (size, least, end) in limits.items():
        array = getattr(plan, name)
        if array is None:
            continue
        if array.shape != (size,):
            raise InputError(
                f"A plan's {name} has the shape {array.shape}, not {(size,)}."
            )
        if size and (
            (least is not None and array.min() < least)
            or (end is not None and array.max() >= end)
        ):
            raise InputError(
                f"A plan's {name} has numbers from {array.min()} to {array.max()}, "
                f"outside of {least} to {end}."
            )
