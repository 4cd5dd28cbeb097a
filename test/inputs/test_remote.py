"""URLs: fetched once, uploaded with retries, never stored with their secrets."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pandas
import pytest
from builders import make_file
from huggingface_hub import constants
from input_files import QUESTION, batch_lines, ids_of_lines, packed, staged
from web_server import WebFiles

from sglang_batch.errors import ConfigError, InputError, StoreError
from sglang_batch.inputs import urls
from sglang_batch.inputs.job_input import JobInput, input_sources

SIGNED = "?X-Amz-Signature={}&X-Amz-Date={}"


def test_a_url_is_fetched_once_even_if_signed_anew(
    tmp_path: Path, web: WebFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    web.files["/a.jsonl.gz"] = packed(batch_lines("a", "b"), ".gz")
    url = web.url("/a.jsonl.gz")
    first = staged(tmp_path, url + SIGNED.format("secret", 1))
    assert staged(tmp_path, url + SIGNED.format("hidden", 2)) == first
    assert ids_of_lines(first) == ["a", "b"]
    assert first.line_name(2) == f"{url}, line 2"
    assert web.log == [("GET", "/a.jsonl.gz" + SIGNED.format("secret", 1))]
    said = capsys.readouterr().err
    assert f"Fetching {url}: " in said
    kept = b"".join(path.read_bytes() for path in (tmp_path / "job").iterdir())
    assert b"secret" not in kept and "secret" not in said
    staged(tmp_path, url + "?version=2")
    assert len(web.log) == 2


def test_web_and_memory_and_local_files_are_one_input(
    tmp_path: Path, web: WebFiles, memory: Any
) -> None:
    web.files["/a"] = batch_lines("a")
    memory.pipe("/bucket/b.jsonl.zst", packed(batch_lines("b"), ".zst"))
    here = make_file(tmp_path, batch_lines("c"))
    found = staged(tmp_path, web.url("/a"), "memory://bucket/b.jsonl.zst", here)
    assert ids_of_lines(found) == ["a", "b", "c"]


def test_downloads_are_retried_after_temporary_errors(
    tmp_path: Path, web: WebFiles
) -> None:
    web.files["/a"] = batch_lines("a")
    web.failing = [503, 429, 500, 502]
    assert ids_of_lines(staged(tmp_path, web.url("/a"))) == ["a"]
    assert len(web.log) == urls.MAX_ATTEMPTS
    for status in (503, 404):
        web.log.clear()
        web.failing = [status] * 9
        with pytest.raises(InputError) as error:
            staged(tmp_path, web.url("/b?X-Amz-Signature=secret"))
        assert f"cannot fetch {web.url('/b')}: HTTP {status}" in str(error.value)
        assert len(web.log) == (urls.MAX_ATTEMPTS if status == 503 else 1)
    with pytest.raises(InputError, match="cannot fetch memory://none/x: FileNotFound"):
        staged(tmp_path, "memory://none/x")


@pytest.mark.parametrize("place", ["127.0.0.1:1", "none.invalid"])
def test_a_server_that_is_not_there_is_tried_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(urls.time, "sleep", pauses.append)
    with pytest.raises(InputError, match=f"cannot fetch http://{place}/a: ConnectErr"):
        staged(tmp_path, f"http://{place}/a")
    assert pauses == [urls.FIRST_PAUSE_S]


def test_uploads_are_retried_after_temporary_errors(
    tmp_path: Path, web: WebFiles, memory: Any
) -> None:
    path = make_file(tmp_path, b"results", "out.jsonl")
    web.failing = [500, 503, 503, 503]
    urls.upload(path, web.url("/out?sig=secret"))
    assert web.files["/out"] == b"results"
    assert len(web.log) == urls.MAX_ATTEMPTS
    web.failing = [403]
    with pytest.raises(StoreError) as error:
        urls.upload(path, web.url("/out?sig=secret"))
    assert f"cannot upload to {web.url('/out')}: HTTP 403" in str(error.value)
    assert f"safe in {path}" in str(error.value)
    assert len(web.log) == urls.MAX_ATTEMPTS + 1
    urls.upload(path, "memory://bucket/out")
    assert memory.cat("/bucket/out") == b"results"


def test_a_table_behind_a_signed_url_needs_a_template(
    tmp_path: Path, web: WebFiles
) -> None:
    web.files["/t.csv"] = b"question\nWhy?\n"
    with pytest.raises(ConfigError, match=r"/t\.csv is a table: .* --template"):
        staged(tmp_path, web.url("/t.csv") + SIGNED.format("secret", 1))


@pytest.mark.parametrize(
    ("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs"), ("abfs", "adlfs")]
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, scheme: str, package: str
) -> None:
    import fsspec

    def missing(_: str) -> None:
        raise ImportError(f"Install {package}")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        JobInput(input_sources((f"{scheme}://bucket/key",))).check()


def test_a_url_is_shown_without_its_secrets() -> None:
    url = "https://user:word@host:8/a/b.jsonl?X-Amz-Signature=s"
    assert urls.shown(url) == "https://host:8/a/b.jsonl"
    same = "https://host:8/a/b.jsonl?X-Amz-Signature=t&Expires=5"
    assert urls.fingerprint(url) == urls.fingerprint(same)
    assert urls.fingerprint(url) != urls.fingerprint(same + "&part=2")


# Datasets ---------------------------------------------------------------------------


@pytest.fixture
def hub(web: WebFiles, monkeypatch: pytest.MonkeyPatch) -> WebFiles:
    """A Hugging Face hub that has one dataset, and keeps no data of it."""
    monkeypatch.setattr(constants, "ENDPOINT", web.url(""))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    web.files["/api/datasets/org/there"] = b'{"id": "org/there", "siblings": []}'
    return web


def check_dataset(name: str) -> None:
    [source] = input_sources([f"hf-dataset:{name}"])
    source.check_exists()


def test_a_mistyped_dataset_is_named_after_one_call(hub: WebFiles) -> None:
    check_dataset("org/there:config:train")
    with pytest.raises(InputError, match=r"org/their: .* hub refuses it"):
        check_dataset("org/their")
    calls = [path for _, path in hub.log if path.startswith("/api/datasets")]
    assert calls == ["/api/datasets/org/there", "/api/datasets/org/their"]


@pytest.mark.parametrize("name", ["./questions", "/no/such/folder", "a/b/c"])
def test_a_directory_that_is_not_there_is_named_without_a_call(
    hub: WebFiles, name: str
) -> None:
    with pytest.raises(InputError, match=f"there is no directory {name}"):
        check_dataset(name)
    assert hub.log == []


def test_a_hub_out_of_reach_is_reported_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(InputError, match="hub cannot be reached"):
        staged(tmp_path, "hf-dataset:org/there", template=QUESTION)
    assert list((tmp_path / "job").iterdir()) == []


@pytest.mark.parametrize("kind", ["parquet", "feather"])
def test_a_table_that_is_compressed_in_transit_is_read(
    tmp_path: Path, web: WebFiles, kind: str
) -> None:
    # As web servers and buckets with Content-Encoding do, and nobody asked for it.
    table = tmp_path / f"t.{kind}"
    getattr(pandas.DataFrame({"id": ["x", "y"]}), f"to_{kind}")(table)
    web.files[f"/t.{kind}"] = gzip.compress(table.read_bytes())
    (source,) = input_sources([web.url(f"/t.{kind}")])
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert [row["id"] for row in source.rows(["id"], scratch)] == ["x", "y"]
    assert list(scratch.iterdir()) == []
