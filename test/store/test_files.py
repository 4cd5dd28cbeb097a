"""Atomic writes, the token spool, and a lock that two processes fight for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from sglang_batch.planner.prefixes.prefix_tree import build_prefix_tree
from sglang_batch.store.files import FileLock, atomic_write
from sglang_batch.store.token_spool import TokenSpool

# Atomic writes ------------------------------------------------------------------


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_write(path) as file:
        file.write(b"half")
        file.flush()
        assert not path.exists()
        file.write(b" and half")
    assert path.read_bytes() == b"half and half"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(error), atomic_write(path) as file:
        file.write(b"new")
        raise error
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old and long")
    with open(path, "rb") as reader, atomic_write(path) as file:
        file.write(b"new")
        assert reader.read() == b"old and long"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


# The lock -----------------------------------------------------------------------

HOLDER = """
import sys
from pathlib import Path
from sglang_batch.store.files import FileLock
lock = FileLock(Path(sys.argv[1]))
assert lock.acquire("the first") is None
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holding_process(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until its input ends or it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_a_lock_is_held_by_one_process_until_it_is_killed(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    with holding_process(tmp_path / "lock") as process:
        assert lock.acquire("the second") == "the first"
        assert lock.acquire("the second") == "the first"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert lock.acquire("the second") is None
    lock.release()


def test_a_released_lock_is_free(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.acquire("a process with a long name") is None
    assert first.acquire("a process with a long name") is None
    assert second.acquire("b") == "a process with a long name"
    first.release()
    first.release()
    assert second.acquire("b") is None
    assert first.acquire("a") == "b"  # nothing is left of the longer name
    second.release()


# The token spool ----------------------------------------------------------------


def test_the_spool_gives_back_every_prompt(tmp_path: Path) -> None:
    prompts = [[1, 2, 3], [], [2**31 - 1], list(range(5000)), []]
    with TokenSpool(tmp_path / "tokens") as spool:
        for prompt in prompts:
            spool.append(prompt)
        tokens, offsets = spool.arrays()
        assert tokens.dtype == np.dtype(np.int32)
        assert offsets.dtype == np.dtype(np.int64)
        read = [tokens[start:end].tolist() for start, end in pairwise(offsets)]
    assert read == prompts
    assert not (tmp_path / "tokens").exists()


def test_what_cannot_be_shared_differs_for_the_planner_alone(tmp_path: Path) -> None:
    prompt = [5, 6, 7, 8]
    with TokenSpool(tmp_path / "tokens") as spool:
        lengths = [None, 0, 2, 2, 3, 4, 9]
        for shareable_len in lengths:
            spool.append(prompt, shareable_len)
        tokens, offsets = spool.arrays()
        planned = [tokens[start:end].tolist() for start, end in pairwise(offsets)]
        for number, (own, most) in enumerate(zip(planned, lengths, strict=True)):
            assert spool.read(number) == prompt
            differing = [at for at in range(4) if own[at] != prompt[at]]
            assert differing == ([most] if most in range(4) else [])
        tree = build_prefix_tree(tokens, offsets)
    # Of three whole ones, the beginnings 2, 2 and 3, and nothing of the second.
    assert tree.num_unique_tokens == 4 + 4 + 2 + 2 + 1


def test_prompts_of_different_namespaces_share_nothing(tmp_path: Path) -> None:
    prompts = [[5, 6, 7, 8], [5, 6, 7, 9], [4, 6], []]
    namespaces = ["", "a", "b", "a"]
    with TokenSpool(tmp_path / "tokens") as spool:
        for namespace in namespaces:
            for prompt in prompts:
                spool.append(prompt, 1, namespace)
                spool.append(prompt, None, namespace)
        tokens, offsets = spool.arrays()
        tree = build_prefix_tree(tokens, offsets)
        for number in range(2 * len(prompts) * len(namespaces)):
            assert spool.read(number) == prompts[number // 2 % len(prompts)]
    # Each of the three namespaces has 4 + 1 + 2 tokens, and each of the prompts that share
    # one token at most has 3, 3 or 1 of its own.
    assert tree.num_unique_tokens == 3 * (4 + 1 + 2) + 4 * (3 + 3 + 1)


@pytest.mark.parametrize("num_prompts", [0, 3])
def test_a_spool_without_tokens_is_empty_arrays(
    tmp_path: Path, num_prompts: int
) -> None:
    with TokenSpool(tmp_path / "tokens") as spool:
        for _ in range(num_prompts):
            spool.append([])
        tokens, offsets = spool.arrays()
    assert tokens.tolist() == []
    assert offsets.tolist() == [0] * (num_prompts + 1)


def test_the_spool_goes_when_its_block_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), TokenSpool(tmp_path / "tokens") as spool:
        spool.append([1])
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    # As /dev/null, which root could replace.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with atomic_write(pipe) as file:
            file.write(b"all of it")
        assert os.read(reader, 100) == b"all of it"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]
