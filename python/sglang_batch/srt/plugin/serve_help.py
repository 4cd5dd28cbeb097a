"""SGLang's commands that do not load its plugins by themselves, and so know no ``--offline-batch``."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from ...errors import ConfigError

MODULE = "sglang.srt.server_args"


def install() -> None:
    """Install the import hook if this process is ``sglang serve ... --help``."""
    if sys.argv[1:2] == ["serve"] and {"-h", "--help"} & set(sys.argv):
        sys.meta_path.insert(0, _LoadPluginsAfterImport())


class _LoadPluginsAfterImport(MetaPathFinder):
    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        from sglang.srt.plugins import load_plugins

        self._loader.exec_module(module)
        load_plugins()


def exec_module(module: str, argv: list[str]) -> int:
    """Run a module as ``python -m`` does, once the plugins are loaded (``sglang-batch exec``).

    Raises:
        ConfigError: there is no such module.
    """
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ConfigError(f"there is no Python module {module!r} in this environment.")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    sys.argv = [module, *argv]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0
