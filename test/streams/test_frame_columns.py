"""Frames with names of columns that are not plain text, and keywords that nobody has."""

from __future__ import annotations

import importlib
from typing import Any

import pyarrow
import pytest

from sglang_batch import AnswerColumns, map_table
from sglang_batch.errors import ConfigError, InputError
from sglang_batch.inputs.tables import rows_of_batches
from sglang_batch.lang.frame_job import DataFrame
from sglang_batch.lang.own_server import flags_of


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([0, 1], ["0", "1"]),
        ([1.5, "x"], ["1.5", "x"]),
        ([("a", "x"), ("b", "")], ["('a', 'x')", "('b', '')"]),
        ([True, b"b"], ["True", "b'b'"]),
    ],
)
@pytest.mark.parametrize("index", [[0, 1], [5, 5]])
def test_columns_of_pandas_may_have_any_names(
    labels: list[Any], names: list[str], index: list[int]
) -> None:
    pandas = pytest.importorskip("pandas")
    multi = isinstance(labels[0], tuple)
    columns = pandas.MultiIndex.from_tuples(labels) if multi else labels
    frame = pandas.DataFrame([["Rome", 1], ["Oslo", 2]], columns=columns, index=index)
    given = DataFrame(frame)
    assert given.columns == names
    assert given.arrow([names[0]]).to_pydict() == {names[0]: ["Rome", "Oslo"]}
    answered = given.with_columns({"answer": ["a", "b"]})
    assert list(answered["answer"]) == ["a", "b"]
    assert list(answered.columns)[:2] == list(frame.columns)
    assert len(frame.columns) == 2
    assert list(answered.index) == index


def test_timestamps_are_names_too() -> None:
    pandas = pytest.importorskip("pandas")
    days = pandas.date_range("2026-01-01", periods=2)
    given = DataFrame(pandas.DataFrame([["Rome", 1]], columns=days))
    name = given.columns[0]
    assert given.arrow([name]).to_pydict() == {name: ["Rome"]}


@pytest.mark.parametrize("kind", ["pandas", "pyarrow"])
def test_a_name_that_two_columns_have_is_refused(kind: str) -> None:
    frame: Any
    if kind == "pandas":
        pandas = importlib.import_module(kind)
        frame = pandas.DataFrame([[1, 2, 3]], columns=["a", "a", "b"])
    else:
        arrays = [pyarrow.array([i]) for i in (1, 2, 3)]
        frame = pyarrow.Table.from_arrays(arrays, names=["a", "a", "b"])
    with pytest.raises(InputError, match="the table has 2 columns named 'a'"):
        DataFrame(frame).arrow(["a"])
    assert DataFrame(frame).arrow(["b"]).to_pydict() == {"b": [3]}


def test_periods_are_text() -> None:
    pandas = pytest.importorskip("pandas")
    months = pandas.PeriodIndex(["2026-11", None], freq="M")
    frame = pandas.DataFrame({"month": months, "n": [1, 2]})
    batches = DataFrame(frame).arrow(["month", "n"]).to_batches()
    found = list(rows_of_batches(batches))
    assert found == [{"month": "2026-11", "n": 1}, {"month": None, "n": 2}]
    assert frame["month"].dtype == "period[M]"


def test_a_column_is_no_table() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ConfigError):
        DataFrame(pandas.Series([1]))


@pytest.mark.parametrize("where", [{"server": "http://x"}, {"model_path": "x"}])
@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("answers", "answer"),
        ("optimise_fields", "optimize_fields"),
        ("apikey", "api_key"),
    ],
)
def test_a_keyword_that_is_misspelt_is_named(
    where: dict[str, Any], wrong: str, meant: str
) -> None:
    table = pyarrow.table({"a": [1]})
    with pytest.raises(ConfigError, match=f"no '{wrong}'; is '{meant}' meant"):
        map_table(table, "{{a}}", **where, **{wrong: "x"})


def test_a_keyword_of_nobody_is_not_taken_for_an_engines() -> None:
    table = pyarrow.table({"a": [1]})
    with pytest.raises(ConfigError, match="map_table has no 'colour'"):
        map_table(table, "{{a}}", server="http://x", colour="red")


@pytest.mark.parametrize(
    "names",
    [{"answer": 0}, {"error": None}, {"answer": ""}, {"answer": "x", "error": "x"}],
)
def test_names_of_new_columns_are_two_texts(names: dict[str, Any]) -> None:
    table = pyarrow.table({"a": [1]})
    with pytest.raises(ConfigError, match=r"answer|error"):
        map_table(table, "{{a}}", server="http://127.0.0.1:9", **names)


@pytest.mark.parametrize(
    "wrong",
    [{"server": ["x"]}, {"api_key": 5}, {"template": None}, {"job": __file__}],
)
def test_a_value_of_another_kind_is_named(wrong: dict[str, Any]) -> None:
    given = {"template": "{{a}}", "server": "http://127.0.0.1:9", **wrong}
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        map_table(pyarrow.table({"a": [1]}), **given)


def test_a_mistake_of_the_template_is_found_before_the_server_has_it() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "{{a}}"}], "n": 1}
    with pytest.raises(InputError, match="the template makes no valid request"):
        map_table(
            pyarrow.table({"a": [1]}),
            body | {"temperature": "hot"},
            server="http://127.0.0.1:9",
        )


def test_an_option_that_cannot_be_used_says_why() -> None:
    table = pyarrow.table({"a": [1]})
    with pytest.raises(InputError, match="a share above 0"):
        map_table(table, "{{a}}", model_path="m", enough=2)


def test_options_that_are_mappings_are_json() -> None:
    options = {"stop_rules": {"json": True}, "lora_paths": [{"lora_name": "a"}, "b"]}
    assert flags_of(options) == [
        '--stop-rules={"json": true}',
        *("--lora-paths", '{"lora_name": "a"}', "b"),
    ]


@pytest.mark.parametrize("name", ["input_file", "input", "o", "error_file", "url"])
def test_options_that_the_table_settles_are_refused(name: str) -> None:
    table = pyarrow.table({"a": [1]})
    with pytest.raises(ConfigError, match="map_table sets"):
        map_table(table, "{{a}}", model_path="m", **{name: "/v1/completions"})


def test_duckdb_does_not_tell_cases_of_names_apart() -> None:
    duckdb = pytest.importorskip("duckdb")
    relation = duckdb.sql("SELECT 'a' AS \"Answer\", 'b' AS q")
    with pytest.raises(ConfigError, match="a column 'answer' already"):
        map_table(relation, "{{q}}", server="http://127.0.0.1:9")


@pytest.mark.parametrize("names", [("a", "a", None), ("a", "b", "b"), ("x", "x", "x")])
def test_two_columns_of_answers_of_one_name(names: tuple[Any, ...]) -> None:
    chosen = dict(
        zip(("text_column", "error_column", "body_column"), names, strict=True)
    )
    ask = AnswerColumns("{{q}}", server="http://127.0.0.1:9", **chosen)
    with pytest.raises(ConfigError, match="two columns would be named"):
        ask({"q": ["a"]})


@pytest.mark.parametrize("kind", ["table", "columns"])
@pytest.mark.parametrize("name", ["answer", "error", "whole"])
def test_a_column_of_a_block_is_never_replaced(name: str, kind: str) -> None:
    ask = AnswerColumns("{{q}}", server="http://127.0.0.1:9", body_column="whole")
    columns: Any = {"q": ["a"], name: ["mine"]}
    batch = pyarrow.table(columns) if kind == "table" else columns
    with pytest.raises(ConfigError, match=f"two columns would be named '{name}'"):
        ask(batch)
