"""Media read from places: which address, how much, and what a path leads to."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import struct
import threading
import wave
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from named_hosts import named
from PIL import Image
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.utils.common import ImageData, VideoData

from sglang_batch.batch_api.media_places import parse_place
from sglang_batch.config import OfflineBatchConfig
from sglang_batch.srt.engine.media import MOST_PIXELS, MediaReader, may_connect
from sglang_batch.srt.engine.serving_call import HoldingManager, ServingCall

MOST = 100_000
FIELDS = {"image": "image_data", "video": "video_data", "audio": "audio_data"}


def png(width: int = 2, height: int = 2) -> bytes:
    """A PNG whose header promises so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(b"\0" * 14)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", rows)
        + chunk(b"IEND", b"")
    )


def wav(samples: int = 1600) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16000)
        sound.writeframes(b"\0\0" * samples)
    return file.getvalue()


def mp4(width: int = 64, height: int = 64) -> bytes:
    try:
        from torchcodec.encoders import VideoEncoder

        frames = torch.zeros((4, 3, height, width), dtype=torch.uint8)
        encoder = VideoEncoder(frames, frame_rate=4)
    except (ImportError, RuntimeError):
        pytest.skip("FFmpeg is not installed, so nothing here decodes a video.")
    return bytes(encoder.to_tensor("mp4").numpy().tobytes())


def data_url(content: bytes) -> str:
    return "data:any/thing;base64," + base64.b64encode(content).decode()


@pytest.fixture(scope="module")
def contents() -> dict[str, bytes]:
    try:
        video = mp4()
    except pytest.skip.Exception:  # FFmpeg is not installed: there is no decoder
        video = b"video"
    return {"image": png(), "audio": wav(), "video": video}


