"""The page /batches in a browser, served without SGLang."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from batch_service import running_service, submit
from builders import CHAT, ids_of, make_lines
from chromium import Page, browser_page, find_chromium
from fake_engine import FakeEngine
from fastapi import FastAPI

from sglang_batch.fleet.fleet_worker import WorkerState
from sglang_batch.job.engine import KvUse
from sglang_batch.server import runner as runner_module
from sglang_batch.server.access.keys import (
    ANYBODY,
    Role,
    caller_of,
    change_allowance,
    digest,
)
from sglang_batch.server.access.usage import add_usage
from sglang_batch.server.http.all_routes import install
from sglang_batch.server.http.authorization import AccessControl, KeyMiddleware
from sglang_batch.server.service import BatchService

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="NOT TESTED: the page for people needs a Chromium; install one, or name it "
    "in the environment variable CHROMIUM",
)

EVIL = "<img src=x onerror='window.evil = 1'><script>window.evil = 1</script>"
ERRORS = [
    {"code": "invalid_json_line", "line": n, "message": f"{EVIL} {n}", "param": None}
    for n in (3, 7)
]
# Text whose contrast with its background is below 4.5, by WCAG's formula.
PALE_TEXT = """
(() => {
  const light = (rgb) => {
    const part = rgb.slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
  };
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = numbers(getComputedStyle(e).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    throw new Error("nothing is behind");
  };
  const pale = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some(
      (n) => n.nodeType === Node.TEXT_NODE && n.data.trim());
    if (!own || !element.getClientRects().length) continue;
    const svg = element instanceof SVGElement;
    const style = getComputedStyle(element);
    const a = light(numbers(svg ? style.fill : style.color));
    const b = light(behind(element));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) pale.push(`${element.textContent} ${contrast.toFixed(2)}`);
  }
  return pale;
})()
"""


class Served:
    """A server in a thread, with access for the test to its parts."""

    def __init__(self, url: str, app: FastAPI, engine: FakeEngine) -> None:
        self.url = url
        self.app = app
        self.engine = engine
        self.service: BatchService = app.state.offline_batch_service
        self.stop: Any = None

    def call(self, scenario: Any) -> Any:
        """Run a coroutine on the server's event loop."""
        loop: asyncio.AbstractEventLoop = self.app.state.loop
        return asyncio.run_coroutine_threadsafe(scenario, loop).result(20)


