"""What a run shows while it works: lines, and one line of progress below them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from tqdm import tqdm

from ..job.engine import KvUse
from ..request import Usage
from ..store.result_log import ResultLog

# Seconds between two pictures on a terminal.
TICK_S = 0.5
# Seconds between two lines in a file: the first, and the last after doubling.
FIRST_LINE_S, LAST_LINE_S = 5.0, 300.0
_BAR = "{desc}: {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_LINE = (
    "{desc}: {percentage:.0f}%, {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
)


class Display:
    """Lines on a terminal or in a file, and the present status.

    On a terminal the status is redrawn in place, twice a second. In a file it is a line
    now and then, at doubling distances.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._lock = threading.RLock()
        self._status: Callable[[], str] | None = None
        self._drawn = False
        self._wait = FIRST_LINE_S
        self._last = time.monotonic()

    def meter(
        self,
        title: str,
        num: int,
        total: int,
        began: float,
        *,
        initial: int = 0,
        postfix: str = "",
    ) -> str:
        """A status such as ``Running: 50%, 2/4 [00:10<00:10]``, with a bar on a terminal.

        Args:
            began: on the monotonic clock, when ``initial`` of them were done.
        """
        return tqdm.format_meter(
            num,
            total,
            time.monotonic() - began,
            ncols=self._columns,
            prefix=title,
            initial=initial,
            postfix=postfix,
            bar_format=_BAR if self._live else _LINE,
        )

    @property
    def _columns(self) -> int | None:
        if not self._live:
            return None
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def say(self, text: str) -> None:
        """Print a line above the status."""
        with self._lock:
            self._erase()
            self._print(f"{text}\n")

    @contextmanager
    def showing(self, status: Callable[[], str]) -> Iterator[None]:
        """Keep showing a status during the block."""
        self._status = status
        ended = threading.Event()
        ticker = threading.Thread(target=self._keep, args=(ended,), daemon=True)
        ticker.start()
        try:
            yield
        finally:
            ended.set()
            ticker.join()
            with self._lock:
                self._status = None
                self._erase()

    def _keep(self, ended: threading.Event) -> None:
        while not ended.wait(TICK_S):
            with self._lock:
                self._tick()

    def _tick(self) -> None:
        if self._status is None:
            return
        if self._live:
            self._print(f"\r\x1b[K{self._status()[: (self._columns or 80) - 1]}")
            self._drawn = True
        elif time.monotonic() - self._last >= self._wait:
            self._wait = min(2 * self._wait, LAST_LINE_S)
            self._print(f"{self._status()}\n")

    def _erase(self) -> None:
        if self._drawn:
            self._print("\r\x1b[K")
            self._drawn = False

    def _print(self, text: str) -> None:
        self._last = time.monotonic()
        self._stream.write(text)
        self._stream.flush()


def aligned(rows: Sequence[Sequence[str]], sides: str = "") -> str:
    """Rows of a table with columns of equal width.

    Args:
        sides: ``<`` or ``>`` for each column. All are at the left by default.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    columns = list(zip(sides or "<" * len(widths), widths, strict=True))
    return "\n".join(
        "  ".join(
            f"{cell:{side}{width}}"
            for cell, (side, width) in zip(row, columns, strict=True)
        ).rstrip()
        for row in rows
    )


def elapsed(title: str) -> Callable[[], str]:
    """A status that counts seconds from now."""
    began = time.monotonic()
    return lambda: f"{title} ({time.monotonic() - began:.0f} s)"


@dataclass(eq=False)
class Progress:
    """How far the job is: prompts rendered, then the plan, then answers.

    Args:
        compiling: done when the planner is compiled.
        engines: how many of them run, empty if there are not several.

    Attributes:
        kv_use: of the engine a moment ago, if it counts it.
    """

    display: Display
    num_requests: int
    log: ResultLog
    compiling: Future[None] | None = None
    engines: Callable[[], str] = str
    kv_use: KvUse | None = None

    def __post_init__(self) -> None:
        self._num_before = self.log.num_done
        self._usage_before = self._usage
        self._num_to_render = self.num_requests - self._num_before
        self._num_rendered = 0
        self._num_refused = 0
        self._began = self._answers_began = time.monotonic()

    def rendered(self) -> None:
        self._num_rendered += 1
        if self._num_rendered <= self._num_to_render:
            self._answers_began = time.monotonic()

    def answered(self) -> None:
        if self._num_rendered < self._num_to_render:
            self._num_refused += 1  # by the endpoint, while others are rendered

    def will_render(self, num_requests: int) -> None:
        """So many prompts are rendered before the last plan. 0 for a job in buckets."""
        self._num_to_render = num_requests

    @property
    def _usage(self) -> Usage:
        return self.log.usage - self.log.merged_usage

    def __str__(self) -> str:
        now = time.monotonic()
        if 0 < self._num_rendered < self._num_to_render:
            return self.display.meter(
                "Reading prompts", self._num_rendered, self._num_to_render, self._began
            )
        seconds = now - self._answers_began
        if self.compiling is not None and not self.compiling.done():
            return (
                "Compiling the planner, once per installation "
                f"({now - self._began:.0f} s)"
            )
        num_new = self.log.num_done - self._num_before - self._num_refused
        use = self.kv_use
        if num_new == 0 and use is not None and use.running:
            held = use.left + use.right + use.online + use.shared
            return (
                f"Running: no answer yet, {use.running:,} requests in the batch with "
                f"{held:,} tokens of KV ({seconds:.0f} s)"
            )
        if num_new == 0:
            doing = "Planning, and computing the first prompts"
            return f"{doing} ({seconds:.0f} s)"
        new = self._usage - self._usage_before
        computed = new.input_tokens - new.cached_tokens + new.output_tokens
        engines = self.engines()
        return self.display.meter(
            "Running",
            self.log.num_done,
            self.num_requests,
            self._answers_began,
            initial=self._num_before + self._num_refused,
            postfix=f"{engines}, " * bool(engines)
            + f"{self.log.num_failed:,} failed, " * bool(self.log.num_failed)
            + f"cached {self._usage.cache_hit_rate:.0%}, "
            + f"{computed / max(seconds, 1e-3):,.0f} tokens/s computed",
        )
