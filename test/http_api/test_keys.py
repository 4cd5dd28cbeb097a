"""What keys open, and how they are added and revoked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import ids_of, make_lines
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from fastapi.testclient import TestClient
from keyed_server import KEYS, KEYS_PATH, add, call, start
from route_server import Server, error_of, fixed_keys, serving

from sglang_batch.server.access.keys import ANYBODY, Caller, Role
from sglang_batch.server.http.all_routes import make_router
from sglang_batch.server.http.authorization import AccessControl, KeyMiddleware, role_of
from sglang_batch.server.http.calls import known_routes
from sglang_batch.store.batch_store import BatchStore

# Which routes -------------------------------------------------------------------


def test_a_client_opens_no_route_that_nobody_has_decided_on() -> None:
    app = FastAPI()
    app.include_router(make_router())
    app.add_api_route("/new", lambda: None)
    roles = {route.template: role_of(route) for route in known_routes(app)}
    closed = {path for path, role in roles.items() if role > Role.CLIENT}
    assert closed == {
        "/new",
        KEYS_PATH,
        "/offline_batch/engines",
        "/offline_batch/keys/{key_id}",
        "/offline_batch/limits/{name}",
        "/offline_batch/tree",
        "/offline_batch/worker/attach",
        "/offline_batch/worker/exchange",
        "/offline_batch/worker/query",
        "/offline_batch/worker/render",
    }


@pytest.fixture
def tricked(tmp_path: Path) -> Iterator[TestClient]:
    """An application with a route of the admin, and a client's next to it."""
    app = FastAPI()

    @app.api_route("/abort_request", methods=["GET", "POST"])
    def abort() -> str:
        return "aborted"

    @app.get("/v1/models/{model:path}")
    def model(model: str) -> str:
        return model

    # Like the app of /metrics, it answers every method.
    app.mount("/mounted", PlainTextResponse("aborted"))
    app.add_middleware(KeyMiddleware)
    store = BatchStore(tmp_path)
    access = AccessControl(store, fixed_keys(KEYS), None)
    app.state.offline_batch_access = access
    with TestClient(app) as http:
        yield http
    access.close()
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        *("/abort_request", "//abort_request", "/abort_request/", "/ABORT_REQUEST"),
        *("/%61bort_request", "/abort%5frequest", "/abort_request?x=/v1/models/a"),
        *("/v1/models/../../abort_request", "/v1/models/%2e%2e/%2e%2e/abort_request"),
        *(
            "/health/../abort_request",
            "/health%2f..%2fabort_request",
            "/./abort_request",
        ),
        *("/abort_request;/health", "/abort_request%00", "/abort_request%20"),
        *("/abort_request%23/health", "/abort_request\\health"),
        *("/mounted", "/mounted/", "/mounted/x", "/mounted/../health"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "X"])
def test_no_spelling_of_a_path_opens_it(
    tricked: TestClient, method: str, path: str
) -> None:
    for headers in (
        {"authorization": "Bearer key-ann"},
        {"x-api-key": "key-ann", "x-forwarded-prefix": "/v1", "x-http-method": "GET"},
        {"authorization": "Bearer key-ann", "x-original-url": "/v1/models/a"},
        {"origin": "http://a.example", "access-control-request-method": "GET"},
        {},
    ):
        url = tricked.base_url.copy_with(raw_path=path.encode())
        answer = tricked.request(method, url, headers=headers)
        assert "aborted" not in answer.text
        if not headers:
            assert answer.status_code == 401
    admin = {"authorization": "Bearer key-root"}
    assert tricked.post("/abort_request", headers=admin).text == '"aborted"'


def test_a_preflight_needs_no_key(tricked: TestClient) -> None:
    headers = {"origin": "http://a.example", "access-control-request-method": "POST"}
    # Without SGLang's middleware for other origins, no route takes the method.
    assert tricked.options("/abort_request", headers=headers).status_code == 405
    assert tricked.options("/mounted", headers=headers).status_code == 401


def test_headers_that_choose_the_id_of_a_request_are_the_admins(
    tmp_path: Path,
) -> None:
    app = FastAPI()

    @app.get("/v1/models")
    def given(request: Request) -> list[str]:
        return [name for name in request.headers if name.startswith("x-override-")]

    app.add_middleware(KeyMiddleware)
    store = BatchStore(tmp_path)
    access = app.state.offline_batch_access = AccessControl(
        store, fixed_keys(KEYS), None
    )
    headers = {"X-Override-Rid": "batch_"}
    try:
        with TestClient(app, headers=headers) as http:
            for key, seen in (("ann", []), ("root", ["x-override-rid"])):
                answer = http.get("/v1/models", headers={"x-api-key": f"key-{key}"})
                assert answer.json() == seen
    finally:
        access.close()
        store.close()


def test_before_the_keys_are_known_every_call_is_refused() -> None:
    app = FastAPI()
    app.add_api_route("/x", lambda: 1)
    app.add_middleware(KeyMiddleware)
    assert TestClient(app).get("/x").status_code == 503


def test_without_an_admin_the_way_out_is_named(tmp_path: Path) -> None:
    with serving(tmp_path, {b"key-ann": "ann"}, api_key="key-ann") as server:
        answer = server.http.get(KEYS_PATH)
        assert answer.status_code == 403
        assert "--admin-api-key" in error_of(answer)["message"]


