"""Plans and machines as bytes that are safe to read from another process.

They are pickles, of which only dataclasses and named tuples of the planner and numpy's
arrays are read: data cannot name a function to call.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import pickle
import zlib
from enum import Enum
from typing import Any

from ..errors import InputError
from ..planner.machine_model import Machine
from ..scheduling.job_plan import JobPlan

_PLANNER = ("sglang_batch.planner.", "sglang_batch.scheduling.")
# What numpy's pickles of arrays, numbers and dtypes name.
_NUMPY = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy.core.numeric", "_frombuffer"),
}


class _PlanUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NUMPY:
            return super().find_class(module, name)
        if module.startswith(_PLANNER) and "." not in name:
            found = getattr(importlib.import_module(module), name, None)
            if isinstance(found, type) and _is_data(found):
                return found
        raise InputError(
            f"A plan cannot have {module}.{name}: head and workers need the same version "
            "of sglang-batch."
        )


def _is_data(kind: type) -> bool:
    named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return dataclasses.is_dataclass(kind) or named_tuple or issubclass(kind, Enum)


def to_bytes(value: JobPlan | Machine) -> bytes:
    """A plan or a machine as bytes."""
    return zlib.compress(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), 1)


def plan_of(data: bytes) -> JobPlan:
    """The plan of :func:`to_bytes`.

    Raises:
        InputError: the bytes are something else.
    """
    plan: JobPlan = _read(data, JobPlan)
    return plan


def machine_of(data: bytes) -> Machine:
    """The machine of :func:`to_bytes`.

    Raises:
        InputError: the bytes are something else.
    """
    machine: Machine = _read(data, Machine)
    return machine


def _read(data: bytes, kind: type[Any]) -> Any:
    try:
        value = _PlanUnpickler(io.BytesIO(zlib.decompress(data))).load()
    except (zlib.error, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise InputError(
            f"These {len(data)} bytes are no {kind.__name__}: {error}"
        ) from None
    if not isinstance(value, kind):
        raise InputError(
            f"A {type(value).__name__} came in place of a {kind.__name__}."
        )
    return value
