"""The ids of requests in the engine, and the keys of calls."""

from __future__ import annotations

import pytest

from sglang_batch.errors import ConfigError
from sglang_batch.fleet.http_fleet import HttpPlace
from sglang_batch.lang.batch_backend import BatchBackend
from sglang_batch.lang.waves import HttpTransport
from sglang_batch.request import (
    attempt_request_id,
    authorization,
    engine_request_id,
    line_request_id,
    parse_request_id,
    part_request_id,
)
from sglang_batch.rollout.rollout_client import RolloutClient
from sglang_batch.run.client.batch_client import BatchClient


def test_a_plan_has_only_the_first_part_of_the_first_attempt() -> None:
    first = engine_request_id("batch_a", 7)
    again = attempt_request_id(first, 1)
    parts = {
        first: 0,
        part_request_id(first, 0): 0,
        part_request_id(first, 2): 2,
        again: 1,
        part_request_id(again, 0): 1,
        part_request_id(again, 2): 3,
    }
    assert {id: parse_request_id(id) for id in parts} == {
        id: ("batch_a", 7, part) for id, part in parts.items()
    }


def test_a_line_is_found_by_any_of_its_requests() -> None:
    first = engine_request_id("batch.000001", 7)
    again = attempt_request_id(first, 1)
    later = [f"{first}.prompt000002", f"{first}.call000001", part_request_id(first, 3)]
    for rid in (first, again, part_request_id(again, 2), *later):
        assert line_request_id(rid) == first


@pytest.mark.parametrize("name", ["batch_a", "batch_a-x", "batch_a-7.x", "-7.try", ""])
def test_other_ids_have_no_index(name: str) -> None:
    assert parse_request_id(name)[1] == -1


@pytest.mark.parametrize("key", ["ключ", "a\nb", "key\n", " 1", "a\0", "\t"])
def test_a_key_that_no_header_has_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="the API key has a line break") as error:
        authorization(key)
    assert key not in str(error.value)
    # Wherever one is taken.
    for take in (
        lambda: BatchClient("x", key),
        lambda: RolloutClient("x", key),
        lambda: HttpPlace("x", key),
        lambda: HttpTransport("x", key, None),
        lambda: BatchBackend("http://127.0.0.1:9", api_key=key),
    ):
        with pytest.raises(ConfigError, match="the API key has a line break"):
            take()


def test_any_other_key_is_sent_as_it_is() -> None:
    assert authorization("a b-~!") == {"Authorization": "Bearer a b-~!"}
    assert authorization(None) == authorization("") == {}