@contextmanager
def serving(directory: Path) -> Iterator[Served]:
    engine = FakeEngine()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running_service(directory, engine, policy="fcfs") as service:
            app.state.offline_batch_service = service
            access = AccessControl(service.store, {}, ANYBODY)
            app.state.offline_batch_access = access
            app.state.loop = asyncio.get_running_loop()
            yield
            access.close()

    app = FastAPI(lifespan=lifespan)
    app.add_middleware(KeyMiddleware)
    install(app)
    server = uvicorn.Server(uvicorn.Config(app, ws="none", log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()

        def stop() -> None:
            server.should_exit = True
            thread.join()

        try:
            while not server.started:
                assert thread.is_alive(), "the server did not start"
                time.sleep(0.01)
            served = Served(url, app, engine)
            served.stop = stop
            yield served
        finally:
            stop()


def add_ended(service: BatchService, batch_id: str, **fields: Any) -> None:
    service.store.insert(
        "batches",
        {
            "id": batch_id,
            "endpoint": CHAT,
            "input_file_id": "file-gone",
            "completion_window": "24h",
            "created_at": 1_700_000_000,
            "expires_at": 1_700_086_400,
            **fields,
        },
    )


def fill(served: Served) -> str:
    """Add one batch of each kind. Returns the id of the running one."""
    add_ended(
        served.service,
        "batch_completed",
        status="completed",
        in_progress_at=1_700_000_010,
        completed_at=1_700_000_110,
        total=12_345,
        completed=12_345,
        input_tokens=1_000_000,
        cached_tokens=620_000,
        output_tokens=200_000,
        optimal_cached_share=0.71,
        error_reasons=json.dumps(
            [
                {"code": "context_length_exceeded", "message": "too long", "lines": 3},
                {"code": EVIL, "message": EVIL, "lines": 1},
            ]
        ),
        output_file_id="file-output-1",
    )
    errors = json.dumps({"object": "list", "data": ERRORS})
    add_ended(
        served.service,
        "batch_failed",
        status="failed",
        failed_at=1_700_000_001,
        errors=errors,
        metadata=json.dumps({EVIL: EVIL}),
    )
    served.engine.hold(ids_of(range(1, 3)))
    batch_id = submit(served.service, make_lines(3), metadata={"note": EVIL})
    served.call(served.engine.until_stalled(1, 2))
    return batch_id


def refresh(page: Page) -> None:
    """Have the page refresh now instead of in a few seconds."""
    page.eval("document.dispatchEvent(new Event('visibilitychange'))")


def row(batch_id: str) -> str:
    return f"document.querySelector('tr[data-id={batch_id}]')"


def tab_to(page: Page, action: str) -> None:
    for _ in range(30):
        page.press("Tab")
        if page.eval("document.activeElement.dataset.action") == action:
            return
    raise AssertionError(f"30 presses of Tab do not reach {action!r}")


def check_looks(page: Page) -> None:
    for width in (1280, 390, 360):
        for scheme in ("light", "dark"):
            page.resize(width, 800, scheme)
            assert page.eval("document.documentElement.scrollWidth") == width
            assert page.eval(PALE_TEXT) == []
    page.resize(1280, 800)


def check_texts(page: Page, batch_id: str) -> None:
    completed = page.eval(f"{row('batch_completed')}.innerText")
    for text in (
        "12,345 lines",
        "100%",
        "3 \u00d7 context_length_exceeded: too long",
        EVIL,
    ):
        assert text in completed
    figures = page.eval(
        f"[...{row('batch_completed')}.querySelectorAll('.figures')]"
        ".map((e) => e.innerText.replaceAll('\\n', ' '))"
    )
    assert figures == [
        "2,000 output 10,000 prompt",
        "200,000 output 1.00M prompt 62% cached 71% at best",
    ]
    failed = page.eval(f"{row('batch_failed')}.textContent")
    assert f"Line 3: {EVIL} 3" in failed and f"Line 7: {EVIL} 7" in failed
    assert f"{EVIL}: {EVIL}" in failed
    running = page.eval(f"{row(batch_id)}.innerText")
    assert "in.jsonl" in running and "1 of 3 lines" in running
    assert page.eval("document.querySelectorAll('tbody img, tbody script').length") == 0
    assert page.eval("window.evil") is None


def check_cancel(page: Page, batch_id: str) -> None:
    """By keyboard alone, while the focus is kept."""
    page.eval("document.activeElement.blur()")
    tab_to(page, "cancel")
    refresh(page)
    page.press("Enter")
    page.until("document.getElementById('confirm').open")
    assert page.eval("document.activeElement.value") == "keep"
    assert "1 of 3 lines" in page.eval("document.getElementById('confirm').innerText")
    page.press("Escape")
    page.until("!document.getElementById('confirm').open")
    assert page.eval("document.activeElement.dataset.action") == "cancel"
    page.press("Enter")
    page.press("Tab")
    page.press("Enter")
    page.until(f"{row(batch_id)}.className.startsWith('cancel')")
    refresh(page)
    page.until(f"{row(batch_id)}.className === 'cancelled over'")
    said = page.eval("document.getElementById('announcements').textContent")
    assert said == "in.jsonl: cancelled."
    # The button is gone, but the focus is still in its row.
    assert page.eval(f"{row(batch_id)}.contains(document.activeElement)")


def check_copy(page: Page, batch_id: str) -> None:
    """The id reaches the clipboard, also where the browser has none for pages."""
    page.eval(
        "navigator.clipboard.writeText = (text) => "
        "{ window.copied = text; return Promise.resolve(); }"
    )
    page.eval("document.activeElement.blur()")
    tab_to(page, "copy")
    page.press("Enter")
    page.until("document.activeElement.textContent === 'Copied'")
    assert page.eval("window.copied") == batch_id
    page.eval("navigator.clipboard.writeText = () => Promise.reject()")
    page.eval(
        "document.addEventListener('copy', () => "
        "{ window.copied = document.activeElement.value; }, { once: true })"
    )
    page.until("document.activeElement.textContent === 'Copy'")
    page.eval("window.copied = null")
    page.press("Enter")
    page.until(f"window.copied === '{batch_id}'")
    page.until("document.activeElement.textContent === 'Copied'")


def type_search(page: Page, text: str) -> None:
    page.eval(f"document.getElementById('search').value = {json.dumps(text)}")
    page.eval("document.getElementById('search').dispatchEvent(new Event('input'))")


def check_search(page: Page) -> None:
    ids = "[...document.querySelectorAll('tbody tr')].map((e) => e.dataset.id).join()"
    type_search(page, "CONTEXT_length")
    page.until(f"{ids} === 'batch_completed'")
    type_search(page, EVIL)
    page.until(f"{ids}.includes('batch_failed')")
    type_search(page, "100%")
    page.until("!document.getElementById('none-found').hidden")
    said = page.eval("document.getElementById('none-found').textContent")
    assert said == "No batch that matches “100%” was found."
    type_search(page, "")
    page.until("document.querySelectorAll('tbody tr').length === 3")


def choose_file(page: Page, lines: list[str], name: str = "new.jsonl") -> None:
    content = json.dumps("".join(f"{line}\n" for line in lines))
    page.eval(
        "(() => { const chosen = new DataTransfer();"
        f" chosen.items.add(new File([{content}], {json.dumps(name)}));"
        " document.getElementById('file').files = chosen.files;"
        " document.getElementById('file').dispatchEvent(new Event('change')); })()"
    )


def check_submit(page: Page, served: Served) -> None:
    """A mistake is shown in the dialog, and corrected without another upload."""
    page.eval("document.getElementById('new-batch').click()")
    lines = [line.replace(CHAT, "/v1/completions") for line in make_lines(2)]
    choose_file(page, lines, name="new.txt")
    start = "document.getElementById('submit-start').click()"
    said = "document.getElementById('submit-error').textContent"
    page.eval(start)
    page.until(f"{said}.includes('Must be .jsonl')")
    name = "<img src=x onerror='window.evil = 1'>.jsonl"
    choose_file(page, lines, name)
    page.until("document.getElementById('endpoint').value === '/v1/completions'")
    page.eval("document.getElementById('window').value = 'soon'")
    page.eval(start)
    page.until(f"{said}.includes('soon')")
    page.eval("document.getElementById('window').value = '2h'")
    page.eval("document.getElementById('priority').value = '7'")
    page.eval(start)
    page.until("!document.getElementById('submit').open")
    page.until("document.querySelectorAll('tbody tr').length === 4")
    page.until("document.activeElement.dataset.id?.startsWith('batch_')")
    (newest,) = served.service.store.list_batches(after=None, limit=1)
    assert page.eval("document.activeElement.dataset.id") == newest["id"]
    assert (newest["endpoint"], newest["priority"]) == ("/v1/completions", 7)
    assert newest["completion_window"] == "2h"
    files = served.service.store.list_files(
        after=None, limit=9, descending=True, purpose="batch"
    )
    assert [file["filename"] for file in files].count(name) == 1
    assert name in page.eval("document.activeElement.innerText")
    assert page.eval("window.evil") is None


def check_large_numbers(page: Page, served: Served, batch_id: str) -> None:
    """Rows keep their height, and no number is on two lines, at 200,000 lines."""
    heights = []
    store = served.service.store
    for done in (1, 9_999, 199_999):
        fields = {"total": 200_000, "completed": done, "output_tokens": 1_000 * done}
        store.update_batch(batch_id, **fields, input_tokens=3_000 * done)
        refresh(page)
        page.until(f"{row(batch_id)}.innerText.includes('{done:,} of 200,000 lines')")
        heights.append(page.eval(f"{row(batch_id)}.offsetHeight"))
        for part in (".counts", ".figures b", ".bar span"):
            tall = (
                f"[...{row(batch_id)}.querySelectorAll('{part}')].filter((e) =>"
                " e.getClientRects().length !== 1 || e.offsetHeight > 24"
                " || e.scrollWidth > e.clientWidth + 1).length"
            )
            assert page.eval(tall) == 0, (done, part)
    assert len(set(heights)) == 1, heights


def check_filter(page: Page) -> None:
    filter = "document.getElementById('filter')"
    page.eval(f"{filter}.value = 'failed'")
    page.eval(f"{filter}.dispatchEvent(new Event('change'))")
    assert page.eval("document.querySelectorAll('tbody tr').length") == 1
    assert page.eval(f"{filter}.selectedOptions[0].text") == "Failed (1)"


def check_key(page: Page, served: Served) -> None:
    access = served.app.state.offline_batch_access
    access.fixed[digest(b"secret")] = caller_of("root", Role.ADMIN)
    access.without_key = None
    refresh(page)
    page.until("!document.getElementById('key-form').hidden")
    page.eval("document.getElementById('key').focus()")
    page.type("secret")
    page.press("Enter")
    page.until("document.getElementById('key-form').hidden")
    assert page.eval("document.getElementById('server').textContent") == "Live"
    assert page.problems and all("401" in problem for problem in page.problems)


class ListedFleet:
    """The table of a fleet's engines, of which one is lost."""

    def states(self) -> list[WorkerState]:
        return [
            WorkerState(
                "http://10.0.0.12:30000", "running", 4_096, 256, 1_234_567,
                9_876_543_210, 31_234.5, 0.871, 0, "",
            ),
            WorkerState(
                EVIL, "starting", 0, 0, 0, 0, None, 0.0, 3,
                f"no answer in 8 s ({EVIL})",
            ),
        ]  # fmt: skip


def check_engines(page: Page, served: Served) -> None:
    """An admin of a front sees the engines behind it."""
    assert page.eval("document.getElementById('engines').hidden")
    served.app.state.fleet = ListedFleet()
    refresh(page)
    page.until("!document.getElementById('engines').hidden")
    rows = "[...document.querySelectorAll('#engines tbody tr')].map((r) => r.innerText)"
    first, second = page.eval(rows)
    assert first.split() == [
        *("http://10.0.0.12:30000", "running", "4,096", "256", "1,234,567"),
        *("31,235", "9,876,543,210", "87%", "0"),
    ]
    assert f"starting again: no answer in 8 s ({EVIL})" in second
    assert "1 of 2 run" in page.eval("document.getElementById('engines').innerText")
    check_looks(page)
    del served.app.state.fleet
    refresh(page)
    page.until("document.getElementById('engines').hidden")


def check_usage(page: Page, served: Served) -> None:
    """An admin sees the usage of each key, with its limit."""
    assert page.eval("document.getElementById('usage').hidden")
    store = served.service.store
    change_allowance(store, "evals-of-the-night", {"tokens": 40_000_000})
    for name, tokens in (("evals-of-the-night", 31_000_000), ("ann", 1200)):
        add_usage(store, name, batches=3, lines=200_000, input_tokens=tokens)
    refresh(page)
    page.until("!document.getElementById('usage').hidden")
    rows = "[...document.querySelectorAll('#usage tbody tr')].map((r) => r.innerText)"
    first, second = page.eval(rows)
    assert first.split()[:3] == ["ann", "3", "200,000"]
    assert "no limit" in first
    assert "78% of 40,000,000" in second
    # Of no key: online calls, cached, output and merged tokens, engine seconds.
    heads = (
        "[...document.querySelectorAll('#usage th')].map((each) => each.textContent)"
    )
    assert page.eval(heads) == [
        *("Key", "Batches", "Lines", "Prompt tokens", "Token limit used"),
        "Tokens in 7 days",
    ]
    check_looks(page)
    is_open = "document.getElementById('usage-details').open"
    assert page.eval(is_open)
    page.resize(390, 800)
    page.eval("location.reload()")
    page.until("document.getElementById('usage')?.hidden === false")
    assert not page.eval(is_open)
    page.resize(1280, 800)


def test_the_page_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CHROMIUM is not None
    monkeypatch.setattr(runner_module, "POLL_S", 0.01)
    profile = tmp_path / "profile"
    with serving(tmp_path / "store") as served, browser_page(CHROMIUM, profile) as page:
        page.resize(1280, 800)
        page.open(f"{served.url}/batches")
        page.until("document.getElementById('no-batch')?.hidden === false")
        assert "No batch yet" in page.eval("document.body.innerText")
        check_looks(page)
        # Not every engine counts it.
        assert page.eval("document.getElementById('kv').hidden")
        batch_id = fill(served)
        refresh(page)
        page.until(f"{row(batch_id)}?.innerText.includes('1 of 3')")
        check_texts(page, batch_id)
        served.engine.kv = KvUse(
            3, left=900, right=0, online=0, shared=300, capacity=4000
        )
        page.until("!document.getElementById('kv').hidden")
        check_looks(page)
        check_copy(page, batch_id)
        check_search(page)
        check_cancel(page, batch_id)
        check_large_numbers(page, served, batch_id)
        assert page.problems == []
        check_filter(page)
        check_submit(page, served)
        assert all("400" in problem for problem in page.problems)
        page.problems.clear()
        assert page.problems == []
        check_key(page, served)
        check_usage(page, served)
        check_engines(page, served)
        served.stop()
        refresh(page)
        page.until("document.getElementById('server').className === 'lost'")
        said = page.eval("document.getElementById('server').textContent")
        assert "does not answer" in said
