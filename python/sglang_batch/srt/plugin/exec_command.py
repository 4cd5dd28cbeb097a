"""``sglang-batch exec``: a module that does not load SGLang's plugins by itself.

SGLang's server and engine load plugins. Some of its tools parse their arguments before
that, and know no ``--offline-batch`` then.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys

from ...errors import ConfigError


def exec_module(module: str, argv: list[str]) -> int:
    """Run a module as ``python -m`` does, once the plugins are loaded.

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
