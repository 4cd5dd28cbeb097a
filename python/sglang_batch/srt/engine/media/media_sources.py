"""Where the media of a job's lines may come from.

Whoever may send lines would otherwise have the server fetch any URL of its network, and read
any file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote

_FIELDS = ("image_data", "video_data", "audio_data")


def check_sources(request: Any, allowed: Sequence[str]) -> None:
    """Refuse media that are neither in the line itself nor from an allowed place.

    Args:
        request: SGLang's request.
        allowed: how the URLs and paths begin that may be read.

    Raises:
        ValueError: names the place.
    """
    for name in _FIELDS:
        check_places(getattr(request, name, None), allowed)


def check_places(value: Any, allowed: Sequence[str]) -> None:
    """:func:`check_sources` for one place, or several, however they are nested."""
    for source in _sources(value):
        if not (source.startswith("data:") or _is_below(source, allowed)):
            raise ValueError(
                f"{source[:100]!r} may not be read: media are data: URLs, or begin "
                "as the server's media_sources say."
            )


def _is_below(source: str, allowed: Sequence[str]) -> bool:
    """Whether a place begins as one that is allowed, and does not lead out of it."""
    plain = unquote(source).replace("\\", "/")
    return plain.startswith(tuple(allowed)) and ".." not in plain.split("/")


def _sources(value: Any) -> Iterator[str]:
    """All places in the value of a field, however it is nested."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _sources(each)
    elif isinstance(value, dict):
        yield from _sources(list(value.values()))
    elif isinstance(getattr(value, "url", None), str):
        yield value.url
