"""``run -o labelled.csv``: the table of the input with columns of answers."""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import feather, parquet

from sglang_batch import map_table
from sglang_batch.__main__ import main
from sglang_batch.errors import ConfigError, InputError
from sglang_batch.inputs.job_input import JobInput, input_sources
from sglang_batch.inputs.template import Template
from sglang_batch.request import Usage
from sglang_batch.run.answer_table import AnswerTable, schema_keys
from sglang_batch.run.job_directory import JobDirectory, JobRecord
from sglang_batch.run.outputs import Outputs
from sglang_batch.run.summary import Counts, Summary

SCHEMA = {
    "type": "object",
    "properties": {"label": {"type": "string"}, "sure": {"type": "number"}},
}
TEMPLATE = {
    "messages": [{"role": "user", "content": "{{text}}"}],
    "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
}
PLAIN = {"messages": TEMPLATE["messages"]}
CSV = 'id,text\n007,"Two\nlines, ""quoted"""\n1e5,Grüße\n,last\n'


def job_input(path: Path, template: dict[str, Any] = PLAIN) -> JobInput:
    return JobInput(input_sources([str(path)]), Template(template))


def table_of(
    path: Path, name: str, template: dict[str, Any] = PLAIN, errors: str | None = None
) -> AnswerTable:
    outputs = Outputs.of(str(path.parent / name), errors, None)
    found = outputs.of_input(job_input(path, template)).table
    assert found is not None
    return found


def answer(content: str | None) -> bytes:
    body = {"choices": [{"message": {"content": content}}]}
    response = {"status_code": 200, "body": body}
    return json.dumps({"custom_id": "x", "error": None, "response": response}).encode()


def failed(message: str) -> bytes:
    body = {"error": {"message": message}}
    response = {"status_code": 400, "body": body}
    return json.dumps({"custom_id": "x", "error": None, "response": response}).encode()


def write(table: AnswerTable, lines: Sequence[bytes]) -> Path:
    results = table.path.parent / "results.jsonl"
    results.write_bytes(b"\n".join([*lines, b""]))
    table.check()
    with table.path.open("wb") as output:
        table.write(results, len(lines), output)
    return table.path


def read(path: Path, delimiter: str = ",") -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file, delimiter=delimiter))


