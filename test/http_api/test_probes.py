"""Routes that supervisors ask how the server is, and a server that drains."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import make_body
from route_server import serving

from sglang_batch.job.engine import WAVE_PATH


def test_probes_need_no_key(tmp_path: Path) -> None:
    with serving(tmp_path, {b"key-root": "root"}) as server:
        assert server.http.get("/v1/batches").status_code == 401
        for path in ("/live", "/draining"):
            answer = server.http.get(path)
            assert answer.status_code == 200
            assert server.http.head(path).status_code == 200
        assert answer.json() == {"draining": False, "running_lines": 0}


@pytest.fixture(scope="module")
def wave() -> dict[str, object]:
    return {"lines": [{"custom_id": "a", "url": "/v1/chat/completions",
                       "method": "POST", "body": make_body()}]}  # fmt: skip


def test_a_server_that_drains_refuses_work_and_keeps_what_it_has(
    tmp_path: Path, wave: dict[str, object]
) -> None:
    with serving(tmp_path) as server:
        assert server.http.post(WAVE_PATH, json=wave).status_code == 200
        server.engine.hold(["a"])
        batch = server.start()
        server.call(server.engine.until, lambda: "a" in server.engine.running)
        runner = server.service.runner
        assert runner is not None
        server.service.is_closing = runner.closing = lambda: True
        assert server.http.get("/live").status_code == 200
        drains = {"draining": True, "running_lines": 1}
        assert server.http.get("/draining").json() == drains
        refused = server.http.post(WAVE_PATH, json=wave)
        assert refused.status_code == 503
        assert refused.headers["Retry-After"] == "5"
        assert refused.json()["error"]["code"] == "not_ready"
        # Whatever is kept for the next server is still accepted, and can be read.
        later = server.start()
        assert server.client.batches.retrieve(later.id).status == "validating"
        server.engine.release()
        server.service.is_closing = runner.closing = lambda: False
        assert server.ended(batch).status == "completed"
        assert server.ended(later).status == "completed"
