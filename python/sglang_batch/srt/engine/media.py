"""Media of lines, read from the places that ``media_sources`` names.

Whoever may send lines would otherwise have the server fetch any URL of its network, and read
any file. SGLang's loaders get ``data:`` URLs only. They would follow redirects to any host, and
open whatever a path leads to.
"""

from __future__ import annotations

import asyncio
import io
import os
import stat
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpcore
import pybase64

from ...batch_api.media_places import PORTS, Place, parse_place, parse_sources
from ...batch_api.pinned_calls import (
    Address,
    PinnedBackend,
    inner_address,
    is_public,
    pinned_call,
)
from ...planner.requests import END_OF_PLACEHOLDERS, FIRST_PLACEHOLDER
from ..compat.server_types import TokenizerManager

# A decoded image has three bytes or more per pixel.
MOST_PIXELS = 1 << 26
# A decoded sound has up to eight bytes per sample of each channel.
MOST_SAMPLES = 1 << 28
# All media of a line together have at most this many times the bound of one.
LINE = 4
MOST_REDIRECTS = 5
MOST_AT_A_TIME = 8
_CHUNK = 1 << 20
_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity"}


def media_reader(manager: TokenizerManager) -> MediaReader:
    """A reader for one line of an engine, by its settings."""
    args: Any = manager.server_args
    return MediaReader(
        args.offline_config.media_sources, args.media_url_max_file_size_mb << 20
    )


