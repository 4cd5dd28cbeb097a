"""Keys of clients and admins on a real server, instead of SGLang's own check."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from batches import ADMIN, ANN
from builders import CHAT, make_lines
from fastapi import FastAPI
from servers import Server
from sglang.srt.entrypoints import http_server

from sglang_batch.config import OfflineBatchConfig
from sglang_batch.errors import ConfigError
from sglang_batch.server.access.keys import Role, add_key
from sglang_batch.server.http.all_routes import make_router
from sglang_batch.server.http.authorization import ADMIN as ADMIN_ROUTES
from sglang_batch.server.http.authorization import CLIENT, METRICS, OPEN, role_of
from sglang_batch.server.http.calls import known_routes
from sglang_batch.srt.plugin import client_keys
from sglang_batch.srt.plugin.client_keys import ServerKeys, check_client_keys
from sglang_batch.srt.plugin.offline_server_args import OfflineServerArgs
from sglang_batch.store.batch_store import BatchStore

COMPLETIONS = {"model": "demo", "prompt": "a", "max_tokens": 3, "ignore_eos": True}
# Routes of SGLang that it opens to its --api-key, and we not to clients.
USER = {
    *("/api/chat", "/api/generate", "/api/show", "/api/tags", "/classify"),
    *("/close_session", "/detokenize", "/encode", "/generate"),
    *("/get_hicache_l3_cache_layout", "/get_server_info"),
    *("/invocations", "/open_session", "/parse_function_call"),
    *("/separate_reasoning", "/server_info", "/tokenize", "/v1/decisions"),
    *("/v1/loads", "/v1/systemone", "/vertex_generate"),
}
# Calls that would hurt others: method, path and body.
HARMFUL: list[tuple[str, str, Any]] = [
    ("POST", "/abort_request", {"abort_all": True}),
    ("POST", "/pause_generation", {"mode": "in_place"}),
    ("POST", "/continue_generation", {}),
    ("GET", "/flush_cache", None),
    ("POST", "/flush_cache", None),
    ("GET", "/server_info", None),
    ("GET", "/get_server_info", None),
    ("POST", "/generate", {"text": "a"}),
    ("POST", "/update_weights_from_disk", {"model_path": "/none"}),
    ("POST", "/release_memory_occupation", {}),
    ("POST", "/set_internal_state", {"server_args": {}}),
    ("POST", "/load_lora_adapter", {"lora_name": "a", "lora_path": "/none"}),
    ("GET", "/start_profile", None),
    ("GET", "/v1/loads", None),
    ("GET", "/offline_batch/keys", None),
]


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num"),
        ({"grpc_port": 1}, "--grpc-port"),
    ],
)
def test_ways_around_the_keys_are_refused(
    tmp_path: Path, values: dict[str, Any], flag: str
) -> None:
    path = tmp_path / "keys"
    path.write_text("ann key-a")
    named = OfflineBatchConfig(api_keys=str(path))
    check_client_keys({"tokenizer_worker_num": 1, "api_key": None}, named)
    check_client_keys(values, OfflineBatchConfig())
    with pytest.raises(ConfigError, match=f"api_keys .*{flag}.*drop one"):
        check_client_keys(values, named)
    for name in ("api_key", "admin_api_key"):
        with pytest.raises(ConfigError, match=f"{flag}.*drop one"):
            check_client_keys({**values, name: "x"}, OfflineBatchConfig())


def test_a_wrong_file_of_keys_is_found_before_the_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="/none"):
        check_client_keys({}, OfflineBatchConfig(api_keys="/none"))


@pytest.mark.parametrize("option", ["api_key", "admin_api_key"])
def test_a_key_of_the_file_is_not_given_again(tmp_path: Path, option: str) -> None:
    path = tmp_path / "keys"
    path.write_text("ann key-a\nbob key-b")
    config = OfflineBatchConfig(api_keys=str(path))
    check_client_keys({option: "key-c"}, config)
    flag = f"--{option.replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"{flag} is also the key of 'bob'") as raised:
        check_client_keys({option: "key-b"}, config)
    assert "key-b" not in str(raised.value)


class Context:
    """SGLang's runtime context with two keys."""

    tokenizer_worker_num, grpc_port = 1, None

    def __init__(self, api_key: str | None, admin_api_key: str | None) -> None:
        self.api_key, self.admin_api_key = api_key, admin_api_key

    def override(self, source: str, **fields: str | None) -> None:
        vars(self).update(fields)


CLIENT_KEY, USER_KEY, ADMIN_KEY = b"key-a", b"user", b"admin"


