"""Whatever is called, with whatever: an answer or a nested error, never a 5xx."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from builders import CHAT, make_line
from example_counts import examples
from fastapi.routing import APIRoute
from hypothesis import given, settings
from hypothesis import strategies as st
from route_server import Server, serving

from sglang_batch.server.http.all_routes import ROUTERS

MIN_CASES = 1500
MAX_EXAMPLES = 200
# (method, path) of all our routes: a new one is called here without being named.
CALLS = sorted(
    (method, route.path)
    for router in ROUTERS
    for route in router.routes
    if isinstance(route, APIRoute)
    for method in route.methods or ()
)
ZEROS = "0" * 32
IDS = [
    *("x", "file-none", "batch_none", "upload_none", "part_none", "-1", "null"),
    *("..", ".", "%2e%2e", "%2e%2e%2f%2e%2e", "..%2Fbatches.sqlite3", ".tmp", "~", "*"),
    *("a%00b", "%00", "%ff%fe", "%F0%9F", "%20", "%0d%0aX-A:b", "%E2%80%A8", "a%09"),
    *(quote("\u00e9"), quote("\U0001f600"), quote("' OR 1=1;--"), "%", "%zz", "+"),
    *(f"file-output-{ZEROS}", f"file-error-{ZEROS}", f"batch_{ZEROS}"),
    f"msgbatch_{ZEROS}",
    "a" * 5000,
    quote("\u4e2d" * 1000),
]
JSON = "application/json"
FORM = "multipart/form-data; boundary=b"
DISPOSITION = b'--b\r\nContent-Disposition: form-data; name="%s"; filename="%s"\r\n\r\n'
FILE = DISPOSITION % (b"file", b"\xff\0..")
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nevals\r\n'
BODIES: list[tuple[str, bytes]] = [
    *(
        (JSON, text)
        for text in (b"", b"{}", b"[]", b"null", b'"x"', b"{", b"\xff", b"0")
    ),
    *((JSON, text) for text in (b'{"a":"\\ud800"}', b"[" * 5000, b"\xef\xbb\xbf{}")),
    (JSON, b'{"part_ids": ["\\u0000", "' + b"x" * 3000 + b'"], "md5": []}'),
    (JSON, b'{"bytes": 1e400, "filename": "\\u0000", "purpose": "batch"}'),
    (JSON, b'{"requests": [{"custom_id": null, "params": {}}, 7]}'),
    (JSON, b'{"requests": []}'),
    ("text/plain", b"{}"),
    ("application/x-www-form-urlencoded", b"purpose=batch&file=%ff&file=2&=&%"),
    ("application/x-www-form-urlencoded", b"a=1&" * 2000),
    ("multipart/form-data", b"x"),
    ("multipart/form-data; boundary=", b"----"),
    ("multipart/form-data; boundary=" + "b" * 300, b"--b"),
    (FORM, b""),
    (FORM, b"--b--\r\n"),
    (FORM, b"garbage\r\n--b\r\n"),
    (FORM, b"--b\r\n\r\nx\r\n--b--\r\n"),
    (FORM, b"--b\r\nno colon\r\n\r\nx\r\n--b--\r\n"),
    (FORM, b"--b\r\nX: " + b"y" * 10_000 + b"\r\n\r\nx\r\n--b--\r\n"),
    (FORM, FILE + b"x\r\n--b--\r\n"),
    (FORM, PURPOSE + FILE + b"x\r\n--b--\r\n"),
    (FORM, PURPOSE + FILE + b"x"),
    (FORM, DISPOSITION % (b"data", b"") + b"\r\n--b--\r\n"),
]
VALUES = ["", "0", "-1", "1", "1e3", "9" * 400, "%00", "%ff", "..", "true", "%D9%A1"]
PARAMS = ["limit", "after", "order", "purpose", "after_line", "after_id", "before_id"]
QUERIES = [f"{name}={value}" for name in PARAMS for value in VALUES]
QUERIES += ["limit=1&limit=x", "&&&=", "after", "limit=1&after=batch_none&order=asc"]
HEADERS: list[dict[str, Any]] = [
    {"idempotency-key": ""},
    {"idempotency-key": b"\xff\x00"},
    {"idempotency-key": "k" * 300},
    {"x-stainless-retry-count": "\u0661".encode()},
    {"x-stainless-retry-count": "-"},
    {"range": "bytes=-1,5-2,x"},
    {"content-length": "7"},
    {"authorization": b"\xff"},
    {"accept": "\t"},
]


class Caller:
    """Calls a server, checks its answers, and counts them."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.statuses: Counter[int] = Counter()
        upload = server.client.uploads.create(
            bytes=1, filename="x", mime_type="x", purpose="evals"
        )
        batch_id = server.start().id
        # By the name in a route's path. The first calls delete or end these objects,
        # but their ids are still used.
        self.ids = {
            "file_id": server.upload(),
            "batch_id": batch_id,
            "upload_id": upload.id,
            "key_id": server.http.post(
                "/offline_batch/keys", json={"name": "a"}
            ).json()["id"],
            "name": "a",
            "rollout_id": "rollout_0",
            "message_batch_id": batch_id.replace("batch_", "msgbatch_"),
        }

    def __call__(
        self,
        method: str,
        path: str,
        *,
        query: str = "",
        body: tuple[str, bytes] | None = None,
        headers: dict[str, Any] | None = None,
    ) -> None:
        kind, content = body or (JSON, b"")
        raw_path = f"{path}?{query}".encode()
        answer = self.server.http.request(
            method,
            self.server.http.base_url.copy_with(raw_path=raw_path),
            content=content,
            headers={"content-type": kind, **(headers or {})},
        )
        self.statuses[answer.status_code] += 1
        assert answer.status_code < 500, (method, path[:200], query, body, answer.text)
        if answer.status_code >= 400:
            check_error(answer, path)