class MediaReader:
    """Reads the media of one line, within bounds for all of them.

    allowed: ``media_sources``.
    most_bytes: of one place. 0 is any number.
    """

    def __init__(self, allowed: Sequence[str], most_bytes: int) -> None:
        self._allowed = tuple(allowed)
        self._most_bytes = most_bytes
        self._bytes = self._pixels = self._samples = 0
        self._room = asyncio.Semaphore(MOST_AT_A_TIME)

    async def read(self, request: Any) -> None:
        """Put the content of each place in the fields of SGLang's request.

        Raises:
            ValueError: a place may not be read, cannot be, or has too much.
        """
        check_sources(request, self._allowed)
        for name, kind in KINDS.items():
            value = getattr(request, name, None)
            places = list(dict.fromkeys(places_in(value)))
            tasks = [asyncio.create_task(self.data_url(each, kind)) for each in places]
            try:
                urls = dict(zip(places, await asyncio.gather(*tasks), strict=True))
            except BaseException:
                for task in tasks:
                    task.cancel()
                raise
            if places:
                setattr(request, name, with_places(value, urls.__getitem__))

    async def data_url(self, source: str, kind: str) -> str:
        """A place as a ``data:`` URL whose content SGLang may decode. Errors as of :meth:`read`.

        kind: ``image``, ``video`` or ``audio``.
        """
        async with self._room:
            if source.startswith("data:"):
                content = await asyncio.to_thread(_content_of, source)
            elif not _is_below(source, self._allowed):
                raise not_allowed(source)
            else:
                content = await self._content_at(source)
            try:
                await asyncio.to_thread(self._check, content, kind)
            except ValueError as error:
                raise ValueError(f"{source[:100]!r}: {error}") from None
            if source.startswith("data:"):
                return source
            encoded = await asyncio.to_thread(pybase64.b64encode, content)
            return f"data:{kind}/unknown;base64,{encoded.decode()}"

    async def _content_at(self, source: str) -> bytes:
        place = parse_place(source)
        try:
            if place.scheme == "file":
                return await asyncio.to_thread(self._file, place)
            # As SGLang's own loaders.
            async with asyncio.timeout(float(os.getenv("REQUEST_TIMEOUT", "10"))):
                return await self._fetched(source, place)
        except (TimeoutError, httpcore.TimeoutException):
            reason = "it takes too long"
        except (OSError, httpcore.NetworkError, httpcore.ProtocolError) as error:
            reason = type(error).__name__
        except ValueError as error:
            reason = str(error)
        raise ValueError(f"{source[:100]!r} cannot be read: {reason}.")

    # Files ----------------------------------------------------------------------------

    def _file(self, place: Place) -> bytes:
        path = os.path.realpath(place.target)
        self._check_real(path, place)
        # A pipe would wait for its other end.
        opened = os.open(
            path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        )
        with open(opened, "rb") as file:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise ValueError("it is no file")
            link = Path(f"/proc/self/fd/{opened}")
            if link.exists():  # a folder above it may have become a link meanwhile
                self._check_real(os.path.realpath(link), place)
            content = bytearray()
            while chunk := file.read(_CHUNK):
                self._take(content, chunk)
        return bytes(content)

    def _check_real(self, path: str, place: Place) -> None:
        """Check that the file of a path is in a folder that the settings name."""
        for folder in parse_sources(self._allowed)[0]:
            if folder.scheme == "file" and place.is_below(folder):
                real = Path(os.path.realpath(folder.target))
                if Path(path).is_relative_to(real):
                    return
        raise ValueError("it leads out of its folder")

    # URLs -----------------------------------------------------------------------------

    async def _fetched(self, source: str, place: Place) -> bytes:
        for _ in range(MOST_REDIRECTS + 1):
            found = await self._answer(place)
            if isinstance(found, bytes):
                return found
            source = urljoin(source, found)
            if not _is_below(source, self._allowed):
                raise ValueError("it redirects to a place that may not be read")
            place = parse_place(source)
            if place.scheme not in PORTS:
                raise ValueError("it redirects to a file")
        raise ValueError(f"it redirects more than {MOST_REDIRECTS} times")

    async def _answer(self, place: Place) -> bytes | str:
        """The content at a URL, or where it redirects to."""
        backend = PinnedBackend(
            lambda address: may_connect(place, address, self._allowed),
            "its host is at a private address, which media_sources does not name",
        )
        async with pinned_call("GET", place, backend, _HEADERS) as answer:
            headers = {name.lower(): value for name, value in answer.headers}
            if answer.status in (301, 302, 303, 307, 308) and b"location" in headers:
                return headers[b"location"].decode("latin-1")
            if answer.status != 200:
                raise ValueError(f"its host answers with status {answer.status}")
            content = bytearray()
            async for chunk in answer.aiter_stream():
                self._take(content, chunk)
            return bytes(content)

    # Bounds ---------------------------------------------------------------------------

    def _take(self, content: bytearray, chunk: bytes) -> None:
        self._bytes += len(chunk)
        most = self._most_bytes
        if most and len(content) + len(chunk) > most:
            raise ValueError(f"it has more than {most:,} bytes")
        if most and self._bytes > LINE * most:
            raise ValueError(
                f"the media of the line have more than {LINE * most:,} bytes"
            )
        content += chunk

    def _check(self, content: bytes, kind: str) -> None:
        """Check the memory that the content would take when it is decoded."""
        if kind == "audio":
            samples = _num_samples(content)
            self._samples += samples
            if samples > MOST_SAMPLES or self._samples > LINE * MOST_SAMPLES:
                raise ValueError(
                    f"it has {samples:,} samples, of {MOST_SAMPLES:,} at most"
                )
            return
        size_of = _image_size if kind == "image" else _frame_size
        width, height = size_of(content)
        self._pixels += width * height
        if width * height > MOST_PIXELS:
            raise ValueError(
                f"it has {width} x {height} pixels, of {MOST_PIXELS:,} at most"
            )
        if self._pixels > LINE * MOST_PIXELS:
            raise ValueError(
                f"with it, the images of the line have more than {LINE * MOST_PIXELS:,} pixels"
            )


def may_connect(place: Place, address: Address, allowed: Sequence[str]) -> bool:
    """Whether a place that is allowed may be read at an address of its host.

    Addresses that are not global are for hosts that are written as this address, for
    ``localhost``, and for networks of ``media_sources``.
    """
    inner = inner_address(address)
    if str(address) == place.host:
        return True
    if place.host == "localhost" and inner.is_loopback:
        return True
    if any(inner in network for network in parse_sources(tuple(allowed))[1]):
        return True
    return is_public(address)


