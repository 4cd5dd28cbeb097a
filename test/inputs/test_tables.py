"""Parquet, Arrow, CSV, JSON lines and datasets become batch lines."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import make_file
from input_files import QUESTION, contents_of, ids_of_lines, lines_of, packed, staged

from sglang_batch.errors import ConfigError, InputError
from sglang_batch.inputs.tables import rows_of_file
from sglang_batch.inputs.template import Template

TABLE = pa.table(
    {
        "id": ["x", "y", "z"],
        "question": ["one", None, "three"],
        "n": pa.array([1, 2, None], pa.int32()),
        "at": pa.array([datetime(2024, 1, 2)] * 3, pa.timestamp("ns")),
        "tags": pa.array([{"a": 1}] * 3, pa.map_(pa.string(), pa.int64())),
        "raw": [b"1", b"2", b"3"],
    }
)


def write_table(path: Path, table: pa.Table = TABLE) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
        return path
    new = pa.ipc.new_stream if path.suffix == ".ipc" else pa.ipc.new_file
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow", "t.ipc", "parquet-unnamed"])
def test_rows_of_binary_tables_keep_their_types(tmp_path: Path, name: str) -> None:
    path = write_table(tmp_path / (name if "." in name else "t.parquet"))
    path = path.rename(tmp_path / name)
    template = Template(
        {"prompt": "{{question}}", "x": ["{{n}}", "{{at}}", "{{tags}}"]}
    )
    found = staged(
        tmp_path, path, template=template, id_column="id", endpoint="/v1/completions"
    )
    lines = lines_of(found)
    assert [line["custom_id"] for line in lines] == ["x", "y", "z"]
    assert {line["url"] for line in lines} == {"/v1/completions"}
    assert [line["body"]["prompt"] for line in lines] == ["one", None, "three"]
    assert [line["body"]["x"] for line in lines] == [
        [n, "2024-01-02T00:00:00", {"a": 1}] for n in (1, 2, None)
    ]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("t.csv", b'\xef\xbb\xbfquestion,n\n"one,\n""1""",007\n\ntwo,1e5\n'),
        ("t.tsv", b'question\tn\n"one,\n""1"""\t007\ntwo\t1e5\n'),
        ("t.jsonl", b'{"n":"007","question":"one,\\n\\"1\\""}\n\n{"question":"two","n":"1e5"}'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_rows_of_text_tables(
    tmp_path: Path, name: str, data: bytes, suffix: str
) -> None:
    path = make_file(tmp_path, packed(data, suffix), name + suffix)
    template = Template({"messages": [{"content": "{{question}} {{n}}"}]})
    found = staged(tmp_path, path, template=template)
    assert contents_of(found) == ['one,\n"1" 007', "two 1e5"]
    assert ids_of_lines(found) == ["0", "1"]


def test_row_numbers_continue_across_tables(tmp_path: Path) -> None:
    first = make_file(tmp_path, b"question\na\nb\n", "a.csv")
    second = make_file(tmp_path, b"question\nc\n", "b.csv")
    found = staged(tmp_path, first, second, template=QUESTION)
    assert ids_of_lines(found) == ["0", "1", "2"]
    assert found.line_name(2) == f"{first}, row 1"
    assert found.line_name(3) == f"{second}, row 0"


def test_only_the_first_rows_are_read(tmp_path: Path) -> None:
    path = make_file(tmp_path, b"question\na\nb,too,many\n", "a.csv")
    found = staged(tmp_path, path, tmp_path / "none", template=QUESTION, max_requests=1)
    assert contents_of(found) == ["a"]


HAS = "has no column 'question'; it has 'text'."


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("t.csv", b"text\na\n", f"t.csv {HAS}"),
        ("t.jsonl", b'{"text": 1}\n', f"t.jsonl, line 1, {HAS}"),
        ("t.csv", b"", "t.csv has no column 'question'; it has none."),
        ("t.csv", b"question,b\n1,2\n1\n", "1 values for 2 columns; put"),
        ("t.csv", b"question;b\n1,2;3\n", "write commas between columns"),
        ("t.csv", b'question\n"a', "line 2: unexpected end of data"),
        ("t.csv", b"question\n\xff", "t.csv is not UTF-8"),
        ("t.txt", b"question\n1", "are known by the end of their name, such as .arrow, .csv"),
        ("t.xlsx", b"PK\x03\x04", "or a workbook: name the files in it, or save it as CSV"),
        ("t.json", b'[{"question": 1}]', "t.json, line 1: this is not a JSON object. The file "
         "seems to be one JSON array"),
        ("t.jsonl", b'{"question": 1}\n[]\n', "t.jsonl, line 2: this is not a JSON object"),
        ("t.parquet", b"PAR1 but not really", "t.parquet cannot be read as Parquet:"),
        ("t.arrow", b"ARROW1 but not really", "t.arrow cannot be read as Arrow:"),
        ("t.arrow", b"nothing of the kind", "t.arrow cannot be read as Arrow:"),
        ("t.parquet", packed(b"PAR1", ".gz"), "must be decompressed first"),
    ],
)  # fmt: skip
def test_a_bad_table_is_named_with_the_reason(
    tmp_path: Path, name: str, data: bytes, said: str
) -> None:
    with pytest.raises(InputError) as error:
        staged(tmp_path, make_file(tmp_path, data, name), template=QUESTION)
    assert said in str(error.value)


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow"])
def test_an_unknown_column_and_bytes_are_named(tmp_path: Path, name: str) -> None:
    path = write_table(tmp_path / name)
    with pytest.raises(InputError, match="no column 'q'; it has 'id', 'question', 'n'"):
        staged(tmp_path, path, template=Template({"x": "{{q}}"}))
    with pytest.raises(InputError, match=f"{name}, row 0: column 'raw' holds bytes"):
        staged(tmp_path, path, template=Template({"x": "{{raw}}"}))
    with pytest.raises(InputError, match="row 0: column 'raw' holds bytes"):
        staged(tmp_path, path, template=QUESTION, id_column="raw")
    with pytest.raises(InputError, match="row 1: column 'question' is empty"):
        staged(tmp_path, path, template=QUESTION, id_column="question")


