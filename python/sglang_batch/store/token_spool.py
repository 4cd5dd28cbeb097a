"""Rendered requests of a job, on disk: their prompts' token ids, and the rest of each."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray


def unshared_token(number: int) -> int:
    """Another token for each number, in no prompt: what is behind is not shared."""
    return np.iinfo(np.int32).max - number


class RootTokens:
    """First tokens of prompts that share nothing with equal prompts of other namespaces.

    A prompt's KV depends on more than its tokens, such as its LoRA adapter. In the place
    of its first token, another token for each namespace is the root of a tree of its own.
    """

    # No vocabulary reaches so far, nor are there so many prompts with unshared tokens.
    _FIRST = 1 << 30

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], int] = {}

    def of(self, namespace: str, token: int) -> int:
        """The number in place of the first token of a prompt. The token itself for ""."""
        if not namespace:
            return token
        return self._FIRST + self._known.setdefault(
            (namespace, token), len(self._known)
        )


class _Spool:
    """A file that is deleted at the end of its context."""

    def __init__(self, path: Path, *, buffering: int = -1) -> None:
        self._path = path
        self._file = open(path, "w+b", buffering=buffering)  # noqa: SIM115 - see __exit__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


class TokenSpool(_Spool):
    """Append prompts in order, then read them all as two arrays.

    Half a million long prompts do not fit in memory, so the file is mapped. More
    may be appended after the arrays were read. These are the planner's: a prompt of
    which only the beginning can be shared has an ``unshared_token`` there, and one
    of a namespace begins with a token of :class:`RootTokens`. :meth:`read` gives
    the prompt itself.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._offsets = array("q", [0])
        self._replaced = array("i")  # the token in whose place another is, or -1
        self._first = array("i")  # the first token, or -1 where it is as it was
        self._roots = RootTokens()
        self._flushed = 0  # bytes

    def append(
        self,
        input_ids: Sequence[int],
        shareable_len: int | None = None,
        namespace: str = "",
    ) -> None:
        """Add the next request's prompt.

        Its first ``shareable_len`` tokens can be shared, None for all, and with
        prompts of the same namespace only.
        """
        tokens, replaced, first = np.array(input_ids, dtype=np.int32), -1, -1
        if namespace and len(tokens):
            first = int(tokens[0])
            tokens[0] = self._roots.of(namespace, first)
        if shareable_len is not None and shareable_len < len(tokens):
            replaced = int(tokens[shareable_len])
            tokens[shareable_len] = unshared_token(len(self._replaced))
        self._file.write(tokens.tobytes())
        self._replaced.append(replaced)
        self._first.append(first)
        self._offsets.append(self._offsets[-1] + len(tokens))

    def read(self, index: int) -> list[int]:
        begin, end = 4 * self._offsets[index], 4 * self._offsets[index + 1]
        if begin < end > self._flushed:
            self._file.flush()
            self._flushed = 4 * self._offsets[-1]
        tokens = os.pread(self._file.fileno(), end - begin, begin)
        prompt = array("i", tokens)
        if self._replaced[index] >= 0:
            prompt[prompt.index(unshared_token(index))] = self._replaced[index]
        if self._first[index] >= 0:
            prompt[0] = self._first[index]
        return prompt.tolist()

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """``tokens`` int32 ``[num_tokens]`` and ``offsets`` int64 ``[n + 1]``."""
        self._file.flush()
        offsets = np.array(self._offsets, dtype=np.int64)
        if offsets[-1] == 0:
            return np.empty(0, dtype=np.int32), offsets
        return np.memmap(self._path, dtype=np.int32, mode="r"), offsets


class RecordSpool(_Spool):
    """Records of bytes, one for each request, in a file that is deleted at the end."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, buffering=0)
        self._offsets = array("q", [0])

    def append(self, record: bytes) -> None:
        self._file.write(record)
        self._offsets.append(self._offsets[-1] + len(record))

    def read(self, index: int) -> bytes:
        begin, end = self._offsets[index], self._offsets[index + 1]
        return os.pread(self._file.fileno(), end - begin, begin)
