"""A fleet on a Ray cluster: connect, check its room, make a place for each engine.

A place is a named actor, which is made again when it is lost.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)

from ...errors import ConfigError
from ..fleet_engine import FleetEngine, on_loop
from ..head_state import HeadState
from ..places import WorkerLost, WorkerPort
from .ray_cluster import RayFleet, check_ray
from .ray_worker import RayWorker, StartEngine, StartFailure

# Variables of the head's environment that workers get too.
_PASSED = ("HF_", "SGLANG_", "HUGGING_FACE_")


def join_cluster(address: str) -> None:
    """Connect this process to the cluster. Raises ConfigError if there is none."""
    if ray.is_initialized():
        return
    check_ray(address)
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"--ray {address}: no cluster to connect to "
            f"({' '.join(str(error).split())[:300]}). Start one with `ray start --head`, "
            "and run this command on one of its nodes."
        ) from None


def cluster_resources(address: str) -> dict[str, float]:
    """What the nodes of a cluster have in all, by Ray's names. Raises ConfigError if there is
    none.
    """
    join_cluster(address)
    found: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return found


def check_room(fleet: RayFleet) -> None:
    """Raise ConfigError unless the engines which a job starts with have room."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    room = _room(nodes, fleet.resources)
    if room < fleet.needed_engines:
        wanted = (
            ", ".join(f"{v:g} {k}" for k, v in fleet.resources.items()) or "nothing"
        )
        raise ConfigError(
            f"the Ray cluster has room for {room} of {fleet.needed_engines} engines with "
            f"{wanted} each; lower --engines or --ray-resources, or add nodes. For a "
            f"cluster that grows on demand, use --engines 0:{fleet.max_engines}."
        )


def _room(nodes: list[dict[str, Any]], resources: Mapping[str, float]) -> int:
    """How many engines fit on the nodes, were they empty."""
    room = 0
    for node in nodes:
        if not node["Alive"]:
            continue
        has = node["Resources"]
        fits = (int(has.get(k, 0) / v) for k, v in resources.items() if v)
        room += min(fits, default=1000)
    return room


def _end_others(job_id: str, prefix: str) -> None:
    """End engines of the job that have another model or other options."""
    for named in ray.util.list_named_actors(all_namespaces=True):
        name = str(named["name"])
        ours = named["namespace"] == NAMESPACE and name.startswith(f"{job_id}-")
        if ours and not name.startswith(prefix):
            with suppress(ValueError):
                ray.kill(ray.get_actor(name, namespace=NAMESPACE))


@contextmanager
def ray_engine(
    fleet: RayFleet, head: HeadState, start: StartEngine, model: str
) -> Iterator[tuple[FleetEngine, asyncio.AbstractEventLoop]]:
    """The engines of a job on a Ray cluster, and the event loop for calls to them.

    Args:
        head: a later one of the same job finds the same engines.
        start: loads the model on a node.
        model: its path or name, and all else that makes engines differ.

    Raises:
        ConfigError: there is no cluster, or too little room.
    """
    join_cluster(fleet.address)
    check_room(fleet)
    kind = hashlib.sha256(f"{model}\n{sorted(fleet.resources.items())}".encode())
    prefix = f"{head.job_id}-{kind.hexdigest()[:8]}-"
    _end_others(head.job_id, prefix)
    places = [
        RayPlace(
            f"engine {i}", f"{prefix}{i}", start, _options(fleet.resources), os.getcwd()
        )
        for i in range(fleet.max_engines)
    ]
    engine = FleetEngine(places, head.epoch, fleet.min_engines, crashes=head.crashes)
    try:
        with on_loop(engine) as running:
            yield running
    finally:
        ray.shutdown()


def _options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Ray's options of an actor with these resources."""
    rest = dict(resources)
    env = {k: v for k, v in os.environ.items() if k.startswith(_PASSED)}
    options: dict[str, Any] = {
        "num_cpus": rest.pop("CPU", 0),
        "num_gpus": rest.pop("GPU", 0),
        "resources": rest,
    }
    if env:
        options["runtime_env"] = {"env_vars": env}
    return options


NAMESPACE = "sglang-batch"
# Calls that an actor answers at a time: one that waits, one with commands, some that render.
_CALLS = "calls"
_NUM_CALLS = 8


class RayPort(WorkerPort):
    """Calls the worker in an actor."""

    trusted = True

    def __init__(self, actor: Any, node: str) -> None:
        self._actor = actor
        self._node = node

    async def ask(self, name: str, data: bytes) -> bytes:
        try:
            call = self._actor.call.options(concurrency_group=_CALLS)
            answer: bytes = await call.remote(name, data)
            return answer
        except ActorUnavailableError as error:
            raise OSError(_one_line(error)) from None
        except RayActorError as error:
            gone = await asyncio.to_thread(_is_gone, self._node)
            preempted = bool(getattr(error, "preempted", False))
            reason = "its node is gone" if gone else "its process died"
            raise WorkerLost(reason, crashed=not (gone or preempted)) from None
        except RayTaskError as error:
            raise WorkerLost(_one_line(error.cause), crashed=True) from None
        except RayError as error:
            raise OSError(_one_line(error)) from None


@dataclass(slots=True)
class RayPlace:
    """A named, detached actor.

    name: for people.
    actor_name: the same for every head of a job.
    start: loads the model there.
    options: of the actor: resources, environment.
    directory: the head's working directory.
    """

    name: str
    actor_name: str
    start: StartEngine
    options: Mapping[str, Any]
    directory: str
    _making: asyncio.Future[Any] | None = None

    async def find(self) -> RayPort:
        self._making = asyncio.ensure_future(asyncio.to_thread(self._actor))
        actor = await asyncio.shield(self._making)
        try:
            started: str | StartFailure = await actor.started.remote()
        except RayActorError as error:
            reason = f"its process died as it started: {_one_line(error)}"
            raise WorkerLost(reason, crashed=True) from None
        except RayError as error:
            raise WorkerLost(_one_line(error), crashed=True) from None
        if isinstance(started, str):
            return RayPort(actor, started)
        await self.free()
        if started.of_options:
            raise ConfigError(
                "the engine cannot start with this model and these options: "
                f"{started.reason}"
            )
        raise WorkerLost(started.reason, crashed=True)

    async def free(self) -> None:
        if self._making is not None:  # it may be made just now
            await asyncio.wait({self._making})
        with suppress(ValueError, RayError, GetTimeoutError):
            actor = await asyncio.to_thread(
                ray.get_actor, self.actor_name, namespace=NAMESPACE
            )
            await asyncio.to_thread(ray.kill, actor)

    def _actor(self) -> Any:
        """The actor that lives, or a new one."""
        remote: Any = ray.remote
        actor_class = remote(concurrency_groups={_CALLS: _NUM_CALLS})(RayWorker)
        return actor_class.options(
            name=self.actor_name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=0,
            scheduling_strategy="SPREAD",
            **self.options,
        ).remote(self.start, self.name, self.directory)


def _is_gone(node: str) -> bool:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return not any(each["NodeID"] == node and each["Alive"] for each in nodes)


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
