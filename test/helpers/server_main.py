"""``python -m sglang.launch_server``, for :mod:`forked_children`."""

from __future__ import annotations

import runpy
import sys


def main() -> None:
    sys.argv[0] = "launch_server"
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
