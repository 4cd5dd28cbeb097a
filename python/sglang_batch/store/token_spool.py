"""Prompt token ids of a job, on disk: one flat int32 file and an offset per request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray


class TokenSpool:
    """Append prompts in order, then read them all as two arrays.

    Half a million long prompts do not fit in memory. The file is mapped, so only the
    parts in use are loaded. It is deleted when the spool is closed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "wb")  # noqa: SIM115 - closed with the spool
        self._offsets = array("q", [0])

    def append(self, input_ids: Sequence[int]) -> None:
        """Add the next request's prompt."""
        self._file.write(np.asarray(input_ids, dtype=np.int32).tobytes())
        self._offsets.append(self._offsets[-1] + len(input_ids))

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """``tokens`` int32 ``[num_tokens]`` and ``offsets`` int64 ``[n + 1]``."""
        self._file.flush()
        offsets = np.array(self._offsets, dtype=np.int64)
        if offsets[-1] == 0:
            return np.empty(0, dtype=np.int32), offsets
        return np.memmap(self._path, dtype=np.int32, mode="r"), offsets

    def __enter__(self) -> TokenSpool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)
