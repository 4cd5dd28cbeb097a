"""Mistakes in the options of many engines: one sentence, status 2, before anything loads."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_batch import __main__ as cli

REQUEST = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}\n'


def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    source = tmp_path / "in.jsonl"
    source.write_text(REQUEST)
    output = tmp_path / "out.jsonl"
    status = cli.main(["run", "-i", str(source), "-o", str(output), *options])
    assert status == 2
    assert not output.exists()
    message = capsys.readouterr().err.strip()
    assert message.count("\n") == 0
    return message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engines", "2"), "--engines is of a Ray cluster"),
        (("--ray-resources", "{}"), "--ray-resources is of a Ray cluster"),
        (("--ray", "auto", "--engines", "none"), "must be a whole number of 1 or more"),
        (("--ray", "auto", "--engines", "4:2"), "MIN is above MAX"),
        (("--ray", "auto", "--ray-resources", "GPU=1"), "is no JSON"),
        (("--ray", "auto", "--ray-resources", '{"GPU": "1"}'), "an object of numbers"),
        (("--ray", "ray://a:1", "--model-path", "x"), "is not an address"),
        (("--ray", "10.0.0.1", "--model-path", "x"), "is not an address"),
        (("--ray", "auto", "--workers", "http://a"), "choose one"),
        (("--ray", "auto", "--nnodes", "2", "--model-path", "x"), "on one node"),
        (("--workers", "a:30000"), "is not the URL of a server"),
        (("--workers", ","), "is not the URL of a server"),
        (("--workers", "http://a,http://a/"), "twice"),
        (("--workers-key", "k"), "add --workers"),
        (("--workers", "http://a", "--tp", "2"), "leave it out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_mistakes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    assert message in refusal(tmp_path, capsys, *options)


def test_addresses_that_do_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    found = refusal(tmp_path, capsys, "--ray", address, "--model-path", "x")
    assert f"--ray {address} does not answer" in found
    found = refusal(tmp_path, capsys, "--workers", f"http://{address}")
    assert "does not answer as a server of SGLang" in found


def test_without_ray_the_extra_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    found = refusal(tmp_path, capsys, "--ray", "auto", "--model-path", "x")
    assert "pip install 'sglang-batch[ray]'" in found


@pytest.mark.slow
def test_nothing_of_ray_is_imported_by_all_else() -> None:
    modules = (
        "sglang_batch.__main__, sglang_batch.run.run_command, sglang_batch.run.running_job, "
        "sglang_batch.run.fleet_options, sglang_batch.fleet.fleet_engine, "
        "sglang_batch.fleet.http_fleet, sglang_batch.server.service, "
        "sglang_batch.server.http.all_routes, sglang_batch.fleet.ray.ray_cluster"
    )
    code = f"import sys, {modules}; print('ray' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
