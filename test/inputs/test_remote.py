"""URLs: fetched once, uploaded with patience, never written down with their secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import make_file
from input_files import batch_lines, ids_of_lines, packed, staged
from web_server import WebFiles

from sglang_batch.errors import ConfigError, InputError, StoreError
from sglang_batch.inputs import remote
from sglang_batch.inputs.sources import InputOptions, check

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


def test_fetching_tries_again_where_that_may_help(
    tmp_path: Path, web: WebFiles
) -> None:
    web.files["/a"] = batch_lines("a")
    web.failing = [503, 429, 500, 502]
    assert ids_of_lines(staged(tmp_path, web.url("/a"))) == ["a"]
    assert len(web.log) == remote.TRIES
    for status in (503, 404):
        web.log.clear()
        web.failing = [status] * 9
        with pytest.raises(InputError) as error:
            staged(tmp_path, web.url("/b?X-Amz-Signature=secret"))
        assert f"cannot fetch {web.url('/b')}: HTTP {status}" in str(error.value)
        assert len(web.log) == (remote.TRIES if status == 503 else 1)
    with pytest.raises(InputError, match="cannot fetch memory://none/x: FileNotFound"):
        staged(tmp_path, "memory://none/x")


def test_uploading_tries_again_where_that_may_help(
    tmp_path: Path, web: WebFiles, memory: Any
) -> None:
    path = make_file(tmp_path, b"results", "out.jsonl")
    web.failing = [500, 503, 503, 503]
    remote.upload(path, web.url("/out?sig=secret"))
    assert web.files["/out"] == b"results"
    assert len(web.log) == remote.TRIES
    web.failing = [403]
    with pytest.raises(StoreError) as error:
        remote.upload(path, web.url("/out?sig=secret"))
    assert f"cannot upload to {web.url('/out')}: HTTP 403" in str(error.value)
    assert f"safe in {path}" in str(error.value)
    assert len(web.log) == remote.TRIES + 1
    remote.upload(path, "memory://bucket/out")
    assert memory.cat("/bucket/out") == b"results"


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
        check(InputOptions((f"{scheme}://bucket/key",)))


def test_a_url_is_shown_without_its_secrets() -> None:
    url = "https://user:word@host:8/a/b.jsonl?X-Amz-Signature=s"
    assert remote.shown(url) == "https://host:8/a/b.jsonl"
    same = "https://host:8/a/b.jsonl?X-Amz-Signature=t&Expires=5"
    assert remote.fingerprint(url) == remote.fingerprint(same)
    assert remote.fingerprint(url) != remote.fingerprint(same + "&part=2")
