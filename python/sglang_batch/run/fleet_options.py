"""Where the engines of ``sglang-batch run`` are: in this process, on Ray, or in servers."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ..config import OfflineBatchConfig
from ..errors import ConfigError
from ..fleet.head_state import CRASHES, CrashCounts, HeadState
from ..fleet.ray.ray_cluster import RayFleet, check_ray
from .backend_options import (
    BACKENDS,
    OPTIONS_OF_WORKERS,
    BackendParser,
    EngineSettings,
    engine_settings,
    known_arguments,
    started,
)
from .model_place import check_model
from .option_types import add_arguments, count, options_text, whole

if TYPE_CHECKING:
    from .job_directory import JobDirectory


_Amount = Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class EngineOptions:
    """An engine in this process.

    backend: one of :data:`.backend_options.BACKENDS`.
    argv: the options that are the engine's.
    """

    backend: str = BACKENDS[0]
    argv: tuple[str, ...] = ()

    def arguments(self) -> argparse.Namespace:
        """The engine's options by SGLang's names for them, as far as they are given.

        Raises ConfigError if an option cannot be used, or no cluster or server answers.
        """
        return known_arguments(self.backend, [*self.argv])

    def check_settings(self, config: OfflineBatchConfig) -> None:
        """Raises ConfigError for a setting that has no use with these engines."""

    def find_model(self, known: argparse.Namespace) -> None:
        """Raises ConfigError if the model cannot be where :meth:`arguments` say it is."""
        from ..srt.compat.command_line import check_device

        check_device(known)
        check_model(known)

    def settings(self) -> EngineSettings:
        """SGLang's own view of :meth:`arguments`, which takes its import.

        Raises ConfigError if an option or the model cannot be used.
        """
        return engine_settings(self.backend, [*self.argv])

    def start(
        self, settings: EngineSettings, directory: JobDirectory
    ) -> AbstractContextManager[Any]:
        """Load the model, or find engines that have, for the job that has begun.

        The context is an engine and its event loop.
        """
        return settings.start()


@dataclass(frozen=True, kw_only=True)
class RayOptions(EngineOptions):
    """Engines on a Ray cluster.

    resources: of each engine, by Ray's names. None: what its parallelism needs.
    """

    fleet: RayFleet
    resources: Mapping[str, float] | None

    def arguments(self) -> argparse.Namespace:
        known = super().arguments()
        if getattr(known, "nnodes", 1) != 1:
            raise ConfigError(
                f"--nnodes {known.nnodes}: each engine of --ray is on one node; leave it "
                "out, and let --engines have more of them."
            )
        check_ray(self.fleet.address)
        return known

    def find_model(self, known: argparse.Namespace) -> None:
        check_model(known)

    def settings(self) -> EngineSettings:
        # Engines read the model's configuration, not this process.
        return engine_settings(self.backend, [*self.argv], resolve=False)

    def start(
        self, settings: EngineSettings, directory: JobDirectory
    ) -> AbstractContextManager[Any]:
        from ..fleet.ray.ray_fleet import cluster_resources, ray_engine

        resources = self.resources
        if resources is None:
            there = cluster_resources(self.fleet.address)
            on_gpus = settings.server_args.device != "cpu" and there.get("GPU", 0)
            args = settings.server_args
            replicas = 1 if args.enable_dp_attention else args.dp_size
            devices = float(args.tp_size * args.pp_size * replicas)
            resources = {"CPU": 1.0, **({"GPU": devices} if on_gpus else {})}
        fleet = replace(self.fleet, resources=resources)
        here = partial(started, self.backend, [*self.argv])
        kind = " ".join([self.backend, *self.argv])
        return ray_engine(fleet, _head(directory), here, kind)


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(EngineOptions):
    """Engines in offline servers that run already.

    urls: of the servers.
    api_key: of their admin, None for servers without keys.
    """

    urls: tuple[str, ...]
    api_key: str | None

    def arguments(self) -> argparse.Namespace:
        from ..fleet.http_fleet import served_model
        from ..srt.compat.command_line import add_options

        parser = BackendParser()
        add_options(parser, "offline_batch_config")
        config = parser.known(self.argv, OPTIONS_OF_WORKERS).offline_batch_config
        model = served_model(self.urls, self.api_key)
        return argparse.Namespace(
            model_path=model, served_model_name=model, offline_batch_config=config,
            grammar_backend=None,  # the servers' own
        )  # fmt: skip

    def check_settings(self, config: OfflineBatchConfig) -> None:
        if config.answer_cache is not None:
            raise ConfigError(
                "--answer-cache has no use with --workers, whose model may change: start "
                "the servers with --offline-batch-config '{\"answer_cache\": ...}'."
            )

    def find_model(self, known: argparse.Namespace) -> None:
        """Nothing: the servers have loaded it."""

    def settings(self) -> EngineSettings:
        return EngineSettings(None, "", _not_here)

    def start(
        self, settings: EngineSettings, directory: JobDirectory
    ) -> AbstractContextManager[Any]:
        from ..fleet.http_fleet import http_engine

        return http_engine(self.urls, self.api_key, _head(directory))


def _head(directory: JobDirectory) -> HeadState:
    """This process as the head of a fleet. SGLang, which sets up logging, is elsewhere."""
    logging.basicConfig(
        level=logging.INFO, format="[%(asctime)s] %(message)s", force=True
    )
    crashes = CrashCounts(directory.path / CRASHES)
    return HeadState(directory.job_id, directory.epoch(), crashes)


def add_fleet(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser.add_argument_group("many engines"), options_text("fleet"))


def add_advanced_fleet(group: argparse._ActionsContainer) -> None:
    add_arguments(group, options_text("fleet-advanced"))


def engine_options(options: argparse.Namespace, argv: list[str]) -> EngineOptions:
    """Where the engines are that options name, with ``argv`` as their own options.

    Raises ConfigError if a value cannot be used, or an option that it needs is missing.
    """
    needs = {"engines": "ray", "ray_resources": "ray", "workers_key": "workers"}
    whose = {
        "ray": "a Ray cluster; add --ray auto",
        "workers": "servers; add --workers URL,...",
    }
    for name, of in needs.items():
        if getattr(options, name) is not None and getattr(options, of) is None:
            raise ConfigError(f"--{name.replace('_', '-')} is of {whose[of]}.")
    shared: dict[str, Any] = {"backend": options.backend, "argv": tuple(argv)}
    if options.workers is not None:
        if options.ray is not None:
            raise ConfigError("--ray and --workers are two fleets; choose one.")
        names = (url.strip().rstrip("/") for url in options.workers.split(","))
        urls = tuple(filter(None, names))
        twice = next((url for url in urls if urls.count(url) > 1), None)
        if twice is not None:
            raise ConfigError(f"--workers names {twice} twice.")
        good = ("http://", "https://")
        wrong = next((url for url in urls if not url.startswith(good)), None)
        if wrong is not None or not urls:
            raise ConfigError(
                f"--workers {wrong or options.workers!r} is not the URL of a server; use "
                "URLs such as http://10.0.0.2:30000, with commas between them."
            )
        return WorkerOptions(**shared, urls=urls, api_key=options.workers_key)
    if options.ray is None:
        return EngineOptions(**shared)
    fleet = RayFleet(options.ray, *_engines(options.engines or "1"))
    return RayOptions(
        **shared, fleet=fleet, resources=_resources(options.ray_resources)
    )


def _not_here() -> Any:
    raise AssertionError("its engines run elsewhere")


def _engines(text: str) -> tuple[int, int, int]:
    """Engines to wait for, that must have room, and at most."""
    least, colon, most = text.partition(":")
    try:
        found = whole(0 if colon else 1)(least), count(most if colon else least)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--engines {text}: {error}.") from None
    if found[0] > found[1]:
        raise ConfigError(f"--engines {text}: MIN is above MAX.")
    return (max(1, found[0]) if colon else 1), *found


def _resources(text: str | None) -> dict[str, float] | None:
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, _Amount])
    except msgspec.ValidationError:
        raise ConfigError(
            f"--ray-resources {text} must be an object of numbers, such as "
            '{"CPU": 8, "GPU": 1}.'
        ) from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"--ray-resources {text} is no JSON: {error}.") from None
