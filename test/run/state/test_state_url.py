"""The state of a job at a URL: what counts of what several heads have written."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest
import zstandard

from sglang_batch.errors import ConfigError, StoreError
from sglang_batch.run import shared_state
from sglang_batch.run.shared_state import StateUrl, TakenOver


@pytest.fixture(params=["directory", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()
        return "memory://bucket/job"
    return ("file://" if request.param == "file" else "") + str(tmp_path / "job")


@pytest.fixture
def state(url: str) -> StateUrl:
    state = StateUrl(url)
    state.check()
    return state


def records(state: StateUrl) -> bytes:
    claim = state.last_claim()
    assert claim is not None
    return b"".join(state.records(state.parts(claim)))


def test_an_empty_place_has_no_claim(state: StateUrl) -> None:
    assert state.last_claim() is None
    assert state.get("job.json") is None


def test_parts_are_read_in_the_order_of_writing(state: StateUrl) -> None:
    claim = state.claim(None, ())
    for number in range(1, 40):
        state.put_part(claim, number, b"%d\n" % number)
    assert records(state) == b"".join(b"%d\n" % i for i in range(1, 40))
    state.check_in_force(claim)


def test_a_later_head_takes_over(state: StateUrl) -> None:
    first = state.claim(None, ())
    state.put_part(first, 1, b"a\n")
    second = state.claim(first, state.parts(first))
    assert second.epoch > first.epoch
    state.put_part(first, 2, b"too late\n")
    state.put_part(second, 1, b"b\n")
    assert records(state) == b"a\nb\n"
    with pytest.raises(TakenOver, match=r"another run on .* has taken over the job"):
        state.check_in_force(first)
    state.check_in_force(second)


def test_of_two_claims_at_once_one_is_in_force(state: StateUrl) -> None:
    claims = [state.claim(None, ()) for _ in range(2)]
    refused = []
    for claim in claims:
        try:
            state.check_in_force(claim)
        except TakenOver:
            refused.append(claim)
    assert len(refused) == 1


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    state = StateUrl(str(tmp_path))
    state.check()
    claim = state.claim(None, ())
    state.put_part(claim, 1, b"a\n" * 1000)
    (part,) = (tmp_path / "parts").iterdir()
    state.put_part(claim, 2, b"b\n")
    os.truncate(part, part.stat().st_size - 5)
    with pytest.raises(StoreError, match=f"{part.name} is damaged .*; remove it"):
        records(state)
    part.unlink()
    assert records(state) == b"b\n"
    # As do the heads that come after it.
    assert b"".join(state.records(state.parts(state.claim(claim, (part.name,))))) == b""


def test_removed_parts_are_gone(state: StateUrl) -> None:
    claim = state.claim(None, ())
    state.put_part(claim, 1, b"a\n")
    state.remove_parts()
    assert state.parts(claim) == ()
    state.remove_parts()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://example.org/job", "files cannot be listed over HTTP"),
        ("nosuch://bucket/job", "nosuch://bucket/job cannot be used"),
        ("/proc/nothing/here", "/proc/nothing/here cannot be used: FileNotFoundError"),
    ],
)
def test_a_url_that_cannot_be_written_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        StateUrl(url).check()


ODD = ("job[1]", "job[12]", "job*", "job?", "job#1", "job%20x", "a b", "[", "{a,b}")


def written(url: str) -> StateUrl:
    """A state with two parts, the second of a later head."""
    state = StateUrl(url)
    state.check()
    first = state.claim(None, ())
    state.put_part(first, 1, b"one\n")
    second = state.claim(first, state.parts(first))
    state.put_part(second, 1, b"two\n")
    return state


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_names_are_no_patterns(scheme: str, name: str, tmp_path: Path) -> None:
    fsspec.filesystem("memory").store.clear()
    base = scheme + ("/base" if scheme == "memory://" else str(tmp_path))
    # Directories that the name would match, were it a pattern.
    others = [written(f"{base}/{other}") for other in ("job1", "job2", "jobs", "a")]
    state = written(f"{base}/{name}")
    assert records(StateUrl(f"{base}/{name}")) == b"one\ntwo\n"
    state.remove_parts()
    assert records(state) == b""
    assert [records(other) for other in others] == [b"one\ntwo\n"] * 4


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize(
    "scheme", ["s3", "gs", "nosuch", "http", "hf", "memory", "ftp"]
)
def test_an_odd_url_is_named_or_works(scheme: str, name: str) -> None:
    fsspec.filesystem("memory").store.clear()
    for url in (f"{scheme}://{name}", f"{scheme}://{name}/job", f"{scheme}://[::1/x"):
        try:
            state = StateUrl(url)
        except ConfigError as error:
            assert url.partition("?")[0].partition("#")[0] in str(error)
        else:
            assert str(state)


_BOMB = """
import sys, zstandard
from sglang_batch.errors import StoreError
from sglang_batch.run.shared_state import StateUrl
state = StateUrl(sys.argv[1])
open("/proc/self/clear_refs", "w").write("5")
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
before = peak()
try:
    for piece in state.records(state.parts(state.last_claim())):
        pass