def check_error(answer: httpx.Response, path: str) -> None:
    body = answer.json()
    if body == {"detail": "Not Found"}:
        # No path of ours: SGLang's application answers that.
        assert (answer.status_code, path.startswith("/v1/")) == (404, False)
    elif path.startswith("/v1/messages"):
        assert (body["type"], set(body["error"])) == ("error", {"type", "message"})
    else:
        assert set(body) == {"error"}, body
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["type"] == "invalid_request_error"
        assert isinstance(body["error"]["message"], str)


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    with serving(
        tmp_path_factory.mktemp("any"), {b"key": "root"}, api_key="key"
    ) as server:
        yield Caller(server)


def paths(template: str, ids: Iterable[str]) -> list[str]:
    """A route's path with each of the ids, if it has one."""
    if "{" not in template:
        return [template]
    before, _, rest = template.partition("{")
    return [before + each + rest.partition("}")[2] for each in ids]


def path_of(template: str, call: Caller) -> str:
    """A route's path with the id of something that is, or was, there."""
    return template.format(**call.ids)


@pytest.mark.slow
def test_odd_ids(call: Caller) -> None:
    for method, template in CALLS:
        for path in paths(template, [*IDS, *call.ids.values()]):
            call(method, path)


@pytest.mark.slow
def test_odd_bodies(call: Caller) -> None:
    for (method, template), body in itertools.product(CALLS, BODIES):
        if method != "GET":
            call(method, path_of(template, call), body=body)


@pytest.mark.slow
def test_odd_queries_and_headers(call: Caller) -> None:
    for i, (method, template) in enumerate(CALLS):
        path = path_of(template, call)
        for query in QUERIES[i % 2 :: 2] if method == "GET" else QUERIES[::9]:
            call(method, path, query=query)
        for headers in HEADERS:
            call(method, path, headers=headers, body=(JSON, b"{}"))


KEYS = [
    "input_file_id",
    "endpoint",
    "completion_window",
    "metadata",
    "priority",
    "output_expires_after",
    "bytes",
    "filename",
    "mime_type",
    "purpose",
    "expires_after",
    "part_ids",
    "md5",
    "requests",
    "name",
    "role",
    "models",
    "tokens_per_day",
    "same_owner",
    "groups",
    "n",
    "share",
    "sampling_params",
]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.sampled_from(
        [CHAT, "24h", "9" * 9 + "d", "batch", "created_at", "file-1", "\0"]
    ),
)
OBJECTS = st.dictionaries(
    st.sampled_from(["anchor", "seconds", "custom_id", "params", "k"]), LEAVES
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        key: st.one_of(
            LEAVES, OBJECTS, st.lists(st.one_of(LEAVES, OBJECTS), max_size=2)
        )
        for key in KEYS
    },
)
POSTS = [template for method, template in CALLS if method == "POST"]


@settings(max_examples=examples(MAX_EXAMPLES), deadline=None)
@given(template=st.sampled_from(POSTS), valid=st.booleans(), fields=FIELDS)
def test_any_fields(
    call: Caller, template: str, valid: bool, fields: dict[str, Any]
) -> None:
    base = {
        "input_file_id": "file-none",
        "endpoint": CHAT,
        "completion_window": "24h",
        "bytes": 1,
        "filename": "x",
        "mime_type": "x",
        "purpose": "evals",
    }
    # Half of them differ from a valid body in one field, so that each is looked at.
    some = dict(list(fields.items())[:1]) if valid else fields
    text = json.dumps({**(base if valid else {}), **some}).encode(errors="replace")
    call("POST", path_of(template, call), body=(JSON, text))


@settings(max_examples=examples(100), deadline=None)
@given(content=st.binary(max_size=300), number=st.integers(0, 2))
def test_any_form(call: Caller, content: bytes, number: int) -> None:
    bodies = [content, PURPOSE + content, PURPOSE + FILE + content + b"\r\n--b--\r\n"]
    call("POST", "/v1/files", body=(FORM, bodies[number]))


@pytest.mark.slow  # as those that make most of the calls
def test_the_server_is_alive_after_all_of_it(call: Caller) -> None:
    server = call.server
    assert server.ended(server.start(make_line("z"))).status == "completed"
    assert list(server.service.store.incoming.iterdir()) == []
    statuses = call.statuses
    assert {200, 400, 404} <= set(statuses)
    assert statuses.total() >= MIN_CASES, f"{statuses.total()} cases: {statuses}"
