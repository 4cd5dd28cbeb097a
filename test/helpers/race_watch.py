"""Lanes that only record, and a watch for work that races with that of another lane.

Every PyTorch operator is noted with the lane that it runs on and the storages that it
reads and writes. Events order the lanes, as vector clocks. A read of what another lane
wrote, a write to what another lane reads or wrote, and memory that goes back to one lane
while another still uses it are races unless an event is in between.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_batch.srt.overlap.step_lanes import Lane

Clock = dict[Lane, int]


class RecordingLanes:
    """The lanes of a step on a device with streams, without the device.

    ``calls`` are the waits and keeps in their order. Those in ``dropped``, by their index,
    have no effect.
    """

    def __init__(self, dropped: Iterable[int] = ()) -> None:
        self.now = Lane.STEP
        self.clocks: dict[Lane, Clock] = {lane: dict.fromkeys(Lane, 0) for lane in Lane}
        self.kept: set[tuple[int, Lane]] = set()
        self.calls: list[str] = []
        self.dropped = set(dropped)

    @contextmanager
    def current(self, lane: Lane) -> Iterator[None]:
        before, self.now = self.now, lane
        try:
            yield
        finally:
            self.now = before

    def record(self, lane: Lane) -> Clock:
        return dict(self.clocks[lane])

    def wait(self, lane: Lane, event: Clock) -> None:
        if self._counts(f"{lane.value} waits"):
            own = self.clocks[lane]
            own.update({each: max(own[each], event[each]) for each in Lane})

    def keep(self, tensor: torch.Tensor, lane: Lane) -> None:
        if self._counts(f"keep for {lane.value}"):
            self.kept.add((storage_of(tensor), lane))

    def _counts(self, call: str) -> bool:
        self.calls.append(call)
        return len(self.calls) - 1 not in self.dropped


def storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class RaceWatch(TorchDispatchMode):  # type: ignore[misc]
    """Notes the operators that run within it.

    Args:
        shared: tensors in which each half writes places of its own.

    Attributes:
        races: descriptions, empty if there is none.
        across: how often a lane used what another one had made.
    """

    def __init__(
        self, lanes: RecordingLanes, shared: Iterable[torch.Tensor] = ()
    ) -> None:
        super().__init__()
        self.lanes = lanes
        self.shared = {storage_of(tensor) for tensor in shared}
        self.races: list[str] = []
        self.across: Counter[str] = Counter()
        self._made: dict[int, Lane] = {}
        self._written: dict[int, tuple[Lane, int]] = {}
        self._used: dict[int, Clock] = defaultdict(dict)
        self._alive: Counter[int] = Counter()
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        lane, name = self.lanes.now, str(func)
        clock = self.lanes.clocks[lane]
        clock[lane] += 1
        written = set()
        arguments = func._schema.arguments
        for argument, value in zip(arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written |= {storage_of(t) for t in _tensors(value)}
        for argument in arguments[len(args) :]:
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = kwargs.get(argument.name)
                written |= {storage_of(t) for t in _tensors(value)}
        for tensor in _tensors((args, kwargs)):
            self._use(tensor, lane, clock, name, storage_of(tensor) in written)
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            storage = storage_of(tensor)
            if storage not in self._used and storage not in self.shared:
                self._made[storage] = lane
                self._written[storage] = lane, clock[lane]
                self._used[storage] = {lane: clock[lane]}
            self._follow(tensor, storage)
        return out

    def _use(
        self, tensor: torch.Tensor, lane: Lane, clock: Clock, name: str, writes: bool
    ) -> None:
        storage = storage_of(tensor)
        if storage in self.shared:
            return
        self._follow(tensor, storage)
        by, at = self._written.get(storage, (Lane.STEP, 0))
        if by is not lane:
            self.across[f"{by.value} to {lane.value}"] += 1
            if clock[by] < at:
                self.races.append(f"{name} on {lane.value} uses what {by.value} writes")
        if writes:
            for other, last in self._used[storage].items():
                if other is not lane and clock[other] < last:
                    self.races.append(f"{name} on {lane.value}: {other.value} uses it")
            self._written[storage] = lane, clock[lane]
        self._used[storage][lane] = clock[lane]

    def _follow(self, tensor: torch.Tensor, storage: int) -> None:
        if id(tensor) not in self._seen and storage not in self.shared:
            self._seen.add(id(tensor))
            self._alive[storage] += 1
            weakref.finalize(tensor, self._gone, id(tensor), storage).atexit = False

    def _gone(self, tensor: int, storage: int) -> None:
        self._seen.discard(tensor)
        self._alive[storage] -= 1
        if self._alive[storage]:
            return
        # Its memory goes back to the lane that made it.
        owner = self._made.pop(storage, Lane.STEP)
        for lane, last in self._used.pop(storage, {}).items():
            # What is kept for a lane waits for all that it was given until now.
            waits = self.lanes.clocks[owner][lane] >= last
            if (
                lane is not owner
                and not waits
                and (storage, lane) not in self.lanes.kept
            ):
                self.races.append(f"memory of {owner.value} that {lane.value} uses")
        self._written.pop(storage, None)
        for each in Lane:
            self.lanes.kept.discard((storage, each))


def _tensors(values: Any) -> list[torch.Tensor]:
    """Without weights in oneDNN's layout, which have no storage and are only read."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in tensors if not tensor.is_mkldnn]
