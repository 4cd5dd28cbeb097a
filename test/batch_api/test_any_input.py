"""No input crashes validation, or fills the memory."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from builders import CHAT, MODEL, make_body, make_file, make_line
from example_counts import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jsonl_files import RULES

from sglang_batch.batch_api.jsonl import BatchFile, validate
from sglang_batch.batch_api.lines import LineRules, invalid_line, unrun_line


def assert_answered(path: Path) -> None:
    """A file or errors, never an exception, and accepted lines can be answered."""
    for rules in (RULES, LineRules(require_model=False)):
        result = validate(path, rules)
        if isinstance(result, BatchFile):
            with result.closing():
                for request in (result[i] for i in range(len(result))):
                    line = json.loads(unrun_line(request, "batch_1", "code", "message"))
                    assert line["custom_id"] == request.custom_id
        else:
            assert result.listed
            # As they are stored and sent.
            listed = [str(error) for error in result.listed]
            json.dumps(listed, ensure_ascii=False).encode()
        kept = validate(path, rules, skip_invalid=True)
        assert isinstance(kept, BatchFile)
        with kept.closing():
            for index in range(len(kept)):
                if (error := kept.invalid.get(index)) is None:
                    assert kept[index].custom_id == kept.custom_id(index)
                    continue
                custom_id, message = kept.custom_id(index), error.message
                line = invalid_line(index, custom_id, "batch_1", error.code, message)
                assert json.loads(line)["response"]["status_code"] == 400


JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=6,
)
ENVELOPES = st.fixed_dictionaries(
    {},
    optional={
        "custom_id": st.sampled_from(["a", "b"]) | JSON_VALUES,
        "method": st.just("POST") | JSON_VALUES,
        "url": st.just(CHAT) | JSON_VALUES,
        "body": JSON_VALUES
        | st.fixed_dictionaries(
            {},
            optional={
                "model": st.just(MODEL) | JSON_VALUES,
                "messages": JSON_VALUES,
                "stream": JSON_VALUES,
            },
        ),
    },
)
CHUNKS = (
    st.binary(max_size=30)
    | ENVELOPES.map(lambda value: json.dumps(value).encode())
    | ENVELOPES.map(
        lambda value: json.dumps(value, ensure_ascii=False).encode(
            "utf-8", "surrogatepass"
        )
    )
    | st.sampled_from([make_line(str(i)).encode() for i in range(3)])
)


@st.composite
def mutated_lines(draw: st.DrawFn) -> bytes:
    """A valid line with some bytes replaced."""
    line = bytearray(make_line("id").encode())
    for _ in range(draw(st.integers(0, 3))):
        line[draw(st.integers(0, len(line) - 1))] = draw(st.integers(0, 255))
    return bytes(line)


@pytest.mark.slow
@settings(
    deadline=None,
    max_examples=examples(300),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(CHUNKS | mutated_lines(), max_size=5).map(b"\n".join))
@example(b"\xff\xfe")
@example(b"\0" * 10)
@example(make_line("\ud800").encode())
@example(make_line(body=make_body(model="\ud800")).encode())
@example(make_line(url="\ud800").encode())
@example(make_line(body=make_body(x=float("nan"), y="\ud800")).encode())
def test_no_bytes_make_validation_raise(tmp_path: Path, data: bytes) -> None:
    assert_answered(make_file(tmp_path, data))


@pytest.mark.parametrize("depth", [100, 950, 980, 1000, 100_000])
@pytest.mark.parametrize("key", ["custom_id", "url", "body", "model", "x", "nan"])
def test_no_depth_of_nesting_makes_validation_raise(
    tmp_path: Path, key: str, depth: int
) -> None:
    nested = "[" * depth + "]" * depth
    line = make_line(
        body=make_body(model="MODEL", x="X", y=float("nan") if key == "nan" else 0)
    )
    line = {
        "custom_id": line.replace('"a"', nested),
        "url": line.replace(f'"{CHAT}"', nested),
        "body": line[: line.index('"body": ') + 8] + nested + "}",
        "model": line.replace('"MODEL"', nested),
    }.get(key, line.replace('"X"', nested))
    assert_answered(make_file(tmp_path, [line.replace('"MODEL"', f'"{MODEL}"')]))


@pytest.mark.slow
def test_validation_holds_positions_not_lines(tmp_path: Path) -> None:
    num_lines = 100_000
    text = "x" * 400  # 50 MB in all
    line = make_line("@@@@@@", text).encode()
    with open(tmp_path / "big.jsonl", "wb") as file:
        for i in range(num_lines):
            file.write(line.replace(b"@@@@@@", b"%06d" % i) + b"\n")
    tracemalloc.start()
    try:
        result = validate(tmp_path / "big.jsonl", RULES)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(result, BatchFile)
    with result.closing():
        assert len(result) == num_lines
        assert result[99_999].custom_id == "099999"
    assert peak < 20_000_000
