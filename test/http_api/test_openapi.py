"""Calls made from the documentation of our routes, by schemathesis.

Calls that the documentation allows succeed, others are refused, and all answers match
their schemas, see :mod:`sglang_batch.server.http.openapi`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from route_server import Server, serving
from schemathesis import Case, GenerationMode
from schemathesis.config import SchemathesisConfig

from sglang_batch.rollout.rollout_call import parse_call
from sglang_batch.server.http.all_routes import make_router
from sglang_batch.server.http.idempotency import MAX_KEY_LEN

MIN_CASES = 800
# Random calls of each operation.
VALID_CASES = 20
# Answers to rules that the documentation cannot express.
RULES = (
    "Must be .jsonl",
    ".0. Expected ",  # to JSON Schema 5.0 is an integer
    "Missing required parameter: 'expires_after.seconds'",  # with only an anchor
    "Invalid value for 'completion_window'",  # of a minute or two, not of 0 s
    "Invalid value for 'metadata'",
    "Upload upload_",  # has no such part
    "The parts have ",
    "The MD5 of ",
    "they must be unique in a batch",
    "idempotency_key of the body differ",  # from the header
    "only one of them may be given",
    "cannot be canceled",
    "has not ended",
    "Input should be a valid integer",  # to JSON Schema 5.0 is one
    "give the prompt either",
    "is above n=",
    "are above n=",
    "have more than 65536 samples",
    "sampling_params have 'n'",
    "continues after output_ids",
    "output_logprobs are not those",
    "are no parts of",
    "leave nothing of",
)
CONFIG = {
    "checks": {
        # As valid calls may fail for the rules above, they are checked here.
        "positive_data_acceptance": {"enabled": False},
        "negative_data_rejection": {
            "expected-statuses": ["400", "404", "405", "409", "413"]
        },
    }
}
SENT = ("method", "url", "headers", "params", "json", "data", "files", "cookies")


def documented_operations() -> dict[str, Any]:
    """By method and path."""
    app = FastAPI()
    app.include_router(make_router())
    schema = schemathesis.openapi.from_dict(
        app.openapi(), config=SchemathesisConfig.from_dict(CONFIG)
    )
    found = [each.ok() for each in schema.get_all_operations()]
    return {each.label: each for each in found}


OPERATIONS = documented_operations()


class Documented:
    """Makes calls, checks their answers, and counts them."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.statuses: Counter[tuple[str, int]] = Counter()

    def __call__(self, case: Case) -> httpx.Response:
        arguments = case.as_transport_kwargs(base_url="http://testserver")
        arguments = {key: arguments[key] for key in SENT if key in arguments}
        request = requests.Request(**arguments).prepare()
        assert request.method and request.url
        key = request.headers.get("idempotency-key")
        if key and len(key) <= MAX_KEY_LEN:
            # One that was not used before, or all that would say is that it was.
            request.headers["idempotency-key"] = f"{self.statuses.total():0{len(key)}}"
        answer = self.server.http.request(
            request.method, request.url, content=request.body, headers=request.headers
        )
        self.statuses[case.operation.label, answer.status_code] += 1
        case.validate_response(answer)
        return answer

    def fill_in(self, case: Case) -> None:
        """Let a call be about something that is there."""
        part_ids: list[str] = []
        if "upload_id" in case.path_parameters:
            upload_id, part_ids = self._upload()
            case.path_parameters["upload_id"] = upload_id
        make = {
            "file_id": self.server.upload,
            "batch_id": lambda: self._batch(case.method == "DELETE"),
            "message_batch_id": lambda: self._message_batch("cancel" in case.path),
            "key_id": lambda: self._key()["id"],
            "name": lambda: self._key()["name"],
            "rollout_id": self._rollout,
        }
        for name in make.keys() & case.path_parameters:
            case.path_parameters[name] = make[name]()
        known = {
            "input_file_id": self.server.upload,
            "completion_window": lambda: "24h",
            "part_ids": lambda: part_ids,
            "md5": lambda: None,
        }
        if isinstance(case.body, dict):
            for name in known.keys() & case.body:
                case.body[name] = known[name]()

    def _upload(self) -> tuple[str, list[str]]:
        uploads = self.server.client.uploads
        upload = uploads.create(
            bytes=1, filename="a", mime_type="text/plain", purpose="batch"
        )
        return upload.id, [uploads.parts.create(upload.id, data=b"x").id]

    def _batch(self, is_over: bool) -> str:
        batch = self.server.start()
        return (self.server.ended(batch) if is_over else batch).id

    def _key(self) -> dict[str, str]:
        new = {"name": f"client-{self.statuses.total()}", "same_owner": True}
        made: dict[str, str] = self.server.http.post(
            "/offline_batch/keys", json=new
        ).json()
        return made

    def _rollout(self) -> str:
        service = self.server.service
        run = service.rollout_run(parse_call({"groups": [{"text": "x"}]}), "")
        service.rollouts[run.id] = run
        return run.id

    def _message_batch(self, running: bool) -> str:
        params = {"model": "demo", "max_tokens": 1, "messages": []}
        body = {"requests": [{"custom_id": "a", "params": params}]}
        http, url = self.server.http, "/v1/messages/batches"
        made = http.post(url, json=body).json()
        while not running and made["processing_status"] != "ended":
            made = http.get(f"{url}/{made['id']}").json()
        return str(made["id"])


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Documented]:
    directory = tmp_path_factory.mktemp("documented")
    with serving(directory, {b"key": "root"}, api_key="key") as server:
        yield Documented(server)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_documented_is_done(call: Documented, name: str) -> None:
    # The time to generate a call is no property of the routes.
    @settings(
        max_examples=VALID_CASES,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(case=OPERATIONS[name].as_strategy(), is_there=st.booleans())
    def check(case: Case, is_there: bool) -> None:
        if is_there:
            call.fill_in(case)
        answer = call(case)
        if answer.status_code not in (200, 404, 409):
            assert any(rule in answer.text for rule in RULES), answer.text

    check()
    assert call.statuses[name, 200], call.statuses


@pytest.mark.parametrize("name", OPERATIONS)
def test_limits_are_as_documented(call: Documented, name: str) -> None:
    """Values on both sides of each limit, wrong types, missing values, methods."""
    operation = OPERATIONS[name]
    for case in operation.schema.iter_coverage_cases(
        operation,
        generation_modes=list(GenerationMode),
        generation_config=operation.schema.config.generation_for(operation=operation),
    ):
        assert call(case).status_code in (200, 400, 404, 405, 409, 413)


def test_enough_was_called(call: Documented) -> None:
    assert call.statuses.total() >= MIN_CASES, call.statuses