def test_a_column_of_answers(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(CSV, encoding="utf-8")
    table = table_of(tmp_path / "in.csv", "out.csv")
    found = read(write(table, [answer("Ä, b"), answer("c\nd"), answer(None)]))
    assert found == [
        ["id", "text", "answer"],
        ["007", 'Two\nlines, "quoted"', "Ä, b"],
        ["1e5", "Grüße", "c\nd"],
        ["", "last", ""],
    ]


def test_a_column_for_each_key_and_for_errors(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(CSV, encoding="utf-8")
    table = table_of(tmp_path / "in.csv", "out.tsv", TEMPLATE)
    whole, cut = '{"label": "a", "sure": 0.5}', '{"label": "b'
    found = read(write(table, [answer(whole), answer(cut), failed("too long")]), "\t")
    assert found[0] == ["id", "text", "answer", "label", "sure", "error"]
    assert found[1][2:] == [whole, "a", "0.5", ""]
    assert found[2][2:5] == [cut, "", ""] and "no JSON object" in found[2][5]
    assert found[3][2:5] == ["", "", ""] and "too long" in found[3][5]


def test_a_row_without_the_object_that_was_asked_for_has_failed(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(CSV, encoding="utf-8")
    outputs = Outputs.of(str(tmp_path / "out.csv"), None, None)
    outputs = outputs.of_input(job_input(tmp_path / "in.csv", TEMPLATE))
    lines = [answer('{"label": "a"}'), answer('{"label": "b'), failed("too long")]
    with JobDirectory(outputs) as job:
        job.begin(JobRecord(input_sha256="", model="", num_requests=3), overwrite=False)
        log = job.open_log()
        for row, line in enumerate(lines):
            log.put(row, line, ok=row < 2, usage=Usage())
        summary = job.finish(Summary.of_log(log, Counts(), 1.0))
    kept = json.loads((job.path / "job.json").read_bytes())["summary"]
    for found in (summary.as_dict(), kept):
        assert (found["completed"], found["failed"]) == (1, 2)
    assert "1 x the answer is no JSON object; was it cut" in summary.as_table(outputs)
    assert "(such as row 1)" in summary.as_table(outputs)
    assert summary.as_table(outputs).endswith("the column 'error'")


def test_parquet_keeps_the_types(tmp_path: Path) -> None:
    day = datetime.date(2026, 11, 28)
    table = pyarrow.table(
        {
            "n": pyarrow.array([1, 2], pyarrow.int16()),
            "text": ["a", None],
            "d": [day] * 2,
        }
    )
    parquet.write_table(table, tmp_path / "in.parquet")
    feather.write_feather(table, tmp_path / "in.feather")
    lines = [answer('{"label": "x", "sure": 1}'), answer('{"label": "y"}')]
    for name, out in (("in.parquet", "out.pq"), ("in.feather", "out.parquet")):
        made = table_of(tmp_path / name, out, TEMPLATE)
        found = parquet.read_table(write(made, lines))
        assert found.select(table.column_names) == table
        assert found["label"].to_pylist() == ["x", "y"]
        assert found["sure"].to_pylist() == [1, None]
    # And as text, as in a prompt.
    found = read(write(table_of(tmp_path / "in.feather", "out.csv"), lines))
    assert [row[:3] for row in found[1:]] == [["1", "a", str(day)], ["2", "", str(day)]]


def test_the_first_rows_and_odd_keys(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "b", "more": [1, {"x": None}]}, {"text": "c"}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lines = [answer("1"), answer("2")]
    found = read(write(table_of(tmp_path / "in.jsonl", "out.csv"), lines))
    assert found == [
        ["text", "more", "answer"],
        ["a", "", "1"],
        ["b", '[1, {"x": null}]', "2"],
    ]
    made = write(table_of(tmp_path / "in.jsonl", "out.parquet"), [answer("1")])
    assert parquet.read_table(made)["answer"].to_pylist() == ["1"]


def test_keys_of_values_of_several_types(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text\na\nb\n")
    table = table_of(tmp_path / "in.csv", "out.parquet", TEMPLATE)
    lines = [answer('{"label": "x"}'), answer('{"label": 3}')]
    assert parquet.read_table(write(table, lines))["label"].to_pylist() == ["x", "3"]


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
@pytest.mark.parametrize(
    "value",
    ['"\\ud83d"', "{}", "[{}]", "[]", str(2**70), "[" * 900 + "]" * 900, "NaN", '"x"'],
)
def test_odd_answers_cost_no_other_row_its_own(
    value: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / "in.csv").write_text("text\na\nb\nc\n")
    table = table_of(tmp_path / "in.csv", name, TEMPLATE)
    deep = "[" * 100_000
    odd = [answer(f'{{"label": {value}}}'), answer(deep), answer('{"label": "z"}')]
    path = write(table, odd)
    if name == "out.csv":
        labels = [row[2] for row in read(path)[1:]]
    else:
        labels = parquet.read_table(path)["label"].to_pylist()
    assert labels[1] in (None, "") and labels[2] == "z"


@pytest.mark.parametrize("text", ["a\rb", "a\r", "\r\na", 'a\r"b"', "a\n\rb"])
def test_no_cell_ends_its_row(text: str, tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["q", text], "more": [text, "q"]})
    parquet.write_table(table, tmp_path / "in.parquet")
    for name, delimiter in (("out.csv", ","), ("out.tsv", "\t")):
        made = table_of(tmp_path / "in.parquet", name)
        found = read(write(made, [answer(text), answer("x")]), delimiter)
        assert found[1:] == [["q", text, text], [text, "q", "x"]]


def test_columns_that_json_cannot_hold_are_copied_as_python_writes_them(
    tmp_path: Path,
) -> None:
    deep = "[" * 900 + "]" * 900
    table = pyarrow.table(
        {
            "text": ["a"],
            "image": [{"bytes": b"\x89PNG", "path": None}],
            "far": [float("inf")],
        }
    )
    parquet.write_table(table, tmp_path / "in.parquet")
    found = read(write(table_of(tmp_path / "in.parquet", "out.csv"), [answer("yes")]))
    assert found[1] == ["a", "{'bytes': b'\\x89PNG', 'path': None}", "inf", "yes"]
    (tmp_path / "in.jsonl").write_text(
        f'{{"text": "a", "x": {deep}, "y": 1e999}}\n{{"text": "b", "y": "z"}}\n'
    )
    lines = [answer("1"), answer("2")]
    made = read(write(table_of(tmp_path / "in.jsonl", "out.csv"), lines))
    assert made[1:] == [["a", deep, "inf", "1"], ["b", "", "z", "2"]]
    other = write(table_of(tmp_path / "in.jsonl", "out.parquet"), lines)
    assert parquet.read_table(other)["y"].to_pylist() == ["inf", "z"]


def test_columns_of_types_that_parquet_lacks_are_text(tmp_path: Path) -> None:
    none = pyarrow.array([{}, None], pyarrow.struct([]))
    span = pyarrow.array([(1, 2, 3), None], pyarrow.month_day_nano_interval())
    table = pyarrow.table({"text": ["a", "b"], "none": none, "span": span, "n": [1, 2]})
    feather.write_feather(table, tmp_path / "in.feather")
    path = write(table_of(tmp_path / "in.feather", "out.parquet"), [answer("x")] * 2)
    found = parquet.read_table(path)
    assert found.column_names == ["text", "none", "span", "n", "answer"]
    assert found["none"].to_pylist() == ["{}", None]
    assert found["span"].to_pylist() == ["[1, 2, 3]", None]
    assert found["n"].to_pylist() == [1, 2]


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_a_key_named_error_stays_where_rows_fail(name: str, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text\na\nb\n")
    schema = {"properties": {"error": {"type": "string"}}}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    table = table_of(tmp_path / "in.csv", name, PLAIN | {"response_format": form})
    path = write(table, [answer('{"error": "a typo"}'), failed("too long")])
    found = (
        [row[2] for row in read(path)[1:]]
        if name == "out.csv"
        else parquet.read_table(path)["error"].to_pylist()
    )
    assert found == ["a typo", "too long"]


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text,id,id\na,1,2\n")
    with pytest.raises(InputError, match="2 columns named 'id'"):
        table_of(tmp_path / "in.csv", "out.csv").check()


def test_a_table_without_rows_keeps_its_columns(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("id,text\n")
    found = read(write(table_of(tmp_path / "in.csv", "out.csv"), []))
    assert found == [["id", "text", "answer"]]


def test_a_changed_input_is_no_table_for_its_answers(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("text\na\n")
    table = table_of(path, "out.csv")
    path.write_text("text\nb\nc\n")
    with pytest.raises(InputError, match=r"in\.csv has changed since the run began"):
        write(table, [answer("1")])


@pytest.mark.parametrize(
    "columns, template, name",
    [
        ("text,answer", PLAIN, "answer"),
        ("text,error", PLAIN, "error"),
        ("text,label", TEMPLATE, "label"),
    ],
)
def test_a_column_that_is_there(
    columns: str, template: dict[str, Any], name: str, tmp_path: Path
) -> None:
    (tmp_path / "in.csv").write_text(f"{columns}\na,b\n")
    table = table_of(tmp_path / "in.csv", "out.csv", template)
    with pytest.raises(ConfigError, match=f"has a column '{name}' already"):
        table.check()


@pytest.mark.parametrize(
    "argv, said",
    [
        (["-i", "in.jsonl"], "out.csv as a table needs --template and one file"),
        (["-i", "in.csv", "in.csv", "--template", "{{text}}"], "needs --template and"),
        (["-i", "-", "--template", "{{text}}"], "one file on this machine"),
        (["-i", "none.csv", "--template", "{{text}}"], "none.csv does not exist"),
        (
            ["-i", "in.csv", "--template", "{{text}}", "--error-file", "e"],
            "drop --error",
        ),
        (["-i", "in.csv", "--template", "{{tex}}"], "no column 'tex'; it has 'text'"),
    ],
)
def test_said_before_the_engine_starts(
    argv: list[str],
    said: str,
    demo_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.csv").write_text("text\na\n")
    Path("in.jsonl").write_text("{}\n")
    model = ["--model-path", str(demo_model)]
    assert main(["run", *argv, "-o", "out.csv", *model]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("out.csv*"))


def test_parquet_is_not_compressed_again(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text\na\n")
    with pytest.raises(ConfigError, match="Parquet is compressed by itself"):
        table_of(tmp_path / "in.csv", "out.parquet.gz")


def test_a_byte_order_mark_stays(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text\nGrüße\n", encoding="utf-8-sig")
    made = write(table_of(tmp_path / "in.csv", "out.csv"), [answer("ja")])
    assert made.read_text(encoding="utf-8") == "\ufefftext,answer\nGrüße,ja\n"


def test_an_answer_without_text_is_no_json_object(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text\na\n")
    table = table_of(tmp_path / "in.csv", "out.csv", TEMPLATE)
    [names, row] = read(write(table, [answer(None)]))
    assert "no JSON object" in dict(zip(names, row, strict=True))["error"]


def test_keys_of_each_endpoint() -> None:
    schema = {"schema": SCHEMA}
    chat = {"response_format": {"type": "json_schema", "json_schema": schema}}
    responses = {"text": {"format": {"type": "json_schema", **schema}}}
    assert schema_keys(chat) == schema_keys(responses) == ("label", "sure")
    for other in ({}, {"response_format": "x"}, {"text": {"format": {"type": "text"}}}):
        assert schema_keys(other) == ()


@pytest.mark.parametrize(
    ("output", "errors"),
    [
        ("out.xlsx", None),
        ("out.feather", None),
        ("out.ARROW.gz", None),
        ("out.jsonl", "errors.csv"),
        ("out", "errors.parquet"),
    ],
)
def test_lines_are_not_written_under_the_name_of_a_table(
    output: str, errors: str | None, tmp_path: Path
) -> None:
    (tmp_path / "in.csv").write_text("text\na\n")
    outputs = Outputs.of(output, errors, None)
    with pytest.raises(ConfigError, match=rf"{errors or output} would hold JSON lines"):
        outputs.of_input(job_input(tmp_path / "in.csv"))


@pytest.mark.parametrize("name", ["in.csv.gz", "in.csv.zst", "in.jsonl.gz"])
def test_a_damaged_input_is_named_before_the_engine_starts(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(b"text\na\n")
    with pytest.raises(InputError, match=rf"{name} is damaged"):
        table_of(tmp_path / name, "out.csv").check()


@pytest.mark.parametrize(
    ("fields", "endpoint"),
    [
        ({"n": 2}, "/v1/chat/completions"),
        ({"n": "{{text}}"}, "/v1/completions"),
        ({"prompt": ["{{text}}", "b"]}, "/v1/completions"),
        ({"input": ["{{text}}", "b"]}, "/v1/embeddings"),
    ],
)
def test_several_answers_for_a_row_are_refused(
    fields: dict[str, Any], endpoint: str, tmp_path: Path
) -> None:
    (tmp_path / "in.csv").write_text("text\na\n")
    sources = input_sources([str(tmp_path / "in.csv")])
    asked = JobInput(sources, Template({"user": "{{text}}", **fields}), endpoint)
    with pytest.raises(ConfigError, match="several answers for a row"):
        Outputs.of("out.csv", None, None).of_input(asked)
    with pytest.raises(ConfigError, match="several answers for a row"):
        map_table(
            pyarrow.table({"text": ["a"]}),
            {"user": "{{text}}", **fields},
            model_path="m",
            endpoint=endpoint,
        )
