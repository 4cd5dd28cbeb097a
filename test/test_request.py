"""The ids of requests in the engine."""

from __future__ import annotations

import pytest

from sglang_batch.request import (
    attempt_request_id,
    engine_request_id,
    line_request_id,
    parse_request_id,
    part_request_id,
)


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
