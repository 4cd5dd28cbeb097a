"""Input files: rules, several errors, duplicates, lines, and reading back."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import CHAT, MODEL, make_body, make_file, make_line, make_lines
from jsonl_files import RULES, custom_ids_of, errors_of

from sglang_batch.batch_api import jsonl
from sglang_batch.batch_api.jsonl import BatchFile, FileErrors, count_lines, validate
from sglang_batch.batch_api.lines import LineError, LineRules

# Rules --------------------------------------------------------------------------


def test_without_an_endpoint_any_known_one_will_do(tmp_path: Path) -> None:
    lines = [
        make_line("a"),
        make_line("b", url="/v1/embeddings", body={"model": MODEL, "input": "x"}),
        make_line("c", url="/v1/magic"),
    ]
    [error] = errors_of(make_file(tmp_path, lines), LineRules())
    assert (error.line, error.code) == (3, "invalid_url")


def test_any_model_will_do_where_none_is_named(tmp_path: Path) -> None:
    path = make_file(tmp_path, [make_line(body=make_body(model="gpt-9"))])
    assert custom_ids_of(path, LineRules()) == ["a"]


def test_a_model_may_be_left_out_where_none_is_required(tmp_path: Path) -> None:
    path = make_file(tmp_path, [make_line(body=make_body(without="model"))])
    assert custom_ids_of(path, replace(RULES, require_model=False)) == ["a"]


def test_an_adapter_of_a_served_model_is_served(tmp_path: Path) -> None:
    path = make_file(tmp_path, [make_line(body=make_body(model=f"{MODEL}:adapter"))])
    assert custom_ids_of(path) == ["a"]


def test_a_name_that_only_begins_like_a_served_model_is_not(tmp_path: Path) -> None:
    path = make_file(tmp_path, [make_line(body=make_body(model=f"{MODEL}-2"))])
    assert [error.code for error in errors_of(path)] == ["model_not_found"]


def test_a_further_check_sees_url_and_body_of_lines_that_are_well_formed(
    tmp_path: Path,
) -> None:
    seen = []

    def check(url: str, body: bytes) -> list[tuple[str, str | None]]:
        seen.append((url, json.loads(body)))
        return [("Too hot.", "body.temperature")] if b"temperature" in body else []

    hot = make_body(temperature=9)
    lines = [make_line("a"), make_line("b", body=hot), make_line("c", without="url")]
    errors = errors_of(make_file(tmp_path, lines), replace(RULES, check_body=check))
    assert errors[0] == LineError("invalid_request", "Too hot.", 2, "body.temperature")
    assert [error.line for error in errors] == [2, 3]
    assert seen == [(CHAT, make_body()), (CHAT, hot)]


# Several errors -----------------------------------------------------------------


def test_all_errors_are_listed_in_the_order_of_lines(tmp_path: Path) -> None:
    lines = [
        make_line("a", without="method", body=make_body(without="model")),
        make_line("b"),
        make_line("b"),
        "nonsense",
        make_line("c", method="PUT", url="/v1/magic"),
        make_line("a"),
    ]
    errors = errors_of(make_file(tmp_path, lines))
    assert [(error.line, error.code, error.param) for error in errors] == [
        (1, "missing_required_parameter", "method"),
        (1, "invalid_request", "body.model"),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "invalid_json_line", None),
        (5, "invalid_method", "method"),
        (5, "invalid_url", "url"),
        (6, "duplicate_custom_id", "custom_id"),
    ]


@pytest.mark.parametrize("max_errors", [1, 7, 100])
def test_no_more_errors_are_listed_than_asked_for(
    tmp_path: Path, max_errors: int
) -> None:
    path = make_file(tmp_path, ["bad"] * 200)
    errors = errors_of(path, replace(RULES, max_errors=max_errors))
    assert [error.line for error in errors] == list(range(1, max_errors + 1))


def test_the_cap_counts_duplicates_too(tmp_path: Path) -> None:
    path = make_file(tmp_path, [make_line("same")] * 20)
    errors = errors_of(path, replace(RULES, max_errors=5))
    assert [error.line for error in errors] == [2, 3, 4, 5, 6]


def test_the_cap_is_kept_where_one_line_has_several_errors(tmp_path: Path) -> None:
    path = make_file(tmp_path, ["{}"] * 3)
    assert len(errors_of(path, replace(RULES, max_errors=6))) == 6


def test_errors_are_counted_though_they_are_not_listed(tmp_path: Path) -> None:
    lines = ["bad"] * 150 + [make_line("same")] * 150 + [make_line("c", url="/no")] * 5
    found = validate(make_file(tmp_path, lines), RULES)
    assert isinstance(found, FileErrors)
    assert len(found.listed) == 100
    assert found.by_code == {
        "invalid_json_line": 150,
        "duplicate_custom_id": 149 + 4,
        "invalid_url": 5,
    }
    assert (found.total, found.num_bad_lines, found.num_lines) == (308, 304, 305)


@pytest.mark.parametrize("url", ["/score", "/rerank", "/v2/rerank"])
def test_other_names_of_an_endpoint_are_understood(tmp_path: Path, url: str) -> None:
    bodies = {"query": "q", "documents": ["d"], "items": ["i"]}
    path = make_file(tmp_path, [make_line(url=url, body=bodies)])
    found = validate(path, LineRules(require_model=False))
    assert isinstance(found, BatchFile), found
    with found.closing():
        assert found[0].url == f"/v1/{url.rsplit('/', 1)[-1]}"


# Duplicates ---------------------------------------------------------------------


def test_every_repetition_names_the_first_line_with_its_custom_id(
    tmp_path: Path,
) -> None:
    lines: list[str | bytes] = [*make_lines(3000)]
    lines[1234] = make_line("r7")
    lines[2999] = make_line("r7")
    lines[2000] = make_line("r1999")
    lines.insert(0, b"")  # physical line numbers, from here one higher
    errors = errors_of(make_file(tmp_path, lines))
    message = (
        "The custom_id of this request is that of line {} too; custom ids must be "
        "unique in a batch."
    )
    assert errors == [
        LineError("duplicate_custom_id", message.format(earlier), line, "custom_id")
        for line, earlier in [(1236, 9), (2002, 2001), (3001, 9)]
    ]


def test_custom_ids_that_differ_in_one_character_are_not_duplicates(
    tmp_path: Path,
) -> None:
    ids = ["a", "A", "a ", " a", "a\0", "\u00e9", "e\u0301", "line 3", "id a"]
    assert custom_ids_of(make_file(tmp_path, map(make_line, ids))) == ids


def test_a_bad_line_that_is_skipped_leaves_its_custom_id_to_a_good_one(
    tmp_path: Path,
) -> None:
    lines = [make_line("a", method="GET"), make_line("a"), make_line("a")]
    path = make_file(tmp_path, lines)
    kept = validate(path, LineRules(), skip_invalid=True)
    assert isinstance(kept, BatchFile)
    codes = {index: error.code for index, error in kept.invalid.items()}
    assert codes == {0: "invalid_method", 2: "duplicate_custom_id"}
    message = kept.invalid[2].message
    assert "line 2" in message


def test_lines_without_a_usable_custom_id_are_not_duplicates_of_each_other(
    tmp_path: Path,
) -> None:
    lines = [
        make_line(None), make_line(None), make_line(5), make_line(5),
        make_line(without="custom_id"), make_line(without="custom_id"),
        "bad", "bad",
    ]  # fmt: skip
    codes = {error.code for error in errors_of(make_file(tmp_path, lines))}
    assert "duplicate_custom_id" not in codes


# Splitting into lines -----------------------------------------------------------


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85"])
def test_only_a_newline_ends_a_line(tmp_path: Path, inside: str) -> None:
    # All of them are line ends to str.splitlines().
    line = json.dumps(json.loads(make_line("a", f"x{inside}y")), ensure_ascii=False)
    assert inside in line
    path = make_file(tmp_path, [line, make_line("b")])
    assert custom_ids_of(path) == ["a", "b"]


def test_a_bare_carriage_return_is_white_space(tmp_path: Path) -> None:
    spread = make_line("a").replace(", ", ",\r").replace(": ", ":\r")
    path = make_file(tmp_path, [spread, make_line("b") + "\r"])
    assert custom_ids_of(path) == ["a", "b"]


def test_the_last_line_needs_no_newline(tmp_path: Path) -> None:
    data = f"{make_line('a')}\n{make_line('b')}".encode()
    assert custom_ids_of(make_file(tmp_path, data)) == ["a", "b"]


def test_a_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + f"{make_line('a')}\n{make_line('b')}\n".encode()
    assert custom_ids_of(make_file(tmp_path, data)) == ["a", "b"]


def test_a_byte_order_mark_further_down_is_an_error(tmp_path: Path) -> None:
    path = make_file(tmp_path, [make_line("a"), "\ufeff" + make_line("b")])
    assert [error.line for error in errors_of(path)] == [2]


def test_blank_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    lines = ["", make_line("a"), " \t\r", "", "bad", make_line("b"), "", "bad"]
    assert [error.line for error in errors_of(make_file(tmp_path, lines))] == [5, 8]
    lines = [line for line in lines if line != "bad"]
    assert custom_ids_of(make_file(tmp_path, lines)) == ["a", "b"]


# Reading back -------------------------------------------------------------------


def test_requests_are_read_back_by_index_in_any_order(tmp_path: Path) -> None:
    lines: list[str | bytes] = [*make_lines(50), b"", b" "]
    lines.insert(20, b"\r")
    data = b"\xef\xbb\xbf" + b"".join(
        (line.encode() if isinstance(line, str) else line) + b"\n" for line in lines
    )
    result = validate(make_file(tmp_path, data), RULES)
    assert isinstance(result, BatchFile)
    with result.closing():
        assert len(result) == 50
        for i in (49, 0, 20, 19, 21, 0):
            request = result[i]
            assert (request.index, request.custom_id, request.url) == (i, f"r{i}", CHAT)
            assert json.loads(request.body) == make_body(f"prompt {i}")
        with pytest.raises(IndexError):
            result[50]


def test_the_body_is_read_back_byte_for_byte(tmp_path: Path) -> None:
    body = (
        '{ "messages":[ ],"model" :"demo","seed":123456789012345678901234567890,'
        '"x":1.00,"x":1E5,"text":"\\u00e9\u00e9\\/" }'
    )
    line = f'{{"custom_id":"a","method":"POST","url":"{CHAT}","body":{body}}}'
    result = validate(make_file(tmp_path, [line]), RULES)
    assert isinstance(result, BatchFile)
    with result.closing():
        assert result[0].body == body.encode()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_only_python_writes_reach_the_body(
    tmp_path: Path, number: str
) -> None:
    fields: dict[str, Any] = {"temperature": float(number), "seed": 10**30}
    path = make_file(tmp_path, [make_line(body=make_body(**fields))])
    result = validate(path, RULES)
    assert isinstance(result, BatchFile)
    with result.closing():
        body = result[0].body.decode()
        assert result.model() == MODEL
    assert f'"temperature": {number}' in body
    assert f'"seed": {10**30}' in body


def test_the_model_of_a_file_is_that_of_its_first_line(tmp_path: Path) -> None:
    lines = [
        make_line("a", body=make_body(model="one")),
        make_line("b", body=make_body(model="two")),
    ]
    result = validate(make_file(tmp_path, lines), LineRules())
    assert isinstance(result, BatchFile)
    with result.closing():
        assert result.model() == "one"


def test_lines_are_counted_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"ab\n\n  \ncdefghijklm\n \r \n" + b"n" * 10 + b" " * 10 + b"\n       \nx"
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    for size in (1, 2, 3, 5, 1 << 20):
        monkeypatch.setattr(jsonl, "_BLOCK_BYTES", size)
        with open(path, "rb") as file:
            assert count_lines(file) == 4


def test_a_long_line_is_counted_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with open(path, "wb") as file:
        file.truncate(64 << 20)
    tracemalloc.start()
    with open(path, "rb") as file:
        assert count_lines(file) == 1
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
