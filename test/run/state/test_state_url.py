"""The state of a job at a URL: what counts of what several heads have written."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest

from sglang_batch.errors import ConfigError, StoreError
from sglang_batch.run.state.state_url import StateUrl, TakenOver


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
