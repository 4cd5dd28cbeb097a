"""Fills the disk of a store and deletes all files and batches in it, one by one.

Started in a mount namespace of its own, with a small tmpfs at the path given.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sglang_batch.store.batch_store import BatchStore

NUM_FILES = 400


def fill(directory: Path) -> None:
    """Take the last free byte of the disk."""
    with open(directory / "filler", "ab", buffering=0) as file:
        for size in (1 << 16, 4096, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue


def main(directory: Path) -> None:
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", directory], check=True
    )
    store = BatchStore(directory / "store")
    ids = [f"file-{number}" for number in range(NUM_FILES)]
    for file_id in ids:
        store.file_path(file_id).touch()
        store.record_file(file_id, "x" * 100, "batch", None)
    fill(directory)
    for file_id in ids:
        fill(directory)  # what a deletion freed is taken by a running batch
        assert os.statvfs(directory).f_bavail == 0
        assert store.delete_file(file_id), file_id
        assert store.get_file(file_id) is None
    store.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
