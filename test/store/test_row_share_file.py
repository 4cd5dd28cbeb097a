"""The file of measured row_shares: its contents, and files that cannot be used."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from sglang_batch.errors import StoreWriteError
from sglang_batch.store.measured_costs import (
    KeptRowShare,
    MeasuredStep,
    RowShareKey,
    keep_row_share,
    kept_row_share,
    kept_row_shares,
    row_share_path,
)

KEY = RowShareKey(
    device="NVIDIA H100 80GB HBM3",
    attention_backend="fa3",
    kv_heads=8,
    head_dim=128,
    dtype="bfloat16",
    page_size=1,
    tp=1,
)


def entry(key: RowShareKey = KEY, row_share: float = 5.0) -> KeptRowShare:
    return KeptRowShare(
        key=key,
        row_share=row_share,
        finding="measured",
        least=4.5,
        most=5.5,
        weights_s=5e-3,
        kv_read_s=4e-8,
        noise=0.01,
        measured_at="2026-01-01T00:00:00+00:00",
        versions={"sglang": "0.5.23"},
        points=[MeasuredStep(65_536.0, 1_024.0, 7e-3)],
    )


def test_it_is_in_the_users_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert row_share_path() == tmp_path / "sglang-batch" / "row_shares.json"
    assert kept_row_share(KEY) is None
    assert keep_row_share(entry()) == row_share_path()
    assert kept_row_share(KEY) == entry()


def test_each_key_has_its_last_measurement(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    other = msgspec.structs.replace(KEY, tp=2)
    for each in (entry(), entry(other, 7.0), entry(row_share=6.0)):
        keep_row_share(each, path)
    kept = kept_row_shares(path)
    assert [(each.key.tp, each.row_share) for each in kept] == [(2, 7.0), (1, 6.0)]
    assert kept_row_share(KEY, path) == entry(row_share=6.0)
    single = keep_row_share(entry(), tmp_path / "single.json")
    for field in RowShareKey.__struct_fields__:
        value = getattr(KEY, field)
        changed = f"{value}x" if isinstance(value, str) else value + 1
        other = msgspec.structs.replace(KEY, **{field: changed})
        assert kept_row_share(other, single) is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "truncated"),
        (b"not JSON", "malformed"),
        (b"\xff\xfe", "malformed"),
        (b"[1]", "Expected `object`"),
        (b'{"version": 2, "row_shares": "?"}', "its version is 2, not 1"),
        (b'{"version": 1, "row_shares": [{}]}', "missing required field"),
        (
            msgspec.json.encode({"version": 1, "row_shares": [entry(row_share=-1.0)]}),
            "Expected `float` >= 0",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, said: str
) -> None:
    path = tmp_path / "kept.json"
    path.write_bytes(content)
    assert kept_row_shares(path) == []
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.message
    assert said in record.message
    assert "sglang-batch calibrate" in record.message
    # A new measurement overwrites nothing.
    keep_row_share(entry(), path)
    assert kept_row_shares(path) == [entry()]
    assert path.with_name("kept.json.unusable").read_bytes() == content


def test_a_path_that_is_no_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert kept_row_shares(tmp_path) == []
    assert "cannot be used" in caplog.text
    inside = tmp_path / "file" / "kept.json"
    inside.parent.write_text("not a directory")
    with pytest.raises(StoreWriteError, match="cannot write"):
        keep_row_share(entry(), inside)
