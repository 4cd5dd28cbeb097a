"""SGLang's commands that do not load its plugins by themselves, and so know no ``--offline-batch``."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from ...errors import ConfigError

MODULE = "sglang.srt.server_args"


def install() -> None:
    """Install the import hook if this process is ``sglang serve ... --help``."""
    if sys.argv[1:2] == ["serve"] and {"-h", "--help"} & set(sys.argv):
        sys.meta_path.insert(0, _LoadPluginsAfterImport())


class _LoadPluginsAfterImport(MetaPathFinder):
    def find_spec(self, name: str, *args: object) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None, "a module of SGLang"
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            from sglang.srt.plugins import load_plugins

            execute(module)
            load_plugins()

        vars(spec.loader)["exec_module"] = exec_module
        return spec


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
