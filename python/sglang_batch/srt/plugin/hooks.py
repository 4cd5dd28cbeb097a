"""The entry point that SGLang calls in each of its processes.

Without ``--offline-batch`` the package only teaches SGLang the flag, with three hooks in the
process that parses arguments. With it, the main process gets the HTTP routes and the implied
defaults (:mod:`.main_process`), and each scheduler process our scheduler
(:mod:`.scheduler_process`).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys

from ...errors import UnsupportedSGLang, refuse
from . import scheduler_process


def register() -> None:
    """Entry point ``sglang.srt.plugins``, called once in every SGLang process."""
    if scheduler_process.offline_scheduler:
        # Ctrl-C at a terminal reaches all processes. The main process ends the others,
        # once it has stopped their work.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            # It ended while this process imported. From here on, SGLang would notice.
            os._exit(1)
        scheduler_process.hook_scheduler()
        scheduler_process.hook_detokenizer()
    elif not _is_sglang_child():
        is_offline = any(arg.startswith("--offline-batch") for arg in sys.argv[1:])
        if is_offline:
            from ...job import traces

            traces.check_propagators()
        # Only the process that parses arguments pays for these imports.
        from . import offline_server_args

        offline_server_args.hook_flag()
        # SGLang swallows exceptions of plugins, and a release without the private API
        # that we override would call the flag unknown. Exit with the reason instead.
        if is_offline:
            from ..compat.private_api import check_version

            try:
                check_version()
            except UnsupportedSGLang as error:
                refuse(error)


def _is_sglang_child() -> bool:
    """Whether SGLang itself started this process (scheduler, detokenizer, ...)."""
    target = getattr(multiprocessing.current_process(), "_target", None)
    return str(getattr(target, "__module__", "")).startswith("sglang.")