def test_a_server_without_keys_makes_none(bare_server: Server) -> None:
    # Otherwise anybody could close it to all others.
    answer = bare_server.http.post(KEYS_PATH, json={"name": "eve", "role": "admin"})
    assert answer.status_code == 403
    assert error_of(answer)["code"] == "insufficient_permissions"


# Adding and revoking ------------------------------------------------------------


def test_a_key_is_shown_once_and_kept_as_its_digest(keyed: Server) -> None:
    made = add(keyed, "bob")
    assert made["value"].startswith("sk-batch-") and len(made["value"]) > 40
    assert call(keyed, made["value"], "GET", "/v1/files").status_code == 200
    shown = keyed.http.get(KEYS_PATH)
    [listed] = shown.json()["data"]
    assert listed == {key: made[key] for key in made if key != "value"}
    files = (keyed.service.store.directory).rglob("batches.sqlite3*")
    for place in (shown.content, *(path.read_bytes() for path in files)):
        assert made["value"].encode() not in place


def test_a_revoked_key_opens_nothing_at_once(keyed: Server) -> None:
    made = add(keyed, "bob")
    revoked = keyed.http.delete(f"{KEYS_PATH}/{made['id']}").json()
    assert revoked["revoked"] and revoked["cancelled_batches"] == []
    assert call(keyed, made["value"], "GET", "/v1/files").status_code == 401
    assert keyed.http.get(KEYS_PATH).json()["data"][0]["revoked_at"]
    # Again, and one that never was.
    assert keyed.http.delete(f"{KEYS_PATH}/{made['id']}").status_code == 200
    assert keyed.http.delete(f"{KEYS_PATH}/key_0").status_code == 404


def test_a_key_works_in_every_process_of_the_server(
    keyed: Server, tmp_path: Path
) -> None:
    made = add(keyed, "bob")
    other = BatchStore(tmp_path)
    access = AccessControl(other, {}, ANYBODY)
    try:
        found = access.caller([made["value"].encode()])
        assert found == Caller("bob", Role.CLIENT)
        assert access.caller([]) is None
        keyed.http.delete(f"{KEYS_PATH}/{made['id']}")
        assert access.caller([made["value"].encode()]) is None
        # The last key is revoked, and nobody gets in without one.
        assert access.caller([]) is None
    finally:
        access.close()
        other.close()


def test_a_new_key_does_not_inherit_what_an_old_one_left(keyed: Server) -> None:
    made = add(keyed, "bob")
    file = keyed.client_of(made["value"]).files.create(
        file=("x", b"secret"), purpose="user_data"
    )
    keyed.http.delete(f"{KEYS_PATH}/{made['id']}")
    answer = keyed.http.post(KEYS_PATH, json={"name": "bob"})
    assert (answer.status_code, error_of(answer)["code"]) == (409, "name_taken")
    # A name of the file of keys belongs to somebody, too.
    assert keyed.http.post(KEYS_PATH, json={"name": "ann"}).status_code == 409
    again = add(keyed, "bob", same_owner=True)
    assert keyed.client_of(again["value"]).files.content(file.id).read() == b"secret"
    other = {"name": "bob", "role": "admin", "same_owner": True}
    assert keyed.http.post(KEYS_PATH, json=other).status_code == 409


def test_revoking_may_cancel_what_runs(keyed: Server) -> None:
    keyed.engine.hold(ids_of(range(2)))
    made = [add(keyed, name) for name in ("bob", "eve")]
    batches = [start(keyed.client_of(m["value"]), *make_lines(2)) for m in made]
    for one, cancels in zip(made, ("false", "true"), strict=True):
        answer = keyed.http.delete(
            f"{KEYS_PATH}/{one['id']}", params={"cancel_batches": cancels}
        )
        cancelled = answer.json()["cancelled_batches"]
        assert cancelled == ([batches[1].id] if cancels == "true" else [])
    keyed.call(keyed.engine.release)
    ends = [keyed.ended(batch).status for batch in batches]
    assert ends == ["completed", "cancelled"]


# The admin ----------------------------------------------------------------------


@pytest.mark.slow
def test_the_admin_sees_everything_and_whose_it_is(keyed: Server) -> None:
    batch = keyed.ended(start(keyed.client_of("key-ann")))
    for path in (
        f"/v1/batches/{batch.id}",
        f"/v1/files/{batch.input_file_id}",
        f"/v1/files/{batch.output_file_id}",
    ):
        assert keyed.http.get(path).json()["owner"] == "ann"
        assert "owner" not in call(keyed, "key-ann", "GET", path).json()
    assert keyed.client.files.content(batch.output_file_id).read()
    [shown] = keyed.http.get("/v1/batches").json()["data"]
    assert shown["owner"] == "ann"
    [shown] = keyed.http.get("/batches/data").json()["batches"]
    assert (shown["owner"], shown["input_filename"]) == ("ann", "in.jsonl")
    assert keyed.client.files.delete(batch.output_file_id).deleted
    keyed.engine.hold(["a"])  # the line of `start`
    running = start(keyed.client_of("key-ann"))
    assert keyed.client.batches.cancel(running.id).status == "cancelling"
