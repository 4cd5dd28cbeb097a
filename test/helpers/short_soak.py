"""The soak of the batch service. Its servers and the stock engine are forks.

See :mod:`forked_children`.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forked_children
import preloaded

sys.path.append(str(Path(__file__).parents[2] / "benchmark"))

import soak_batch_service
import soak_engine
import soak_server


def launch(arguments: list[str], **options: Any) -> subprocess.Popen[bytes]:
    command = forked_children.command("server_main", *arguments)
    return preloaded.Popen(command, **options)


def start_process(pipe: Connection, model: str) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=serve, args=(pipe, model))
    process.start()
    return process


def serve(pipe: Connection, model: str) -> None:
    forked_children.start_fork_server()
    soak_engine.serve(pipe, model)


def main() -> None:
    soak_server.launch = launch
    soak_engine.start_process = start_process
    sys.exit(soak_batch_service.main())
