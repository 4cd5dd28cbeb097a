"""Row of the soak: many clients that poll and upload while a batch runs."""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median

import aiohttp
from report import Figure
from soak_server import SoakServer
from soak_service import PROMPTS, batch_seconds

# How often each client asks for the newest batch, and uploads a file.
ASK_EVERY_S, UPLOAD_EVERY_S = 1.0, 5.0
UPLOAD_BYTES = 1000
START_TIMEOUT_S = 60


def client_rows(
    server: SoakServer,
    scratch: Path,
    clients: int,
    kinds: dict[str, int],
    repeats: int,
) -> list[Figure]:
    """A batch with and without clients that poll and upload, in alternation.

    Args:
        kinds: how many requests of each kind of prompts.
    """
    calls = failed = 0
    longest = 0.0
    slower = []
    for kind, count in kinds.items():
        alone, loaded = [], []
        batch_seconds(server, scratch, PROMPTS[kind](50, -2))
        for repeat in range(repeats):
            prompts = PROMPTS[kind](count, 100 + repeat)
            alone.append(batch_seconds(server, scratch, prompts)["all"])
            with polling(server, clients) as seen:
                loaded.append(batch_seconds(server, scratch, prompts)["all"])
            calls += seen.calls.value
            failed += seen.failed.value
            longest = max(longest, seen.longest_s.value)
        by = 100 * (median(loaded) / median(alone) - 1)
        told = f"{median(alone):.2f} s alone, {median(loaded):.2f} s with them"
        name = f"batch of {count:,} {kind} prompts slower with {clients} clients"
        slower.append(Figure(name, by, "%", ("<=", 3.0), told))
    return [
        Figure("calls that failed", failed, "", ("=", 0), f"of {calls} calls"),
        Figure("longest call", longest, "s"),
        *slower,
    ]


class Seen:
    """The clients' counts, in shared memory."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self.calls: Synchronized[int] = context.Value("q", 0)
        self.failed: Synchronized[int] = context.Value("q", 0)
        self.longest_s: Synchronized[float] = context.Value("d", 0.0)


@contextmanager
def polling(server: SoakServer, clients: int) -> Iterator[Seen]:
    """Clients at work in one process, as long as the context."""
    context = mp.get_context("spawn")
    seen, ready, done = Seen(), context.Event(), context.Event()
    process = context.Process(
        target=_run_clients, args=(server.url, clients, seen, ready, done)
    )
    process.start()
    try:
        if not ready.wait(START_TIMEOUT_S):
            raise RuntimeError("the clients did not start")
        yield seen
    finally:
        done.set()
        process.join(START_TIMEOUT_S)
        process.kill()
        process.join()


def _run_clients(url: str, clients: int, seen: Seen, ready: Event, done: Event) -> None:
    os.nice(19)  # clients are usually on other machines
    asyncio.run(_all_clients(url, clients, seen, ready, done))


async def _all_clients(
    url: str, clients: int, seen: Seen, ready: Event, done: Event
) -> None:
    async def call(http: aiohttp.ClientSession, path: str, form: bool) -> None:
        began = time.perf_counter()
        data = None
        if form:
            data = aiohttp.FormData({"purpose": "user_data"})
            data.add_field("file", b"x" * UPLOAD_BYTES, filename="a.txt")
        seen.calls.value += 1
        try:
            async with http.request("POST" if form else "GET", path, data=data) as got:
                await got.read()
                seen.failed.value += got.status != 200
        except aiohttp.ClientError:
            seen.failed.value += 1
        took = time.perf_counter() - began
        seen.longest_s.value = max(seen.longest_s.value, took)

    async def client(number: int, http: aiohttp.ClientSession) -> None:
        await asyncio.sleep(ASK_EVERY_S * number / clients)
        each = round(UPLOAD_EVERY_S / ASK_EVERY_S)
        count = number
        while not done.is_set():
            await call(http, "/v1/batches?limit=1", False)
            if count % each == 0:
                await call(http, "/v1/files", True)
            count += 1
            await asyncio.sleep(ASK_EVERY_S)

    timeout = aiohttp.ClientTimeout(total=60)
    async with (
        aiohttp.ClientSession(url, timeout=timeout) as http,
        asyncio.TaskGroup() as group,
    ):
        for number in range(clients):
            group.create_task(client(number, http))
        ready.set()
