"""The command keys, with a server in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from builders import make_lines
from route_server import Server, serving

from sglang_batch.__main__ import main

Keys = Callable[..., tuple[int, str, str]]


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[Server]:
    keys = {b"key-root": "root", b"key-ann": "ann"}
    with serving(tmp_path, keys, api_key="key-root") as server:
        yield server


@pytest.fixture
def keys(
    keyed: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Keys:
    """Runs ``sglang-batch keys``: exit status, standard output and standard error."""

    def client(*, api_key: str, **_options: Any) -> openai.OpenAI:
        return made.setdefault(api_key, keyed.client_of(api_key))

    def run(*argv: str, key: str = "key-root") -> tuple[int, str, str]:
        options = ("--url", "http://testserver", "--api-key", key)
        status = main(["keys", *argv, *options])
        return status, *capsys.readouterr()

    made: dict[str, openai.OpenAI] = {}
    monkeypatch.setattr(openai.OpenAI, "close", lambda self: None)
    monkeypatch.setattr(openai, "OpenAI", client)
    return run


def test_a_key_is_printed_and_works(keyed: Server, keys: Keys) -> None:
    limits = ("--tokens-per-day", "7000", "--model", "demo", "--model", "tuned")
    status, out, _ = keys("add", "bob", *limits)
    assert status == 0
    assert keyed.client_of(out.strip()).files.list().data == []
    _, listed, _ = keys("list")
    assert "7,000 tokens/day, models demo, tuned" in listed
    assert out.strip() not in listed
    shown = json.loads(keys("list", "--json")[1])
    assert shown["tokens_per_day"] == 7000
    change = ("--lines-per-day", "5", "--tokens-per-day", "none")
    change += ("--enqueued-tokens", "9000")
    kept = "5 lines/day, 9,000 enqueued tokens, models demo, tuned\n"
    assert keys("limit", "bob", *change)[1] == kept
    assert keys("limit", "bob")[1] == kept
    # Another key of the name keeps them, too.
    assert keys("add", "bob", "--same-owner", "--model", "none")[0] == 0
    assert keys("list")[1].count("5 lines/day") == 2
    assert "models" not in keys("list")[1]
    status, out, _ = keys("revoke", shown["id"], "--cancel-batches")
    assert (status, out) == (0, f"{shown['id']} revoked, 0 batches cancelled\n")
    assert "revoked" in keys("list")[1]


def test_usage_is_a_table(keyed: Server, keys: Keys) -> None:
    assert keys("usage")[1] == "nothing was used\n"
    ann = keyed.client_of("key-ann")
    data = "".join(f"{line}\n" for line in make_lines(3)).encode()
    file = ann.files.create(file=("in.jsonl", data), purpose="batch")
    keyed.ended(
        ann.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )
    )
    header, row = keys("usage", "--days", "2")[1].splitlines()
    assert header.split()[:4] == ["day", "name", "batches", "lines"]
    assert row.split()[1:4] == ["ann", "1", "3"]


@pytest.mark.parametrize(
    ("argv", "key", "said"),
    [
        (["add", "ann"], "key-root", "The name is taken"),
        (["add", "a b"], "key-root", "'a b' must be 1 to 64 letters"),
        (
            ["limit", "ann", "--model", "a", "--model", "none"],
            "key-root",
            "remove the other --model",
        ),
        (["limit", "nobody"], "key-root", "No key has the name 'nobody'"),
        (["revoke", "key_0"], "key-root", "No key found with id 'key_0'"),
        (["list"], "key-ann", "is closed to this API key"),
        (["list"], "wrong", "does not accept this API key"),
    ],
)
def test_errors_name_the_way_out(
    keys: Keys, argv: list[str], key: str, said: str
) -> None:
    status, out, err = keys(*argv, key=key)
    assert (status, out) == (2, "")
    assert said in err
    assert "Traceback" not in err
