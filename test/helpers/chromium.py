"""A browser without a screen, driven by its DevTools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_S = 20.0
_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27}


def find_chromium() -> str | None:
    """The program in ``CHROMIUM``, or the first one installed, or None."""
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page of a browser.

    problems: the errors that the page wrote to the console, and its exceptions.
    """

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call(
            "Target.attachToTarget", targetId=target, flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def resize(self, width: int, height: int, scheme: str = "light") -> None:
        """The size in pixels, and ``light`` or ``dark``."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def eval(self, script: str) -> Any:
        """The value of a JavaScript expression. Waits for promises."""
        answer = self._call(
            "Runtime.evaluate",
            expression=script,
            returnByValue=True,
            awaitPromise=True,
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait for a JavaScript condition."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.eval(f"Boolean({condition})"):
            if time.monotonic() > deadline:
                text = self.eval("document.body.innerText")
                raise AssertionError(f"never came: {condition}\n{text}")
            time.sleep(0.02)

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press ``Tab``, ``Enter`` or ``Escape``. With modifiers 8, shift is held."""
        text = "\r" if key == "Enter" else ""
        event = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self._call(
                "Input.dispatchKeyEvent",
                type=kind,
                modifiers=modifiers,
                **event,
                **more,
            )

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        data = self._call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {
            "id": self._number,
            "method": method,
            "params": params,
        }
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        if event.get("method") == "Log.entryAdded":
            entry = params["entry"]
            if entry["level"] in ("error", "warning"):
                self.problems.append(f"{entry['text']} {entry.get('url', '')}")

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], PATIENCE_S)
            assert ready, "the browser does not answer"
            data = os.read(self._answers, 1 << 20)
            assert data, "the browser ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


@contextmanager
def browser_page(program: str, directory: Path) -> Iterator[Page]:
    """A page in a new browser, which ends with the block.

    Args:
        directory: for the browser's new profile.
    """
    # It reads its file descriptor 3 and writes 4.
    command = 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null'
    options = (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-extensions",
        "--disable-background-networking",
        "--remote-debugging-pipe",
        f"--user-data-dir={directory}",
    )
    process = subprocess.Popen(
        ["sh", "-c", command, program, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield Page(process.stdin.fileno(), process.stdout.fileno())
    finally:
        # The browser exits when its pipes are closed.
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
