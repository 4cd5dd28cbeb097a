"""``sglang_batch.map_table`` with data frames of every kind, on a real server."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pytest
from servers import Server

import sglang_batch
from sglang_batch.errors import ConfigError, InputError
from sglang_batch.run.answer_table import answers_of
from sglang_batch.run.client import client_commands
from sglang_batch.run.client.batch_client import BatchClient

ROWS = {
    "name": [f"Thing {i}" for i in range(6)],
    "maker": ["A maker", "Another"] * 3,
    "most": [2, 3, 2, 3, 2, 3],
}
TEMPLATE: dict[str, Any] = {
    "prompt": "{{#fields}}Name: {{name}}\nMaker: {{maker}}{{/fields}}\nAnswer:",
    "max_tokens": "{{most}}",
    "temperature": 0,
    "ignore_eos": True,
}


def polars_frame() -> Any:
    return pytest.importorskip("polars").DataFrame(ROWS)


def duckdb_relation() -> Any:
    duckdb = pytest.importorskip("duckdb")
    rows = pyarrow.table(ROWS)  # noqa: F841 - found by its name
    return duckdb.connect().query("SELECT * FROM rows")


FRAMES: dict[str, Callable[[], Any]] = {
    "pandas": lambda: pandas.DataFrame(ROWS, index=list("uvwxyz")),
    "pyarrow": lambda: pyarrow.table(ROWS),
    "polars": polars_frame,
    "duckdb": duckdb_relation,
}


@pytest.mark.parametrize("kind", FRAMES)
def test_a_frame_comes_back_with_its_answers(kind: str, offline_server: Server) -> None:
    frame = FRAMES[kind]()
    answered = sglang_batch.map_table(
        frame, TEMPLATE, server=offline_server.url, endpoint="/v1/completions"
    )
    assert type(answered) is type(frame)
    found = pyarrow.table(answered).to_pydict()
    found.pop("__index_level_0__", None)
    assert list(found) == [*ROWS, "answer"]
    assert all(found[name] == ROWS[name] for name in ROWS)
    assert all(isinstance(text, str) and text for text in found["answer"])
    if kind == "pandas":
        assert list(answered.index) == list("uvwxyz")


def test_failed_rows_have_an_error_and_the_others_an_answer(
    offline_server: Server,
) -> None:
    frame = pandas.DataFrame(ROWS | {"most": [2, 10**6, 2, 3, 2, 3]})
    with pytest.warns(UserWarning, match="1 of 6 rows failed, see column 'why'"):
        answered = sglang_batch.map_table(
            frame, TEMPLATE, server=offline_server.url, endpoint="/v1/completions",
            answer="label", error="why",
        )  # fmt: skip
    assert list(answered["label"].isna()) == [False, True, *[False] * 4]
    assert list(answered["why"].isna()) == [True, False, *[True] * 4]


def test_an_interrupted_call_goes_on_with_its_batch_or_ends_it(
    offline_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(most: int, job: Path | None) -> pandas.DataFrame:
        frame = pandas.DataFrame(ROWS | {"most": most})
        return sglang_batch.map_table(
            frame, TEMPLATE, server=offline_server.url, endpoint="/v1/completions",
            job=job,
        )  # fmt: skip

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(client_commands.time, "sleep", interrupt)
        for most, job in ((1000, None), (2, tmp_path)):
            with pytest.raises(KeyboardInterrupt):
                call(most, job)
    with closing(BatchClient(offline_server.url, None)) as client:
        kept, dropped = client.newest(2)
        assert dropped["status"] in ("cancelling", "cancelled")
        answered = call(2, tmp_path)
        assert answered["answer"].notna().all()
        assert call(2, tmp_path).equals(answered)
        assert next(client.newest(1))["id"] == kept["id"]
        call(3, tmp_path)  # other rows
        assert next(client.newest(1))["id"] != kept["id"]


def test_a_frame_without_rows_and_calls_that_cannot_be() -> None:
    frame = pandas.DataFrame(ROWS)
    empty = sglang_batch.map_table(frame[:0], TEMPLATE, model_path="none")
    assert list(empty.columns) == [*ROWS, "answer"] and not len(empty)
    for arguments, error, said in (
        ({}, ConfigError, "needs either model_path or server"),
        ({"server": "x", "tp": 2}, ConfigError, "no 'tp', and options of an engine"),
        ({"server": "x", "endpoint": "/v1"}, ConfigError, "endpoint '/v1' is none of"),
        ({"server": "x", "answer": "name"}, ConfigError, "has a column 'name' already"),
        ({"model_path": "./none"}, InputError, "./none"),
    ):
        with pytest.raises(error, match=re.escape(said)):
            sglang_batch.map_table(frame, TEMPLATE, **arguments)
    with pytest.raises(ConfigError, match="a list is no table"):
        sglang_batch.map_table([1], TEMPLATE, model_path="x")
    with pytest.raises(InputError, match="has no column 'question'; it has 'name'"):
        sglang_batch.map_table(frame, "{{question}}", model_path="x")
    with pytest.raises(AttributeError, match="map_tables"):
        sglang_batch.map_tables  # noqa: B018


# As SGLang has it with --reasoning-parser.
REASONED = """{"output": [
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "message", "content": [{"type": "output_text", "text": "a"}]}
]}""".replace("\n", "")


# A call of a tool, in place of a text.
CALL = '[{"type": "%s", "name": "f", "arguments": "{}"}]'


@pytest.mark.parametrize(
    ("endpoint", "body", "answer"),
    [
        (
            "/v1/chat/completions",
            f'{{"choices": [{{"message": {{"content": null, "tool_calls": '
            f"{CALL % 'function'}}}}}]}}",
            CALL % "function",
        ),
        (
            "/v1/responses",
            f'{{"output": {CALL % "function_call"}}}',
            CALL % "function_call",
        ),
        ("/v1/messages", f'{{"content": {CALL % "tool_use"}}}', CALL % "tool_use"),
        ("/v1/messages", '{"content": []}', ""),
        ("/v1/chat/completions", '{"choices": [{"message": {"content": "a"}}]}', "a"),
        ("/v1/messages", '{"content": [{"type": "text", "text": "a"}]}', "a"),
        ("/v1/responses", '{"output": [{"content": [{"text": "a"}]}, {}]}', "a"),
        ("/v1/responses", REASONED, "a"),
        ("/v1/embeddings", '{"data": [{"embedding": [1.5, 2]}]}', [1.5, 2]),
        ("/v1/score", '{"scores": [0.5]}', '{"scores": [0.5]}'),
    ],
)
def test_answers_of_each_endpoint(
    endpoint: str, body: str, answer: object, tmp_path: Path
) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(
        '{"custom_id": "1", "error": null, "response": {"status_code": 200, "body": '
        + body + '}}\n{"custom_id": "0", "error": {"code": "x"}, "response": null}\n'
    )  # fmt: skip
    answers, errors = answers_of(path, endpoint, 3)
    assert answers == [None, answer, None]
    assert errors == ["x", None, "no answer"]