@pytest.mark.parametrize(
    ("given", "roles"),
    [
        # Roles without a key, and with those of a client, --api-key, --admin-api-key.
        ("", (Role.ADMIN, Role.ADMIN, Role.ADMIN, Role.ADMIN)),
        ("user", (None, None, Role.ADMIN, None)),
        ("admin", (Role.USER, Role.USER, Role.USER, Role.ADMIN)),
        ("user admin", (None, None, Role.USER, Role.ADMIN)),
        ("file", (None, Role.CLIENT, None, None)),
        ("file user", (None, Role.CLIENT, Role.ADMIN, None)),
        ("file admin", (None, Role.CLIENT, None, Role.ADMIN)),
        ("file user admin", (None, Role.CLIENT, Role.USER, Role.ADMIN)),
    ],
)
def test_sglangs_own_keys_keep_their_meaning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
    roles: tuple[Role | None, ...],
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"ann {CLIENT_KEY.decode()}")
    context = Context(
        "user" if "user" in given else None, "admin" if "admin" in given else None
    )
    monkeypatch.setattr(client_keys, "get_context", lambda: context)
    monkeypatch.setattr(client_keys, "get_serving", lambda: context)
    config = OfflineBatchConfig(api_keys=str(path) if "file" in given else None)
    keys = ServerKeys(config)
    keys.replace_sglangs()
    assert (context.api_key, context.admin_api_key) == (None, None)
    keys.open_for_sglang()
    store = BatchStore(tmp_path / "store")
    access = keys.access(store)
    try:
        found = [
            access.caller(each) for each in ([], [CLIENT_KEY], [USER_KEY], [ADMIN_KEY])
        ]
        assert tuple(caller and caller.role for caller in found) == roles
        # SGLang's own calls may do everything, and see no client's objects.
        own = access.caller([str(context.api_key).encode()])
        assert own is not None and own.role is Role.ADMIN and own.sees == ""
        assert bool(context.admin_api_key) == any(
            caller is not None and caller.sees_all for caller in found
        )
    finally:
        access.close()
        store.close()


def test_a_store_with_keys_is_not_opened_to_calls_that_avoid_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BatchStore(tmp_path)
    add_key(store, "ann", "client", {}, same_owner=False)
    context = Context(None, None)
    monkeypatch.setattr(client_keys, "get_serving", lambda: context)
    try:
        access = ServerKeys(OfflineBatchConfig()).access(store)
        assert access.caller([]) is None
        access.close()
        for name, value in (("tokenizer_worker_num", 2), ("grpc_port", 1)):
            with monkeypatch.context() as patch:
                patch.setattr(Context, name, value)
                with pytest.raises(ConfigError, match="keys were made"):
                    ServerKeys(OfflineBatchConfig()).access(store)
    finally:
        store.close()


@pytest.mark.parametrize("name", ["api_key", "admin_api_key"])
def test_keys_are_not_shown_with_the_arguments(demo_model: Path, name: str) -> None:
    record = OfflineServerArgs(
        model_path=str(demo_model), offline_batch=True, **{name: "key-of-somebody"}
    )
    record._launch_command = "launch --x key-of-somebody"
    for shown in (record.resolved_dict(), record.launch_command, repr(record)):
        assert "key-of-somebody" not in str(shown)
        assert "<redacted>" in str(shown)
    assert getattr(record, name) == "key-of-somebody"


Call = Callable[..., httpx.Response]


@pytest.fixture
def call(keyed_server: Server) -> Iterator[Call]:
    with httpx.Client(base_url=keyed_server.url, timeout=60) as client:

        def call(key: str, method: str, path: str, body: Any = None) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return client.request(method, path, json=body, headers=headers)

        yield call


def error_code(answer: httpx.Response) -> Any:
    return answer.json()["error"]["code"]


def test_what_hurts_others_is_open_to_the_admin_only(
    call: Call, keyed_server: Server
) -> None:
    for method, path, body in HARMFUL:
        answer = call(ANN, method, path, body)
        assert (answer.status_code, error_code(answer)) == (
            403,
            "insufficient_permissions",
        ), path
        assert call("", method, path, body).status_code == 401, path
        assert call("other", method, path, body).status_code == 401, path
    for method, path in (("GET", "/server_info"), ("POST", "/flush_cache")):
        assert call(ADMIN, method, path).status_code == 200, path
    assert call("", "GET", "/health").status_code == 200
    shown = call(ADMIN, "GET", "/server_info").text
    for secret in (ADMIN, ANN):
        assert secret not in shown
        assert secret not in keyed_server.log


