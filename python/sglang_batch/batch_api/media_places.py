"""Places that media may be read from: parsed, and compared part by part.

A place is an ``http``, ``https`` or ``file`` URL, or the absolute path of a file.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote, unquote_to_bytes, urlsplit

import idna

PORTS = {"http": 80, "https": 443}

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMERIC = re.compile(r"[0-9]+|0x[0-9a-f]*")
_ENCODED = re.compile(r"%[0-9A-Fa-f]{2}")
# What stays as it is where a path or a query is written in ASCII.
_WRITTEN = "!$%&'()*+,/:;=?@[]~"


@dataclass(frozen=True, slots=True)
class Place:
    """A place in parts that can be compared.

    scheme: ``http``, ``https`` or ``file``.
    host: lowercase ASCII without a trailing dot; the shortest form of an address, without
        brackets. Empty for files.
    port: also where the URL has none. 0 for files.
    segments: of the path, decoded. The last is empty if the path ends in ``/``.
    target: the path and query to ask the host for, in ASCII, or the path of the file.
    """

    scheme: str
    host: str
    port: int
    segments: tuple[str, ...]
    target: str

    def is_below(self, other: Place) -> bool:
        """Whether this place is ``other``, or in it."""
        folder = other.segments
        if folder and not folder[-1]:
            folder = folder[:-1]
        return (self.scheme, self.host, self.port) == (
            other.scheme,
            other.host,
            other.port,
        ) and self.segments[: len(folder)] == folder


def parse_place(text: str) -> Place:
    """The parts of a place.

    Raises ValueError if it is none, or could be read in two ways: user names,
    backslashes, control characters, ``.`` and ``..`` segments, numbers for hosts,
    and what is still encoded after it was decoded once.
    """
    if any(char < " " or char in "\x7f\\" for char in text):
        raise ValueError("it has control characters or backslashes")
    if text.startswith("/"):
        return _file(text, text.split("/")[1:])
    if any(char.isspace() for char in text):
        raise ValueError("it has spaces")
    parts = urlsplit(text)
    if parts.scheme == "file":
        if parts.netloc.lower() not in ("", "localhost"):
            raise ValueError("the URL of a file has no host")
        if parts.query or parts.fragment or not parts.path.startswith("/"):
            raise ValueError("the URL of a file is file:// and an absolute path")
        segments = [_decoded(each) for each in parts.path.split("/")[1:]]
        return _file("/" + "/".join(segments), segments)
    if parts.scheme not in PORTS:
        raise ValueError(
            "it is neither an http, https or file URL nor an absolute path"
        )
    if "@" in parts.netloc:
        raise ValueError("it names a user")
    port = PORTS[parts.scheme] if parts.port is None else parts.port
    if not port:
        raise ValueError("its port is 0")
    segments = [_decoded(each) for each in parts.path.split("/")[1:]]
    _check_segments(segments)
    target = parts.path or "/"
    if parts.query:
        target += f"?{parts.query}"
    return Place(
        parts.scheme,
        _host(parts.hostname or ""),
        port,
        tuple(segments),
        quote(target, safe=_WRITTEN),
    )


def parse_source(text: str) -> Place | Network:
    """An entry of ``media_sources``: a place or a network.

    Raises ValueError otherwise.
    """
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        pass
    if "?" in text or "#" in text:
        raise ValueError("it has a query or a fragment")
    place = parse_place(text)
    if place.scheme == "file" and not any(place.segments):
        raise ValueError("it is all files")
    return place


@lru_cache(maxsize=64)
def parse_sources(
    texts: tuple[str, ...],
) -> tuple[tuple[Place, ...], tuple[Network, ...]]:
    """The places and the networks of ``media_sources``. What is neither opens nothing."""
    places: list[Place] = []
    networks: list[Network] = []
    for text in texts:
        try:
            found = parse_source(text)
        except ValueError:
            continue
        if isinstance(found, Place):
            places.append(found)
        else:
            networks.append(found)
    return tuple(places), tuple(networks)


def _file(path: str, segments: list[str]) -> Place:
    _check_segments(segments)
    return Place("file", "", 0, tuple(segments), path)


def _decoded(segment: str) -> str:
    """A segment of a path, decoded once."""
    if _ENCODED.sub("", segment).count("%"):
        raise ValueError("it has a % that encodes nothing")
    return unquote_to_bytes(segment).decode()  # UnicodeDecodeError is a ValueError


def _check_segments(segments: list[str]) -> None:
    for segment in segments:
        # Some servers take what follows a semicolon for parameters of the segment.
        if segment.partition(";")[0] in (".", ".."):
            raise ValueError("its path has . or ..")
        if any(char < " " or char in "\x7f\\/" for char in segment):
            raise ValueError("a name in its path has a slash or a control character")
        if _ENCODED.search(segment):
            raise ValueError("its path is encoded twice")


def _host(name: str) -> str:
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    if not name.isascii():
        try:
            name = idna.encode(name, uts46=True).decode()
        except idna.IDNAError as error:
            raise ValueError(f"its host is no name: {error}") from None
    name = name.lower().removesuffix(".")
    labels = name.split(".")
    if len(name) > 253 or not all(map(_LABEL.fullmatch, labels)):
        raise ValueError("its host is no name")
    # Resolvers take 127.1, 0x7f000001 and 2130706433 for addresses.
    if _NUMERIC.fullmatch(labels[-1]):
        raise ValueError("its host is a number")
    return name