@pytest.mark.parametrize(
    "name", ["t.csv", "t.tsv", "t.parquet", "t.arrow", "t.ipc", "t.csv.gz"]
)
def test_a_column_that_is_there_twice_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    names = ["question", "n", "question"]
    if "sv" in name:
        mark = "\t" if name == "t.tsv" else ","
        text = f"{mark.join(names)}\n{mark.join('abc')}\n".encode()
        make_file(tmp_path, packed(text, path.suffix * (path.suffix == ".gz")), name)
    else:
        write_table(path, pa.Table.from_arrays([pa.array(["a"])] * 3, names=names))
    with pytest.raises(InputError, match="has 2 columns named 'question'"):
        staged(tmp_path, path, template=QUESTION)
    # Others do not matter.
    found = staged(
        tmp_path, path, template=Template({"messages": [{"content": "{{n}}"}]})
    )
    assert contents_of(found) == ["b" if "sv" in name else "a"]


def test_numbers_of_32_bits_have_no_digits_of_their_own(tmp_path: Path) -> None:
    values = [0.1, None, float("nan"), 1e-30, 16777216.0, 2.5]
    table = pa.table({"f": pa.array(values, pa.float32()), "d": values})
    for name in ("t.parquet", "t.arrow"):
        path = write_table(tmp_path / name, table)
        found = staged(tmp_path, path, template=Template({"x": ["{{f}}", "{{d}}"]}))
        for line in lines_of(found):
            assert line["body"]["x"][0] == line["body"]["x"][1]


def test_a_map_with_a_key_twice_is_named(tmp_path: Path) -> None:
    twice = pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))
    path = write_table(tmp_path / "t.parquet", pa.table({"question": twice}))
    with pytest.raises(InputError, match=r"t\.parquet cannot be read as Parquet"):
        staged(tmp_path, path, template=QUESTION)


def test_a_table_needs_a_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"t.parquet is a table: .* --template"):
        staged(tmp_path, write_table(tmp_path / "t.parquet"))


# Datasets -----------------------------------------------------------------------


def saved(directory: Path, *splits: str) -> Path:
    """A dataset on disk, with the named splits if there are any."""
    import datasets

    def rows(split: str) -> Any:
        return datasets.Dataset.from_dict({"question": [f"{split}{i}" for i in (1, 2)]})

    found = datasets.DatasetDict({each: rows(each) for each in splits})
    (found if splits else rows("")).save_to_disk(directory / "saved")
    return directory / "saved"


def test_saved_datasets_are_read_by_directory_and_by_name(tmp_path: Path) -> None:
    path = saved(tmp_path)
    for name in (path, f"hf-dataset:{path}"):
        found = staged(tmp_path, name, template=QUESTION)
        assert contents_of(found) == ["1", "2"]
        assert found.line_name(2) == f"{name}, row 1"
    with pytest.raises(InputError, match="has no column 'q'; it has 'question'"):
        staged(tmp_path, path, template=Template({"x": "{{q}}"}))


def test_a_split_is_chosen_by_name(tmp_path: Path) -> None:
    path = saved(tmp_path, "train", "test")
    found = staged(tmp_path, f"hf-dataset:{path}::test", template=QUESTION)
    assert contents_of(found) == ["test1", "test2"]
    for name in (path, f"hf-dataset:{path}::dev"):
        with pytest.raises(ConfigError, match="one of its splits: train, test"):
            staged(tmp_path, name, template=QUESTION)


def test_a_directory_of_files_streams_as_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    pq.write_table(TABLE.select(["question", "n"]), tmp_path / "data" / "a.parquet")
    found = staged(tmp_path, f"hf-dataset:{tmp_path / 'data'}", template=QUESTION)
    assert contents_of(found) == ["one", None, "three"]


@pytest.mark.parametrize("kind", ["parquet", "feather"])
def test_periods_of_pandas_are_text(tmp_path: Path, kind: str) -> None:
    pandas = pytest.importorskip("pandas")
    months = pandas.PeriodIndex(["2026-11", None], freq="M")
    path = tmp_path / f"t.{kind}"
    getattr(pandas.DataFrame({"month": months}), f"to_{kind}")(path)
    code = f"""
from pathlib import Path
from sglang_batch.inputs.tables import rows_of_file
print([row["month"] for row in rows_of_file("t", Path({str(path)!r}), ["month"])])"""
    # In this process pandas has made the type known to Arrow.
    found = [row["month"] for row in rows_of_file(path.name, path, ["month"])]
    assert found == ["2026-11", None]
    command = [sys.executable, "-c", code.replace('"t"', repr(path.name))]
    elsewhere = subprocess.run(command, capture_output=True, text=True, check=True)
    assert elsewhere.stdout.strip() == str(found)


@pytest.mark.parametrize("between", ";\t")
def test_other_separators_have_a_way_out(tmp_path: Path, between: str) -> None:
    table = make_file(tmp_path, f"id{between}text\n1{between}a\n".encode(), "t.csv")
    with pytest.raises(
        InputError, match=r"write commas between columns, or name it \*\.tsv"
    ):
        next(rows_of_file("t.csv", table, {"text"}))
