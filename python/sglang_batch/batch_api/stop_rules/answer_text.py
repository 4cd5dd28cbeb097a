"""The text of an answer, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

# Tokens before the answer on which the text of its first one may depend. As many as SGLang's
# detokenizer reads.
NUM_BEFORE = 5
# Tokens without text after which a character is given up. One of UTF-8 has 4 bytes.
_MAX_PENDING = 8


class TextStream(Protocol):
    """Turns tokens into text as they come."""

    def step(self, token: int) -> str | None:
        """The text that a token completes, None if it completes none."""
        ...


class AnswerText:
    """The text that each token of an answer adds, as a detokenizer shows it.

    A character of several tokens comes with its last one. Of bytes that are no character
    nothing comes.

    Args:
        tokenizer: of transformers.
        prompt_ids: the prompt's token ids, or the last of them.
    """

    def __init__(
        self, tokenizer: Any, prompt_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._before = list(prompt_ids[-NUM_BEFORE:])
        self._num_pending = 0
        try:
            self._open()
        except Exception:  # a prompt with images has ids of no token
            self._before = []
            self._open()

    def feed(self, token: int) -> str:
        """The text that a token completes, empty if it completes none."""
        try:
            text = self._stream.step(token)
        except Exception:
            # The library raises for an id that it does not have, and where the text of some
            # tokens is not the beginning of that of more.
            self._before = []
            self._open()
            return ""
        if text:
            self._num_pending = 0
            return text
        self._num_pending += 1
        if self._num_pending > _MAX_PENDING:
            # Otherwise each further token would have all of them decoded again.
            self._before = []
            self._open()
        return ""

    def _open(self) -> None:
        self._num_pending = 0
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        self._stream: TextStream = (
            _SlowStream(self._tokenizer, self._skip_special_tokens)
            if backend is None
            else _FastStream(backend, self._skip_special_tokens)
        )
        for token in self._before:
            self._stream.step(token)


class _FastStream:
    """A stream of the library that fast tokenizers are made of."""

    def __init__(self, backend: Any, skip_special: bool) -> None:
        from tokenizers.decoders import DecodeStream

        self._backend = backend
        self._stream: Any = DecodeStream(skip_special_tokens=skip_special)

    def step(self, token: int) -> str | None:
        found: str | None = self._stream.step(self._backend, token)
        return found


class _SlowStream:
    """The same for tokenizers that only decode whole lists."""

    def __init__(self, tokenizer: Any, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []
        self._num_read = 0

    def step(self, token: int) -> str | None:
        self._ids.append(token)
        read = self._decode(self._ids[: self._num_read])
        text = self._decode(self._ids)
        if len(text) <= len(read) or text.endswith("\ufffd"):
            return None
        del self._ids[: max(0, self._num_read - NUM_BEFORE)]
        self._num_read = len(self._ids)
        return text[len(read) :]

    def _decode(self, ids: list[int]) -> str:
        found: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)
        return found