except StoreError as error:
    print(error)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("gib", [1, 0.4])
@pytest.mark.parametrize("sized", [True, False])
def test_a_part_that_expands_is_named_or_streamed(
    tmp_path: Path, gib: float, sized: bool
) -> None:
    state = StateUrl(str(tmp_path / "job"))
    state.check()
    head = state.claim(None, ()).head
    bomb = zstandard.ZstdCompressor(level=9, write_content_size=sized)
    name = f"{head}-000001.jsonl.zst"
    (tmp_path / "job/parts" / name).write_bytes(bomb.compress(bytes(int(gib * 2**30))))
    found = subprocess.run(
        [sys.executable, "-c", _BOMB, str(tmp_path / "job")],
        capture_output=True,
        text=True,
        check=True,
    )
    *error, grown = found.stdout.splitlines()
    assert int(grown) < 100 << 10  # KiB
    assert bool(error) == (gib == 1 or not sized)
    assert all(name in line for line in error)


@pytest.mark.slow
def test_many_parts_that_are_large_take_the_memory_of_a_few(tmp_path: Path) -> None:
    """Parts that are no parts, each as large as one may be."""
    state = StateUrl(str(tmp_path / "job"))
    state.check()
    head = state.claim(None, ()).head
    for number in range(8):
        name = f"{head}-{number:06d}.jsonl.zst"
        with open(tmp_path / "job/parts" / name, "wb") as file:
            file.truncate(shared_state.MAX_PART_BYTES)
    found = subprocess.run(
        [sys.executable, "-c", _BOMB, str(tmp_path / "job")],
        capture_output=True,
        text=True,
        check=True,
    )
    error, grown = found.stdout.splitlines()
    assert f"{head}-000000" in error
    together = 8 * shared_state._READ_AT_ONCE_BYTES + shared_state.MAX_PART_BYTES
    assert int(grown) < (together + (100 << 20)) >> 10  # KiB


def test_a_claim_of_any_size_is_none(tmp_path: Path) -> None:
    state = StateUrl(str(tmp_path / "job"))
    state.check()
    claim = state.claim(None, ())
    with open(tmp_path / "job/heads/999999999999999-deadbeef.json", "wb") as file:
        file.truncate(1 << 40)
    assert state.last_claim() == claim


@pytest.mark.parametrize("cut", [1, 3, 5, 100])
def test_a_part_without_its_end_is_named(tmp_path: Path, cut: int) -> None:
    state = StateUrl(str(tmp_path / "job"))
    state.check()
    claim = state.claim(None, ())
    state.put_part(claim, 1, os.urandom(500).hex().encode() + b"\n")
    (part,) = (tmp_path / "job/parts").iterdir()
    os.truncate(part, part.stat().st_size - cut)
    with pytest.raises(StoreError, match=part.name):
        records(state)


_JUNK = {
    "999999999999999-dead.json": b"{",
    "999999999999999-deadbeef.json": b"{",
    "999999999999998-deadbeef.json": b"",
    "999999999999997-deadbeef.json": b"[" * 100_000,
    "999999999999996-deadbeef.json": b'{"epoch":1,"head":"other","host":"h"}',
    "9" * 30 + "-deadbeef.json": b"{}",
    "9 notes.txt": b"x",
}


def test_files_that_are_no_claims_end_nothing(state: StateUrl) -> None:
    claim = state.claim(None, ())
    state.put_part(claim, 1, b"one\n")
    for name, data in _JUNK.items():
        state.put(f"heads/{name}", data)
        state.put(f"parts/{name}", data)
    state.check_in_force(claim)
    assert state.last_claim() == claim and records(state) == b"one\n"
    later = state.claim(claim, state.parts(claim))
    state.check_in_force(later)
    with pytest.raises(TakenOver):
        state.check_in_force(claim)
    assert records(state) == b"one\n"


@pytest.mark.parametrize("ahead", [10**15 - 1, 10**16, 10**17])
def test_a_claim_of_a_clock_far_ahead_is_taken_over(
    state: StateUrl, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    first = state.claim(None, ())
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: ahead * 1_000_000)
        far = state.claim(first, ())
    state.put_part(far, 1, b"far\n")
    later = state.claim(far, state.parts(far))
    state.put_part(later, 1, b"later\n")
    state.check_in_force(later)
    assert state.last_claim() == later and records(state) == b"far\nlater\n"
    with pytest.raises(TakenOver):
        state.check_in_force(far)


def test_parts_are_kept_that_a_later_head_may_need(state: StateUrl) -> None:
    first = state.claim(None, ())
    state.put_part(first, 1, b"one\n")
    later = state.claim(first, state.parts(first))
    with pytest.raises(TakenOver):
        state.remove_parts(first)
    state.put_part(later, 1, b"two\n")
    assert records(state) == b"one\ntwo\n"
    state.remove_parts(later)
    assert records(state) == b""