def test_the_app_of_metrics_answers_no_method_without_a_key(call: Call) -> None:
    for method in ("GET", "OPTIONS"):
        assert call("", method, "/metrics").status_code == 401
    assert call(ADMIN, "OPTIONS", "/metrics").status_code == 200


def test_a_client_chooses_no_id_that_begins_others(call: Call) -> None:
    line = f"batch_{'0' * 32}-00000000"
    for rid in ("batch_", "0", line):
        asked = COMPLETIONS | {"rid": rid}
        answer = call(ANN, "POST", "/v1/completions", asked)
        assert answer.status_code == 200
        assert len(answer.json()["id"]) == 32
    # The scheduler would take it for a line of a batch.
    assert call(ADMIN, "POST", "/v1/completions", asked).status_code == 400
    asked = COMPLETIONS | {"rid": "mine"}
    assert call(ADMIN, "POST", "/v1/completions", asked).json()["id"] == "mine"


def test_a_key_is_added_counted_limited_and_revoked_at_once(call: Call) -> None:
    new = {"name": "bob", "tokens_per_day": 5}
    made = call(ADMIN, "POST", "/offline_batch/keys", new).json()
    key = made["value"]
    # 1 prompt token or more, and 3 of the answer.
    answers = [call(key, "POST", "/v1/completions", COMPLETIONS) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    used = 0
    while used < 2:  # a call counts when its answer has been sent
        rows = call(ADMIN, "GET", "/offline_batch/usage").json()["data"]
        [used] = [row["calls"] for row in rows if row["name"] == "bob"] or [0]
    assert call(key, "POST", "/v1/completions", COMPLETIONS).status_code == 429
    [row] = call(key, "GET", "/offline_batch/usage").json()["data"]
    counted = [answer.json()["usage"]["total_tokens"] for answer in answers]
    assert row["total_tokens"] == sum(counted)
    limits = {"models": ["other"], "tokens_per_day": None}
    call(ADMIN, "POST", "/offline_batch/limits/bob", limits)
    refused = call(key, "POST", "/v1/completions", COMPLETIONS)
    assert (refused.status_code, error_code(refused)) == (403, "model_not_allowed")
    call(ADMIN, "DELETE", f"/offline_batch/keys/{made['id']}")
    assert call(key, "GET", "/v1/models").status_code == 401


def test_a_paused_engine_is_the_reason_why_a_batch_waits(call: Call) -> None:
    auth = {"authorization": f"Bearer {ANN}"}
    lines = "".join(f"{line}\n" for line in make_lines(3)).encode()
    file = httpx.post(
        str(call("", "GET", "/health").url.copy_with(path="/v1/files")),
        files={"file": ("in.jsonl", lines)},
        data={"purpose": "batch"},
        headers=auth,
    ).json()
    paused = call(ADMIN, "POST", "/pause_generation", {"mode": "in_place"})
    assert paused.status_code == 200
    try:
        new = {
            "input_file_id": file["id"],
            "endpoint": CHAT,
            "completion_window": "24h",
        }
        path = f"/v1/batches/{call(ANN, 'POST', '/v1/batches', new).json()['id']}"
        while "paused_reason" not in (shown := call(ANN, "GET", path).json()):
            assert shown["status"] in ("validating", "in_progress")
        assert "/pause_generation" in shown["paused_reason"]
        assert "owner" not in shown
        assert call(ADMIN, "GET", path).json()["owner"] == "ann"
    finally:
        call(ADMIN, "POST", "/continue_generation", {})
    while (shown := call(ANN, "GET", path).json())["status"] != "completed":
        assert shown["status"] in ("in_progress", "finalizing")
    assert "paused_reason" not in shown


def test_every_route_of_the_server_was_decided_on() -> None:
    """A route that a later SGLang adds is closed to clients, and fails this test."""
    app = FastAPI()
    for router in (http_server.app.router, make_router()):
        app.router.routes.extend(router.routes)
    found = defaultdict(set)
    for route in known_routes(app):
        found[role_of(route)].add(route.template)
    # Mounted when a server with --enable-metrics starts.
    found[Role.ADMIN] |= {METRICS}
    assert found[Role.NOBODY] == OPEN
    assert found[Role.CLIENT] == CLIENT
    assert found[Role.USER] == USER
    assert {path for method, path, _ in HARMFUL} <= found[Role.USER] | found[Role.ADMIN]
    # Those that SGLang marks as its admin's, and ours.
    assert len(found[Role.ADMIN]) > 40
    assert found[Role.ADMIN] >= ADMIN_ROUTES
