"""Where the media of a job's lines may come from.

Whoever may send lines would otherwise have the server fetch any URL of its network, and read
any file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

from ....media_places import parse_place, parse_sources

# SGLang's fields and what is in them.
KINDS = {"image_data": "image", "video_data": "video", "audio_data": "audio"}


def check_sources(request: Any, allowed: Sequence[str]) -> None:
    """Refuse media that are neither in the line itself nor from an allowed place.

    Args:
        request: SGLang's request.
        allowed: ``media_sources``.

    Raises:
        ValueError: names the place.
    """
    for name in KINDS:
        check_places(getattr(request, name, None), allowed)


def check_places(value: Any, allowed: Sequence[str]) -> None:
    """:func:`check_sources` for one place, or several, however they are nested."""
    for source in places_in(value):
        if not (source.startswith("data:") or _is_below(source, allowed)):
            raise not_allowed(source)


def not_allowed(source: str) -> ValueError:
    """The error of a place that the settings do not open."""
    return ValueError(
        f"{source[:100]!r} may not be read: media are data: URLs, or at a place that the "
        "server's media_sources name."
    )


def _is_below(source: str, allowed: Sequence[str]) -> bool:
    """Whether a place is one that is allowed, or in one."""
    try:
        place = parse_place(source)
    except ValueError:
        return False
    return any(map(place.is_below, parse_sources(tuple(allowed))[0]))


def places_in(value: Any) -> Iterator[str]:
    """All places in the value of a field, however it is nested."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from places_in(each)
    elif isinstance(value, dict):
        yield from places_in(list(value.values()))
    elif isinstance(getattr(value, "url", None), str):
        yield value.url


def with_places(value: Any, change: Callable[[str], str]) -> Any:
    """The value of a field with each place changed. Nothing in ``value`` is."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(with_places(each, change) for each in value)
    if isinstance(value, dict):
        return {key: with_places(each, change) for key, each in value.items()}
    if isinstance(getattr(value, "url", None), str):
        own = copy(value)
        own.url = change(value.url)
        return own
    return value
