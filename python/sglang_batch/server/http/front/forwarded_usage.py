"""The tokens of an answer that another server gives, read while it is passed on.

The usage of a call is in its answer, or in an event of its stream. OpenAI's streams have
it only if the call asks for it: then it is asked for, and the event that has nothing else
is kept from a client that did not ask.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

# Streams of these calls have no usage unless it is asked for.
_ASKED_FOR = frozenset({"/v1/chat/completions", "/v1/completions"})
# Ours for the names of both APIs.
_NAMES = {
    "prompt_tokens": "input_tokens",
    "input_tokens": "input_tokens",
    "completion_tokens": "output_tokens",
    "output_tokens": "output_tokens",
    "cache_read_input_tokens": "cached_tokens",
}


class ForwardedUsage:
    """Counts one call.

    Args:
        template: the call's route.
        body: as the client sent it.

    Attributes:
        body: as it is sent on.
    """

    def __init__(self, template: str, body: bytes) -> None:
        self.body = body
        self._found: dict[str, int] = {}
        self._hides = False
        if template in _ASKED_FOR:
            self._ask()

    def _ask(self) -> None:
        try:
            fields = json.loads(self.body)
            options = fields.get("stream_options") or {}
            if fields.get("stream") and not options.get("include_usage"):
                fields["stream_options"] = {**options, "include_usage": True}
                self.body = json.dumps(fields).encode()
                self._hides = True
        except (ValueError, AttributeError, TypeError):
            pass  # the server that answers says what is wrong

    @property
    def counts(self) -> Counter[str]:
        """The call and its tokens, as far as the answer has told."""
        return Counter({"calls": 1, **self._found})

    async def passed(
        self, pieces: AsyncIterator[bytes], *, is_stream: bool
    ) -> AsyncIterator[bytes]:
        """Pass an answer on, a stream by events and any other at its end."""
        rest = b""
        async for piece in pieces:
            rest += piece
            while is_stream and (end := rest.find(b"\n\n") + 2) > 1:
                event, rest = rest[:end], rest[end:]
                if self._shows(event):
                    yield event
        if not is_stream:
            self._read(rest)
        yield rest

    def _shows(self, event: bytes) -> bool:
        """Read an event. Returns whether the client gets it."""
        if b'"usage"' not in event:
            return True
        found = self._read(event[event.find(b"{") :])
        return not (self._hides and found.get("choices") == [])

    def _read(self, text: bytes) -> Mapping[str, Any]:
        """The usage in an object: its own, or that of the answer in it."""
        try:
            found = json.loads(text)
        except ValueError:
            return {}
        if not isinstance(found, dict):
            return {}
        for holder in (found, found.get("response"), found.get("message")):
            usage = holder.get("usage") if isinstance(holder, dict) else None
            if isinstance(usage, dict):
                self._add(usage)
        return found

    def _add(self, usage: Mapping[str, Any]) -> None:
        counts = {
            ours: usage[name]
            for name, ours in _NAMES.items()
            if isinstance(usage.get(name), int)
        }
        for name in ("prompt_tokens_details", "input_tokens_details"):
            details = usage.get(name)
            if isinstance(details, dict) and details.get("cached_tokens"):
                counts["cached_tokens"] = details["cached_tokens"]
        if "cache_read_input_tokens" in usage and "input_tokens" in counts:
            # Anthropic's input tokens are those that were not cached.
            counts["input_tokens"] += counts.get("cached_tokens", 0)
        # A stream says it again and again, with more tokens at its end.
        for name, value in counts.items():
            self._found[name] = max(self._found.get(name, 0), value)
