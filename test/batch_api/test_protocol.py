"""The vocabulary, against the types of the official client."""

from __future__ import annotations

from typing import get_args

import pytest
from openai.types import Batch, FilePurpose

from sglang_batch.batch_api import protocol as api
from sglang_batch.batch_api.protocol import error_body


def test_every_status_is_one_that_clients_know() -> None:
    known = get_args(Batch.model_fields["status"].annotation)
    ours = {*api.ACTIVE_STATUSES, api.COMPLETED, api.FAILED, api.CANCELLED}
    assert ours <= set(known)
    assert not set(api.ACTIVE_STATUSES) & {api.COMPLETED, api.FAILED, api.CANCELLED}


def test_uploads_take_the_purposes_that_clients_send() -> None:
    assert sorted(api.FILE_PURPOSES) == sorted(get_args(FilePurpose))


@pytest.mark.parametrize(
    ("status_code", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "invalid_request_error"),
        (409, "invalid_request_error"),
        (500, "server_error"),
    ],
)
def test_an_error_body_is_nested_with_all_four_keys(
    status_code: int, kind: str
) -> None:
    assert error_body("No.", status_code=status_code, param="p", code="c") == {
        "error": {"message": "No.", "type": kind, "param": "p", "code": "c"}
    }
    assert error_body("No.")["error"]["param"] is None
    assert error_body("No.")["error"]["code"] is None
