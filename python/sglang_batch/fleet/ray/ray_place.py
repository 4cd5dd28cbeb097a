"""A place for a worker in a Ray cluster: a named actor, made again when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
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
from ..places import WorkerLost, WorkerPort
from .ray_worker import RayWorker, StartEngine, StartFailure

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
    """Whether a node has left the cluster."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return not any(each["NodeID"] == node and each["Alive"] for each in nodes)


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
