"""Which places are in which, for all ways of writing them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_batch.batch_api.media_places import parse_place
from sglang_batch.config import OfflineBatchConfig
from sglang_batch.errors import ConfigError
from sglang_batch.srt.engine.media import _is_below, check_sources

SITE = "https://images.example.com"


@pytest.mark.parametrize(
    ("place", "entry"),
    [
        (f"{SITE}/a.png", SITE),
        (f"{SITE}/a.png", f"{SITE}/"),
        (SITE, SITE),
        ("HTTPS://Images.EXAMPLE.com/a.png", SITE),
        ("https://images.example.com./a.png", SITE),
        ("https://images.example.com:443/a.png", SITE),
        (f"{SITE}/a.png", "https://IMAGES.example.com.:443/"),
        (f"{SITE}/cats/a.png?size=2&x=%2e%2e", f"{SITE}/cats"),
        (f"{SITE}/c%61ts/a.png", f"{SITE}/cats/"),
        (f"{SITE}/cats", f"{SITE}/cats/"),
        (f"{SITE}/cats/a%20b.png", f"{SITE}/cats/"),
        (f"{SITE}/cats/é.png", f"{SITE}/cats/"),
        ("https://bücher.example/a", "https://xn--bcher-kva.example/"),
        ("https://xn--bcher-kva.example/a", "https://BÜCHER.example/"),
        ("http://[::1]:8000/a", "http://[0:0::1]:8000/"),
        ("http://10.0.0.5:9000/a", "http://10.0.0.5:9000"),
        ("/data/a b.png", "/data"),
        ("/data/a.png", "file:///data/"),
        ("file:///data/a%20b.png", "/data/"),
        ("file://localhost/data/a.png", "/data/"),
    ],
)
def test_places_of_an_entry(place: str, entry: str) -> None:
    assert _is_below(place, [entry])
    OfflineBatchConfig(media_sources=(entry,))


@pytest.mark.parametrize(
    ("place", "entry"),
    [
        # Other hosts, schemes and ports.
        (f"{SITE}.evil.example/x", SITE),
        (f"{SITE}@127.0.0.1/x", SITE),
        ("https://images.example.com:x@evil.example/", SITE),
        ("https://user@images.example.com/x", SITE),
        ("http://images.example.com/x", SITE),
        (f"{SITE}:8443/x", SITE),
        (f"{SITE}:0/x", SITE),
        (f"{SITE}:99999/x", SITE),
        ("https://sub.images.example.com/x", SITE),
        ("https://images.example.com../x", SITE),
        ("https://images%2eexample.com/x", SITE),
        ("https://evil.example\\@images.example.com/x", SITE),
        ("https:\\\\images.example.com/x", SITE),
        ("https://evil.example#@images.example.com/x", SITE),
        ("https://evil.example?@images.example.com/x", SITE),
        ("https:///images.example.com/x", SITE),
        ("//images.example.com/x", SITE),
        ("https:images.example.com/x", SITE),
        (" https://images.example.com/x", SITE),
        ("https://images.example.com\n.evil.example/x", SITE),
        ("ftp://images.example.com/x", SITE),
        ("video:/data/x", "/data"),
        ("DATA:image/png;base64,AA", SITE),
        ("http://2130706433/x", "http://127.0.0.1/"),
        ("http://127.1/x", "http://127.0.0.1/"),
        ("http://0x7f.0.0.1/x", "http://127.0.0.1/"),
        ("http://0177.0.0.1/x", "http://127.0.0.1/"),
        ("http://[::ffff:127.0.0.1]/x", "http://127.0.0.1/"),
        ("http://[fe80::1%25eth0]/x", "http://[fe80::1]/"),
        # Other folders, of hosts and of the disk.
        (f"{SITE}/dogs/x", f"{SITE}/cats/"),
        (f"{SITE}/cats-secret/x", f"{SITE}/cats"),
        (f"{SITE}/cats/../x", f"{SITE}/cats"),
        (f"{SITE}/cats/%2e%2e/x", f"{SITE}/cats"),
        (f"{SITE}/cats/.%2E/x", f"{SITE}/cats"),
        (f"{SITE}/cats/%252e%252e/x", f"{SITE}/cats"),
        (f"{SITE}/cats/..;a=1/x", f"{SITE}/cats"),
        (f"{SITE}/cats/..%2fx", f"{SITE}/cats"),
        (f"{SITE}/cats/..%5cx", f"{SITE}/cats"),
        (f"{SITE}/cats/..\\x", f"{SITE}/cats"),
        (f"{SITE}/cats/%c0%ae%c0%ae/x", f"{SITE}/cats"),
        (f"{SITE}/cats/%zz", f"{SITE}/cats"),
        (f"{SITE}/cats/%00", f"{SITE}/cats"),
        (f"{SITE}//cats/x", f"{SITE}/cats"),
        ("/data-secret/x", "/data"),
        ("/data/../etc/passwd", "/data"),
        ("/data/%2e%2e/etc/passwd", "/data"),
        ("/data/./x", "/data"),
        ("file:///data/%252e%252e/x", "/data"),
        ("file://data/x", "/data"),
        ("file:data/x", "/data"),
        ("data/x", "/data"),
        ("", "/data"),
        ("/data/x", SITE),
        ("/data/x", "10.0.0.0/8"),
    ],
)
def test_places_that_only_look_like_those_of_an_entry(place: str, entry: str) -> None:
    assert not _is_below(place, [entry])
    with pytest.raises(ValueError, match="may not be read"):
        check_sources(SimpleNamespace(image_data=[{"url": place}]), [entry])


@pytest.mark.parametrize(
    "entry",
    [
        *(
            "",
            "/",
            "file:///",
            "http",
            "images.example.com",
            "https://",
            "ftp://a.com/",
        ),
        *("https://*.example.com/", "https://u@a.com/", "https://a.com/?x", "/a/../b"),
        *("https://a.com/#x", "data/images/", "10.0.0.1/8", "http://127.1/"),
    ],
)
def test_an_entry_that_is_no_place_is_refused_at_start(entry: str) -> None:
    with pytest.raises(ConfigError, match="media_sources"):
        OfflineBatchConfig(media_sources=(entry,))


def test_what_is_asked_of_a_host_is_what_was_compared() -> None:
    place = parse_place("https://bücher.example/a%20b/é?q=ü&sig=a%2Bb#part")
    assert place.host == "xn--bcher-kva.example"
    assert place.target == "/a%20b/%C3%A9?q=%C3%BC&sig=a%2Bb"