def _content_of(url: str) -> bytes:
    try:
        return pybase64.b64decode(url.partition(",")[2], validate=True)
    except ValueError as error:
        raise ValueError(f"{url[:100]!r}: {error}") from None


def _image_size(content: bytes) -> tuple[int, int]:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content)) as image:  # reads the header only
                return image.size
    except Image.DecompressionBombError:
        raise ValueError(f"it has more than {MOST_PIXELS:,} pixels") from None
    except (OSError, SyntaxError) as error:
        raise ValueError(f"Could not decode image: {error}") from None


def _frame_size(content: bytes) -> tuple[int, int]:
    from sglang.srt.utils import load_video

    try:
        height, width = load_video(content, use_gpu=False).frame_shape
    except (ImportError, ValueError):  # SGLang's loader will say so
        return 0, 0
    return width, height


def _num_samples(content: bytes) -> int:
    """Samples of a sound in all channels. 0 where only SGLang can tell."""
    import soundfile

    try:
        found = soundfile.info(io.BytesIO(content))
    except soundfile.LibsndfileError:
        return 0
    return int(found.frames) * int(found.channels)


# The kind of media in each of SGLang's fields.
KINDS = {"image_data": "image", "video_data": "video", "audio_data": "audio"}


def check_sources(request: Any, allowed: Sequence[str]) -> None:
    """Refuse media that are neither in SGLang's request itself nor from an allowed place.

    Raises:
        ValueError: names the place.
    """
    for source in places_in([getattr(request, name, None) for name in KINDS]):
        if not (source.startswith("data:") or _is_below(source, allowed)):
            raise not_allowed(source)


def not_allowed(source: str) -> ValueError:
    """The error of a place that the settings do not open."""
    return ValueError(
        f"{source[:100]!r} may not be read: media are data: URLs, or at a place that the "
        "server's media_sources name."
    )


def _is_below(source: str, allowed: Sequence[str]) -> bool:
    try:
        place = parse_place(source)
    except ValueError:
        return False
    return any(map(place.is_below, parse_sources(tuple(allowed))[0]))


def places_in(value: Any) -> list[str]:
    """All places in the value of a field, however it is nested."""
    found: list[str] = []

    def noted(place: str) -> str:
        found.append(place)
        return place

    with_places(value, noted)
    return found


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


# The plan need not have SGLang's placeholders for images: only equal ones for equal images.
_MANY = END_OF_PLACEHOLDERS - FIRST_PLACEHOLDER


async def media_token_ids(manager: TokenizerManager, request: Any) -> list[int]:
    """The tokens of the prompt of SGLang's request, whose media are loaded and processed
    for it. Only their placeholders are kept.

    Raises:
        Exception: one that cannot be loaded.
    """
    own = copy(request)
    for name in KINDS:
        value = getattr(own, name, None)
        if value is not None:
            setattr(own, name, list(value) if isinstance(value, list) else [value])
    processed = await manager.mm_processor.process_mm_data_async(
        image_data=own.image_data,
        audio_data=own.audio_data,
        input_text=own.text or own.input_ids or "",
        request_obj=own,
        max_req_input_len=manager.max_req_input_len,
    )
    ids = processed.input_ids
    ids = list(ids) if isinstance(ids, list) else ids.flatten().tolist()
    for item in processed.mm_items:
        item.set_pad_value()
        for begin, end in item.offsets or ():
            token = FIRST_PLACEHOLDER + int(item.hash) % _MANY
            ids[begin : end + 1] = [token] * (end + 1 - begin)
    return ids


def num_placeholders(req: Any, begin: int, end: int) -> int:
    """Placeholders among the tokens from ``begin`` up to ``end`` of SGLang's request."""
    if req.multimodal_inputs is None:
        return 0
    return sum(
        max(0, min(last + 1, end) - max(first, begin))
        for item in req.multimodal_inputs.mm_items
        for first, last in item.offsets or ()
    )
