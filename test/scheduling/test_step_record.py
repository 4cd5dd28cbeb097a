"""The log of steps: records written are read, and a broken file stops nobody."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_batch.errors import InputError
from sglang_batch.scheduling.step_record import (
    COLUMNS,
    Admission,
    StepLog,
    StepRecord,
    read_steps,
    summarize,
)

HEADER = ",".join(COLUMNS) + "\n"


def record(step: int = 1, **values: float) -> StepRecord:
    zero = StepRecord(*[0] * (len(COLUMNS) - 2), 0.0, 0.0)
    return zero._replace(step=step, **values)


def write(path: Path, *records: StepRecord) -> Path:
    log = StepLog(path)
    for each in records:
        log.append(each)
    log.flush()
    return path


def spread(path: Path, times: list[tuple[float, float]]) -> float:
    records = [
        record(i + 1, compute_s=compute, memory_s=memory)
        for i, (compute, memory) in enumerate(times)
    ]
    return summarize(read_steps(write(path, *records)))["ratio_spread"]


counts = st.integers(min_value=0, max_value=2**62)
seconds = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
records = st.builds(
    StepRecord, *[counts] * (len(COLUMNS) - 2), compute_s=seconds, memory_s=seconds
)


@given(written=st.lists(records, max_size=9), flush_every=st.integers(1, 4))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    written: list[StepRecord],
    flush_every: int,
) -> None:
    path = tmp_path_factory.mktemp("log") / "steps.csv"
    log = StepLog(path, flush_every)
    for each in written:
        log.append(each)
    log.flush()
    if not written:
        assert not path.exists()
        return
    steps = read_steps(path)
    assert tuple(steps) == COLUMNS
    kinds = {name: values.dtype for name, values in steps.items()}
    assert kinds.pop("compute_s") == kinds.pop("memory_s") == np.float64
    assert set(kinds.values()) == {np.dtype(np.int64)}
    assert list(zip(*[v.tolist() for v in steps.values()], strict=True)) == written


def test_records_reach_the_file_every_so_many_and_when_flushed(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    log = StepLog(path, flush_every=3)
    log.append(record(1))
    log.append(record(2))
    assert not path.exists()
    log.append(record(3))
    log.append(record(4))
    assert read_steps(path)["step"].tolist() == [1, 2, 3]
    log.flush()
    assert read_steps(path)["step"].tolist() == [1, 2, 3, 4]
    log.append(record(5))
    log.flush()
    assert read_steps(path)["step"].tolist() == [1, 2, 3, 4, 5]


def test_an_old_log_is_continued_behind_its_last_whole_line(tmp_path: Path) -> None:
    path = write(tmp_path / "steps.csv", record(1), record(2))
    with path.open("a") as file:
        file.write("3,0,0,12")
    assert read_steps(path)["step"].tolist() == [1, 2]
    write(path, record(1, waiting=9))
    steps = read_steps(path)
    assert steps["step"].tolist() == [1, 2, 1]
    assert steps["waiting"].tolist() == [0, 0, 9]
    assert path.read_text().count("step,") == 1


def old_log(path: Path, *records: StepRecord) -> Path:
    """A log of the last release, which called the column of offloaded requests parked,
    and had none of prefetched ones, of waits and of admissions."""
    write(path, *records)
    lines = path.read_text().replace("offloaded", "parked").splitlines()
    missing = COLUMNS.index("prefetched")
    rows = [line.split(",") for line in lines]
    kept = [",".join(row[:missing] + row[missing + 3 :]) for row in rows]
    path.write_text("\n".join(kept) + "\n")
    return path


def test_a_log_with_the_earlier_column_name_is_read_with_a_warning(
    tmp_path: Path,
) -> None:
    path = old_log(tmp_path / "steps.csv", record(1, offloaded=3), record(2))
    with pytest.warns(
        FutureWarning, match=r"steps\.csv: the column parked .*offloaded"
    ):
        steps = read_steps(path)
    assert tuple(steps) == COLUMNS
    assert steps["offloaded"].tolist() == [3, 0]


def test_a_log_of_the_last_release_is_not_continued(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = old_log(tmp_path / "steps.csv", record(1, offloaded=3))
    write(path, record(2, offloaded=4))
    assert "name another file" in caplog.text
    with pytest.warns(FutureWarning):
        assert read_steps(path)["offloaded"].tolist() == [3]


@pytest.mark.parametrize("where", ["no/steps.csv", ".", "/dev/full", "nul\0.csv"])
def test_a_file_that_cannot_be_written_is_given_up_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    log = StepLog(tmp_path / where, flush_every=2)
    with caplog.at_level(logging.WARNING):
        for step in range(9):
            log.append(record(step))
        log.flush()
    assert len(caplog.records) == 1
    assert "No more steps are logged to" in caplog.text


def test_a_file_of_another_kind_is_left_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"custom_id": "a"}\n')
    with caplog.at_level(logging.WARNING):
        write(path, record(1))
    assert path.read_text() == '{"custom_id": "a"}\n'
    assert "is not a log of steps" in caplog.text


def test_a_full_disk_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "steps.csv", record(1))
    from sglang_batch.scheduling import step_record

    pwrite = step_record.os.pwrite
    monkeypatch.setattr(
        step_record.os, "pwrite", lambda fd, data, end: pwrite(fd, data[:7], end)
    )
    with caplog.at_level(logging.WARNING):
        write(path, record(2), record(3))
    assert "is the disk full?" in caplog.text
    assert path.read_bytes().endswith(b"\n")
    assert read_steps(path)["step"].tolist() == [1]


GOOD = ",".join(["1"] * len(COLUMNS)) + "\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1: this is not a log of steps"),
        ("step,prefill\n1,2\n", "line 1: this is not a log of steps"),
        (HEADER + GOOD + "1,2\n", "line 3: 2 values instead of 24"),
        (HEADER + "\n" + GOOD, "line 2: 1 values instead of 24"),
        (HEADER + GOOD.replace("1", "one", 1), "line 2: invalid literal"),
        (HEADER + GOOD + GOOD.replace("1", "1.5", 1), "line 3: invalid literal"),
        (HEADER + GOOD[:-2] + "fast\n", "line 2: could not convert"),
        (HEADER + GOOD.replace("1", "9" * 20, 1), "line 2: "),
        (HEADER + GOOD + GOOD[:-2] + "nan\n", "line 3: memory_s=nan must be"),
        (HEADER + GOOD.replace("1", "-1", 1), "line 2: step=-1 must be"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        read_steps(path)
    assert f"{path}, {said}" in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_steps(tmp_path / "none.csv")
    binary = tmp_path / "binary"
    binary.write_bytes(bytes(range(256)) * 999)
    with pytest.raises(InputError, match="line 1"):
        read_steps(binary)


def test_the_summary_adds_up(tmp_path: Path) -> None:
    first = StepRecord(1, *range(2, 23), compute_s=0.5, memory_s=0.25)
    first = first._replace(admission=Admission.NO_KV)
    second = record(2, kv_shared=500, offloaded=1, compute_s=0.5)
    found = summarize(read_steps(write(tmp_path / "steps.csv", first, second)))
    assert found["num_steps"] == 2
    assert found["prefill_tokens"] == 2 + 3 + 4
    assert found["decode_tokens"] == 5 + 6 + 7
    assert found["max_kv_tokens"] == 500
    assert (found["cached_tokens"], found["evicted_tokens"]) == (13, 14)
    assert (found["offloaded"], found["resumed"], found["retracted"]) == (16, 16, 20)
    assert (found["compute_s"], found["memory_s"]) == (1.0, 0.25)
    assert found["admissions"] == {"no_kv": 1, "joined": 1}
    assert found["ratio_spread"] == 0  # only the first has both times


def test_the_ratio_spread_is_a_weighted_interquartile_range(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    assert math.isnan(spread(path, [(1.0, 0.0), (0.0, 1.0)]))
    path.unlink()
    assert spread(path, [(2.0, 1.0), (4.0, 2.0), (0.2, 0.1), (0.0, 5.0)]) == 0
    path.unlink()
    # Ratios 1, 2, 4, 8 with the weights 2, 3, 10, 9: the quarters end at 6 and 18.
    times = [(8.0, 1.0), (1.0, 1.0), (8.0, 2.0), (2.0, 1.0)]
    assert spread(path, times) == pytest.approx(math.log(8 / 4))
    path.unlink()
    # The same ratios with equal weights: the quarters end with 1 and with 4.
    equal = [(8 / 9, 1 / 9), (1 / 2, 1 / 2), (4 / 5, 1 / 5), (2 / 3, 1 / 3)]
    assert spread(path, [*equal, *equal, (1e-9, 1.0)]) == pytest.approx(math.log(4))


def test_a_log_without_a_step_can_be_summed_up(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(HEADER)
    found = summarize(read_steps(path))
    assert found["num_steps"] == found["max_kv_tokens"] == 0
    assert math.isnan(found["ratio_spread"])