class Site(ThreadingHTTPServer):
    """A server of files, redirects and bodies without an end."""

    daemon_threads = True

    def __init__(self, contents: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.contents = contents
        self.asked: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    server: Site
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.asked.append((self.headers["Host"], self.path))
        path, _, query = self.path.partition("?")
        name = path.rpartition("/")[2]
        if name == "to":
            self.send_response(302)
            self.send_header("Location", query)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = self.server.contents.get(name, b"x" * 2 * MOST)
        self.send_response(200 if name != "none" else 404)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for begin in range(0, len(content), 10_000):
                part = content[begin : begin + 10_000]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(contents: dict[str, bytes]) -> Iterator[Site]:
    with Site(contents) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield site
        site.shutdown()


def read(source: Any, *allowed: str, kind: str = "image", most: int = MOST) -> Any:
    """What SGLang's loaders get for a field's value."""
    request = SimpleNamespace(**{FIELDS[kind]: source})
    asyncio.run(MediaReader(allowed, most).read(request))
    return getattr(request, FIELDS[kind])


def content(url: str) -> bytes:
    assert url.startswith("data:")
    return base64.b64decode(url.partition(",")[2], validate=True)


@pytest.mark.parametrize("kind", FIELDS)
def test_loaders_get_the_content_of_urls_and_files(
    site: Site, contents: dict[str, bytes], tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "a b"
    path.write_bytes(contents[kind])
    sources = [
        str(path),
        path.as_uri(),
        f"{site.url}/in/{kind}",
        data_url(contents[kind]),
    ]
    found = read(sources, f"{site.url}/in", str(tmp_path), kind=kind)
    assert [content(each) for each in found] == [contents[kind]] * 4
    assert found[3] == sources[3]


def test_places_are_read_however_they_are_nested(site: Site) -> None:
    url = f"{site.url}/in/image"
    own = ImageData(url=url, detail="high")
    found = read([[own, {"url": url}], (url,), None], site.url)
    assert (own.url, found[0][0].detail, found[2]) == (url, "high", None)
    for each in (found[0][0].url, found[0][1]["url"], found[1][0]):
        assert content(each) == png()
    videos = read(VideoData(url=f"{site.url}/in/video"), site.url, kind="video")
    assert content(videos.url) == site.contents["video"]


def refused(match: str, source: Any, *allowed: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=match):
        read(source, *allowed, **options)


@pytest.mark.parametrize("kind", FIELDS)
def test_redirects_stay_in_the_list(site: Site, kind: str) -> None:
    allowed = f"{site.url}/in/"
    for target in ("/in/" + kind, kind, f"{allowed}to?{kind}"):
        found = read(f"{allowed}to?{target}", allowed, kind=kind)
        assert content(found) == site.contents[kind]
    before = len(site.asked)
    outside = (
        *(f"/out/{kind}", f"../{kind}", "file:///etc/hostname", "//localhost/in/x"),
        *("/in/%2e%2e/x", f"http://localhost:{site.server_port}/in/{kind}"),
    )
    for target in outside:
        refused("redirects to a place", f"{allowed}to?{target}", allowed, kind=kind)
    assert len(site.asked) == before + len(outside)
    refused(
        "redirects more than", f"{allowed}to?to?to?to?to?to?to?x", allowed, kind=kind
    )


def test_a_redirect_does_not_open_files_that_are_listed(
    site: Site, tmp_path: Path
) -> None:
    refused(
        "redirects to a file",
        f"{site.url}/to?file://{tmp_path}",
        site.url,
        str(tmp_path),
    )


@pytest.mark.parametrize("kind", FIELDS)
def test_bytes_are_bounded_while_they_come(
    site: Site, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"x" * (MOST + 1))
    for source in (f"{site.url}/endless", str(path), "/dev/zero"):
        refused(f"more than {MOST:,} bytes|no file", source, site.url, str(tmp_path), "/dev",
                kind=kind)  # fmt: skip
    refused("status 404", f"{site.url}/none", site.url, kind=kind)
    assert read(f"{site.url}/{kind}", site.url, kind=kind, most=0)


def test_the_media_of_a_line_are_bounded_together(tmp_path: Path) -> None:
    image = png() + b"\0" * 1000
    for number in range(5):
        (tmp_path / str(number)).write_bytes(image)
    sources = [str(tmp_path / str(number)) for number in range(5)]
    assert len(read(sources[:4], str(tmp_path), most=len(image))) == 4
    refused("media of the line", sources, str(tmp_path), most=len(image))
    # Four of the largest images may be in a line, and no fifth.
    large = [data_url(png(8192, 8192) + bytes([each])) for each in range(5)]
    assert MOST_PIXELS == 8192 * 8192
    assert len(read(large[:4])) == 4
    refused("images of the line", large)


def test_what_expands_when_it_is_decoded_is_refused_before(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[object] = []
    monkeypatch.setattr(Image.Image, "load", decoded.append)
    site.contents["bomb"] = png(60_000, 60_000)
    for source in (f"{site.url}/bomb", data_url(site.contents["bomb"])):
        refused("pixels", source, site.url)
    refused("pixels", data_url(png(8193, 8192)))
    assert not decoded


def test_a_sound_has_a_bounded_number_of_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sglang_batch.srt.engine.media.MOST_SAMPLES", 16_000)
    sound = data_url(wav(16_000))
    assert read([sound], kind="audio") == [sound]
    refused("samples", data_url(wav(16_001)), kind="audio")


def test_frames_of_a_video_have_a_bounded_number_of_pixels(
    contents: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_batch.srt.engine.media.MOST_PIXELS", 64 * 64)
    assert read(data_url(contents["video"]), kind="video")
    refused("64 x 66 pixels", data_url(mp4(64, 66)), kind="video")


def test_a_path_that_leads_out_of_its_folder_is_not_read(
    contents: dict[str, bytes], tmp_path: Path
) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a.png").write_bytes(contents["image"])
    (inside / "file").symlink_to(outside / "a.png")
    (inside / "folder").symlink_to(outside)
    (inside / "own").symlink_to(inside / "a.png")
    (tmp_path / "other").symlink_to(inside)
    os.mkfifo(inside / "pipe")
    for name in ("file", "folder/a.png"):
        refused("leads out of its folder", str(inside / name), str(inside))
    refused("is no file|Error", str(inside / "pipe"), str(inside))
    refused("is no file|Error", str(inside), str(inside))
    refused("FileNotFoundError", str(inside / "none"), str(inside))
    for place in (inside / "own", tmp_path / "other" / "a.png"):
        assert content(read(str(place), str(place.parent))) == contents["image"]


def test_a_host_at_a_private_address_is_not_read_unless_its_network_is_listed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = f"http://images.example.com:{site.server_port}"
    asked = named(monkeypatch, images=["127.0.0.1"] * 2)
    before = len(site.asked)
    refused("at a private address", f"{host}/image", host)
    assert len(site.asked) == before
    assert content(read(f"{host}/image", host, "127.0.0.0/8")) == png()
    # Connected to the address that was checked: its name is resolved once.
    assert len(asked) == 2
    assert site.asked[-1] == (host.removeprefix("http://"), "/image")


def test_a_host_whose_address_changes_is_checked_each_time(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = f"http://images.example.com:{site.server_port}"
    named(monkeypatch, images=["127.0.0.1", "169.254.169.254"])
    refused("at a private address", f"{host}/to?/image", host, "127.0.0.1")


def test_localhost_is_what_it_says(site: Site) -> None:
    host = f"http://localhost:{site.server_port}"
    assert content(read(f"{host}/image", host)) == png()


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254"),
        *("100.64.0.1", "0.0.0.0", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
        *("::1", "::", "fe80::1", "fc00::1", "fec0::1", "ff02::1", "2001:db8::1"),
        *("::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "::ffff:127.0.0.1"),
    ],
)
def test_private_addresses(address: str) -> None:
    site = parse_place("https://images.example.com/")
    assert not may_connect(site, ip_address(address), ())
    assert may_connect(site, ip_address(address), ("0.0.0.0/0", "::/0"))
    if ":" not in address:
        assert may_connect(parse_place(f"http://{address}/"), ip_address(address), ())


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8"]
)
def test_public_addresses(address: str) -> None:
    assert may_connect(parse_place("https://a.example/"), ip_address(address), ())


class Manager:
    """The parts of a tokenizer manager that a call of several requests reaches."""

    def __init__(self, *allowed: str) -> None:
        config = OfflineBatchConfig(media_sources=allowed)
        self.server_args = SimpleNamespace(
            offline_config=config, media_url_max_file_size_mb=64
        )
        self.sent: list[Any] = []

    async def generate_request(self, obj: Any, request: None) -> AsyncIterator[Any]:
        self.sent.append(obj.image_data)
        yield {}


@pytest.mark.parametrize("kind", [GenerateReqInput, EmbeddingReqInput])
def test_each_request_that_a_line_becomes_is_checked(
    site: Site, kind: Callable[..., Any]
) -> None:
    # A reranker sends one for each of its documents.
    places = [f"{site.url}/in/image", f"{site.url}/in/image", f"{site.url}/out/image"]

    async def serve(manager: HoldingManager) -> None:
        for place in places:
            async for _ in manager.generate_request(kind(text="", image_data=[place])):
                pass

    manager = Manager(f"{site.url}/in/")
    call = ServingCall(serve(HoldingManager(manager)), "line")  # type: ignore[arg-type]
    call.render()

    async def run() -> None:
        await call.run()

    with pytest.raises(ValueError, match="out/image' may not be read"):
        asyncio.run(run())
    assert [content(each) for [each] in manager.sent] == [png(), png()]
