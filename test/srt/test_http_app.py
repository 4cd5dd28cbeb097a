"""Our routes on SGLang's own app, without an engine: its CORS and its HTTP metrics."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest
from batch_service import make_service
from fastapi.testclient import TestClient
from prometheus_client import REGISTRY
from sglang.srt.entrypoints import http_server
from sglang.srt.observability import http_request_metrics as metrics

from sglang_batch.server.http.all_routes import install
from sglang_batch.server.http.calls import UNKNOWN, label_by_template

EVIL = {"origin": "https://evil.example.com"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """SGLang's app with our routes, as it was before when the block ends."""
    app = http_server.app
    service = make_service(tmp_path_factory.mktemp("app"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app.router, "routes", list(app.router.routes))
        patch.setattr(app, "user_middleware", list(app.user_middleware))
        patch.setattr(app, "exception_handlers", dict(app.exception_handlers))
        patch.setattr(app, "middleware_stack", None)
        patch.setattr(metrics, "_http_request_metrics", None)
        name = "_get_fastapi_request_path"
        hooked = partial(label_by_template, getattr(metrics, name))
        patch.setattr(metrics, name, hooked)
        app.state.offline_batch_service = service
        metrics.init_http_request_metrics()
        made: Any = metrics._http_request_metrics
        try:
            install(app)
            # Not entered, so SGLang's lifespan, which needs an engine, does not run.
            yield TestClient(app, raise_server_exceptions=False)
        finally:
            for each in (made.requests_total, made.responses_total):
                REGISTRY.unregister(each)
            REGISTRY.unregister(made.requests_active)
            REGISTRY.unregister(made.routing_keys_active._gauge)
    service.store.close()


def series() -> set[str]:
    return {
        f"{sample.name}{sorted(sample.labels.items())}"
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith("sglang:http") and not sample.name.endswith("created")
    }


def call_all(client: TestClient, number: int) -> list[httpx.Response]:
    return [
        client.get(f"/v1/batches/batch_{number}"),
        client.get(f"/v1/files/file-{number}/content"),
        client.delete(f"/v1/files/file-{number}"),
        client.get(f"/v1/messages/batches/msgbatch_{number}/results"),
        client.get(f"/v1/nothing-{number}"),
        client.get(f"/nothing/{number}"),
        client.put(f"/v1/files/{number}"),
        client.request(f"BREW{number}", "/v1/files"),
        client.patch("/generate"),
    ]


def test_ids_and_unknown_paths_add_no_series(client: TestClient) -> None:
    call_all(client, 0)
    before = series()
    text = "\n".join(before)
    for label in ("/v1/batches/{batch_id}", "/v1/files/{file_id}", "/generate"):
        assert f"('endpoint', '{label}')" in text
    assert f"('endpoint', '{UNKNOWN}')" in text
    for number in range(1, 35):
        for answer in call_all(client, number):
            assert answer.status_code in (404, 405)
    assert series() == before


def test_sglangs_routes_keep_their_labels(client: TestClient) -> None:
    client.get("/v1/models/some/model")
    client.get("/v1/chat/completions")
    text = "\n".join(series())
    for path in ("/v1/chat/completions", "/v1/models/{model:path}"):
        assert f"('endpoint', '{path}')" in text


def test_pages_of_other_origins_may_call_sglangs_routes_only(
    client: TestClient,
) -> None:
    answer = client.get("/nothing", headers=EVIL)
    assert "access-control-allow-origin" in answer.headers
    for path in ("/v1/files", "/v1/batches/batch_1", "/batches/data"):
        answer = client.get(path, headers=EVIL)
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
        preflight = {"access-control-request-method": "GET", **EVIL}
        answer = client.options(path, headers=preflight)
        assert answer.status_code == 403
        same = {"origin": "http://testserver"}
        answer = client.get(path, headers=same)
        assert "access-control-allow-origin" not in answer.headers


def test_unknown_paths_and_methods_have_a_nested_error(client: TestClient) -> None:
    for answer in (
        client.get("/v1/nothing"),
        client.get("/v1/chat/completions"),
        client.patch("/v1/files"),
    ):
        assert answer.status_code in (404, 405)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert client.get("/nothing").json() == {"detail": "Not Found"}


@pytest.mark.filterwarnings("ignore:ORJSONResponse")
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_an_invalid_body_is_answered_without_a_path_of_the_machine(
    client: TestClient, path: str
) -> None:
    answer = client.post(path, json={"text": 5, "messages": 5})
    assert answer.status_code == 400
    assert "Input should be a valid list" in answer.text
    assert ".py" not in answer.text
