"""The options of ``sglang-batch run`` for engines that are not in its process."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..config import OfflineBatchConfig
from ..errors import ConfigError
from ..fleet.head_state import HeadState
from .backend_options import (
    EngineSettings,
    StartEngine,
    check_backend_arguments,
    engine_settings,
    started,
)
from .option_types import count, whole


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Engines on a Ray cluster.

    address: ``auto``, or ``host:port``.
    min_engines: the job waits for so many.
    needed_engines: so many must have room now.
    max_engines: it uses up to so many.
    resources: of each engine, by Ray's names. None: what its parallelism needs.
    """

    address: str
    min_engines: int
    needed_engines: int
    max_engines: int
    resources: Mapping[str, float] | None

    def check(self, backend: str, argv: list[str]) -> argparse.Namespace:
        """Check the options, and that the cluster answers, before a model is looked for.

        Returns:
            SGLang's arguments, as far as they are known without SGLang.

        Raises:
            ConfigError: an option cannot be used, or no cluster answers.
        """
        known = check_backend_arguments(backend, argv)
        if getattr(known, "nnodes", 1) != 1:
            raise ConfigError(
                f"--nnodes {known.nnodes}: each engine of --ray is on one node; leave it "
                "out, and let --engines have more of them."
            )
        from ..fleet.ray.ray_fleet import check_ray

        check_ray(self.address)
        return known

    def settings(self, backend: str, argv: list[str], **given: Any) -> EngineSettings:
        """The settings of a job. Engines read the model's configuration, not this process."""
        return engine_settings(backend, argv, resolve=False, **given)

    def start(
        self,
        settings: EngineSettings,
        backend: str,
        argv: list[str],
        head: HeadState,
    ) -> StartEngine:
        """What starts the engines, or finds those of an earlier run of this job."""
        from ..fleet.ray.ray_fleet import RayFleet, cluster_resources, ray_engine

        resources = self.resources
        if resources is None:
            resources = {"CPU": 1.0}
            if settings.server_args.device != "cpu" and cluster_resources(
                self.address
            ).get("GPU", 0):
                resources["GPU"] = float(_num_devices(settings.server_args))
        fleet = RayFleet(
            self.address,
            self.min_engines,
            self.needed_engines,
            self.max_engines,
            resources,
        )
        here = partial(started, backend, argv)
        kind = " ".join([backend, *argv])
        return partial(ray_engine, fleet, head, here, kind)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Engines in offline servers that run already.

    urls: of the servers.
    api_key: of their admin, None for servers without keys.
    """

    urls: tuple[str, ...]
    api_key: str | None

    def check(self, backend: str, argv: list[str]) -> argparse.Namespace:
        """Check that the servers answer and serve one model.

        Returns:
            The model, as SGLang's arguments.

        Raises:
            ConfigError: an option cannot be used, or a server does not answer.
        """
        _config(argv)
        from ..fleet.http_fleet import served_model

        model = served_model(self.urls, self.api_key)
        return argparse.Namespace(model_path=model, served_model_name=model)

    def settings(self, backend: str, argv: list[str], **given: Any) -> EngineSettings:
        """The settings of a job."""
        known = self.check(backend, argv)
        model = str(known.model_path)
        changes: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        config = replace(_config(argv), **changes)
        return EngineSettings(None, "", _not_here, config, model, model)

    def start(
        self,
        settings: EngineSettings,
        backend: str,
        argv: list[str],
        head: HeadState,
    ) -> StartEngine:
        """What attaches to the servers."""
        from ..fleet.http_fleet import http_engine

        return partial(http_engine, self.urls, self.api_key, head)


FleetOptions = RayOptions | WorkerOptions


def add_fleet(parser: argparse.ArgumentParser) -> None:
    """Add the options of a fleet."""
    group = parser.add_argument_group("many engines")
    group.add_argument(
        "--ray", metavar="ADDRESS",
        help="run the job on engines of a Ray cluster: auto for the one that this "
        "machine is in, or host:port of its head node",
    )  # fmt: skip
    group.add_argument(
        "--engines", metavar="N|MIN:MAX",
        help="with --ray: number of engines (default: 1). The job starts with the first "
        "that is ready, or with MIN of MIN:MAX, where more join as the cluster gets room; "
        "MIN may be 0 if the cluster has no room yet",
    )  # fmt: skip
    group.add_argument(
        "--ray-resources", metavar="JSON",
        help="with --ray: what each engine takes, by Ray's names (default: one CPU, and "
        "a GPU for each rank of --tp and --pp)",
    )  # fmt: skip
    group.add_argument(
        "--workers", metavar="URL,...",
        help="run the job on these offline servers (`sglang-batch serve`), with their model "
        "and options",
    )  # fmt: skip
    group.add_argument(
        "--workers-key", metavar="KEY", help="admin key of the servers of --workers"
    )


def fleet_options(options: argparse.Namespace) -> FleetOptions | None:
    """The fleet that options name, None for an engine in this process.

    Raises:
        ConfigError: a value cannot be used.
    """
    if options.ray is None:
        for name in ("engines", "ray_resources"):
            if getattr(options, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} is of a Ray cluster; add --ray auto.")
    if options.workers is not None:
        if options.ray is not None:
            raise ConfigError("--ray and --workers are two fleets; choose one.")
        return WorkerOptions(_urls(options.workers), options.workers_key)
    if options.workers_key is not None:
        raise ConfigError("--workers-key is of servers; add --workers URL,...")
    if options.ray is None:
        return None
    engines = _engines(options.engines or "1")
    return RayOptions(options.ray, *engines, _resources(options.ray_resources))


def _urls(text: str) -> tuple[str, ...]:
    urls = tuple(url.strip().rstrip("/") for url in text.split(",") if url.strip())
    twice = next((url for url in urls if urls.count(url) > 1), None)
    if twice is not None:
        raise ConfigError(f"--workers names {twice} twice.")
    wrong = next((u for u in urls if not u.startswith(("http://", "https://"))), None)
    if wrong is not None or not urls:
        raise ConfigError(
            f"--workers {wrong or text!r} is not the URL of a server; use URLs such as "
            "http://10.0.0.2:30000, with commas between them."
        )
    return urls


def _config(argv: list[str]) -> OfflineBatchConfig:
    """Our settings in the options of a job whose engines have theirs already."""
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, exit_on_error=False
    )
    parser.add_argument("--offline-batch-config")
    try:
        known, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}.") from None
    if rest:
        raise ConfigError(
            f"{rest[0].partition('=')[0]}: the servers of --workers have their model and "
            "options already; leave it out."
        )
    return OfflineBatchConfig.from_json(known.offline_batch_config)


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
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--ray-resources {text} is no JSON: {error}.") from None
    numbers = isinstance(found, dict) and all(
        isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        for value in found.values()
    )
    if not numbers:
        raise ConfigError(
            f"--ray-resources {text} must be an object of numbers, such as "
            '{"CPU": 8, "GPU": 1}.'
        )
    return {name: float(value) for name, value in found.items()}


def _num_devices(server_args: Any) -> int:
    """Accelerators of one engine."""
    replicas = 1 if server_args.enable_dp_attention else server_args.dp_size
    return int(server_args.tp_size * server_args.pp_size * replicas)
