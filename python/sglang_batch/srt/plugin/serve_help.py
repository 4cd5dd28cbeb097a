"""Our flags in ``sglang serve --help``.

SGLang prints that help without loading plugins. Our first code to run in such a process
is the platform entry point, while ``sglang`` itself is still being imported. It
therefore waits for the import of the module that prints the help, and loads the plugins
then.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

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
