"""Readers of length traces, on small files of each format."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_batch.errors import ConfigError, InputError
from sglang_batch.planner.requests import UNKNOWN
from sglang_batch.prediction.workloads.mix import Workload
from sglang_batch.prediction.workloads.sources import VOCAB_SIZE
from sglang_batch.prediction.workloads.traces import read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109

XXX,0,7
"""
VIDUR = """num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio
3772,54,3826,69.85
2015,156,2171,12.91
"""


def mooncake(*rows: tuple[int, int, list[int]]) -> str:
    return "".join(
        json.dumps(
            {"timestamp": 0, "input_length": p, "output_length": d, "hash_ids": ids}
        )
        + "\n"
        for p, d, ids in rows
    )


def write(tmp_path: Path, text: str, name: str = "trace.txt") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def prompt(workload: Workload, i: int) -> list[int]:
    offsets = workload.requests.offsets
    return workload.requests.tokens[offsets[i] : offsets[i + 1]].tolist()


def common(a: list[int], b: list[int]) -> int:
    differs = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differs, min(len(a), len(b)))


def test_azure_rows_in_the_order_of_the_file(tmp_path: Path) -> None:
    workload = read_trace(write(tmp_path, AZURE, "azure.csv"))
    assert workload.requests.input_len.tolist() == [374, 396, 1]
    assert workload.output_len.tolist() == [44, 109, 7]
    assert workload.requests.max_new_tokens.tolist() == [4096] * 3
    assert workload.requests.known_output_len.tolist() == [UNKNOWN] * 3
    assert workload.name == "azure"
    assert workload.requests.tokens.dtype == np.int32
    assert workload.output_len.dtype == np.int32
    assert workload.requests.tokens.min() >= 0
    assert workload.requests.tokens.max() < VOCAB_SIZE
    assert common(prompt(workload, 0), prompt(workload, 1)) == 0


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    text = "\ufeffGeneratedTokens, ContextTokens ,x\r\n5,9,1\r\n"
    workload = read_trace(write(tmp_path, text))
    assert workload.requests.input_len.tolist() == [9]
    assert workload.output_len.tolist() == [5]


def test_vidur_rows(tmp_path: Path) -> None:
    workload = read_trace(write(tmp_path, VIDUR))
    assert workload.requests.input_len.tolist() == [3772, 2015]
    assert workload.output_len.tolist() == [54, 156]


def test_equal_hash_ids_are_equal_blocks(tmp_path: Path) -> None:
    text = mooncake(
        (1300, 5, [0, 7, 9]),
        (1100, 6, [0, 7, 10]),
        (600, 7, [0, 11]),
        (512, 8, [7]),
        (1400, 9, [0, 7, 9]),
    )
    workload = read_trace(write(tmp_path, text))
    assert workload.requests.input_len.tolist() == [1300, 1100, 600, 512, 1400]
    assert workload.output_len.tolist() == [5, 6, 7, 8, 9]
    first = prompt(workload, 0)
    assert common(first, prompt(workload, 1)) == 1024
    assert common(first, prompt(workload, 2)) == 512
    assert prompt(workload, 3) == first[512:1024]
    # The last block of the shorter prompt is a part of the same block.
    assert common(first, prompt(workload, 4)) == 1300


def test_long_prompts_leave_room_for_the_output(tmp_path: Path) -> None:
    text = "ContextTokens,GeneratedTokens\n241402,300\n20,200000\n7,5000\n"
    workload = read_trace(write(tmp_path, text))
    assert workload.requests.input_len.tolist() == [131_072 - 300, 1, 7]
    assert workload.output_len.tolist() == [300, 131_071, 5000]
    assert workload.requests.max_new_tokens.tolist() == [131_072] * 3


def test_prompts_are_cut_at_a_given_length(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake((1300, 5, [0, 7, 9]), (600, 5, [0, 8])))
    whole, cut = read_trace(path), read_trace(path, max_input_len=520)
    assert cut.requests.input_len.tolist() == [520, 520]
    for i in range(2):
        assert prompt(cut, i) == prompt(whole, i)[:520]


def test_the_limit_takes_the_first_rows(tmp_path: Path) -> None:
    # The bad line behind the limit is not read.
    path = write(tmp_path, AZURE + "XXX,bad,7\n")
    workload = read_trace(path, limit=2)
    assert workload.requests.input_len.tolist() == [374, 396]


def test_tokens_depend_on_seed_and_name(tmp_path: Path) -> None:
    a, b = write(tmp_path, AZURE, "a.csv"), write(tmp_path, AZURE, "b.csv")
    first = prompt(read_trace(a, seed=1), 0)
    assert prompt(read_trace(a, seed=1), 0) == first
    assert prompt(read_trace(a, seed=2), 0) != first
    assert prompt(read_trace(b, seed=1), 0) != first


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", r"line 1: not a known trace"),
        ("\n\nprompt,answer\n1,2\n", r"line 3: not a known trace"),
        (AZURE + "XXX,12\n", r"line 6: GeneratedTokens is ''"),
        (AZURE + "XXX,12.5,3\n", r"line 6: ContextTokens is '12.5'"),
        (AZURE + "XXX,-3,3\n", r"line 6: ContextTokens is '-3'"),
        (VIDUR + "1,99999999999,2,3\n", r"line 4: num_decode_tokens is '9+'"),
        ("ContextTokens,GeneratedTokens\n", r"holds no requests"),
        (mooncake((5, 5, [1])) + "{bad\n", r"line 2: not JSON"),
        (mooncake((5, 5, [1])) + "[1]\n", r"line 2: not a JSON object"),
        (mooncake((5, 5, [1])) + "{}\n", r"line 2: input_length is None"),
        (mooncake((5, 5, [1, 2])), r"line 1: 2 hash_ids for input_length=5; 1 blocks"),
        (mooncake((5, -5, [1])), r"line 1: output_length is -5"),
        ('{"input_length": 5, "output_length": true}', r"output_length is True"),
        ('{"input_length": 5, "output_length": 5}', r"hash_ids must be a list"),
        (
            '{"input_length": 5, "output_length": 5, "hash_ids": ["a"]}',
            r"hash_ids must be a list of integers",
        ),
    ],
)
def test_a_bad_file_names_line_and_reason(
    tmp_path: Path, text: str, reason: str
) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        read_trace(write(tmp_path, text))
    assert "trace.txt" in str(caught.value)


@pytest.fixture
def usual_cells() -> Iterator[None]:
    """The csv module's own limit, which is the whole process's."""
    before = csv.field_size_limit(131_072)
    yield
    csv.field_size_limit(before)


@pytest.mark.usefixtures("usual_cells")
def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.csv cannot be read"):
        read_trace(tmp_path / "absent.csv")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"ContextTokens,GeneratedTokens\n\xff\xfe,1\n")
    with pytest.raises(InputError, match=r"binary\.csv cannot be read"):
        read_trace(binary)
    long_cell = write(tmp_path, AZURE + "x" * 200_000 + ",1,1\n", "long.csv")
    with pytest.raises(InputError, match=r"long\.csv cannot be read"):
        read_trace(long_cell)


@pytest.mark.parametrize("setting", ["limit", "max_input_len"])
def test_settings_must_be_positive(tmp_path: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting}=0"):
        read_trace(write(tmp_path, AZURE), **{setting: 0})
