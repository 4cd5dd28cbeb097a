"""The path and headers of a call, and the settings of its server."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Scope

from ....config import OfflineBatchConfig

# Whether a call is one of ours, by its path.
IsOurs = Callable[[str], bool]


def path_of(scope: Scope) -> str:
    """The path of a call below the server's root path."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def header_of(scope: Scope, name: bytes) -> str | None:
    """The first header of this lowercase name, or None."""
    for each, value in scope["headers"]:
        if each.lower() == name:
            return str(value.decode("latin-1"))
    return None


def without_header(scope: Scope, name: bytes) -> Scope:
    """The scope of the same call without the headers of this lowercase name."""
    kept = [each for each in scope["headers"] if each[0].lower() != name]
    return {**scope, "headers": kept}


def config_of(scope: Scope) -> OfflineBatchConfig:
    """The settings of the server that received the call."""
    config: OfflineBatchConfig = scope["app"].state.offline_batch_service.config
    return config
