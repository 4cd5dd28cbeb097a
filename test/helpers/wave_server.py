"""A stand-in for an offline server, for tests of programs alone."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WAIT_S = 60


class WaveServer(ThreadingHTTPServer):
    """Answers waves of programs with an echo and a running number.

    Attributes:
        calls: the texts asked about, as they came, without those only prefilled.
        gate: calls whose text has the word "slow" wait for it.
        broken: hang up instead of answering.
        priorities: of the waves, as they came; None if they had none.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.calls: list[str] = []
        self.gate = threading.Event()
        self.broken = False
        self.priorities: list[int | None] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *args: Any) -> None:
        """A client that was killed."""

    def answer(self, body: dict[str, Any]) -> tuple[int, Any]:
        text = body["text"]
        if isinstance(text, list):
            return 200, [_choice(t, rank) for rank, t in enumerate(text)]
        if not body["sampling_params"]["max_new_tokens"]:
            return 200, _choice(text, 0)
        self.calls.append(text)
        if "bad" in text:
            return 400, {"error": {"message": "too bad", "param": "text"}}
        if "slow" in text:
            self.gate.wait(WAIT_S)
        number = len(self.calls)
        return 200, {"text": f" [{text[-9:]}]", "meta_info": {"number": number}}


def _choice(text: str, rank: int) -> dict[str, Any]:
    logprobs = [[None, 1, "a"], [-2.5 - rank, 2, "b"], [-1.0, 3, "c"]]
    meta = {"prompt_tokens": 3, "input_token_logprobs": logprobs}
    return {"text": "", "meta_info": {**meta, "output_token_logprobs": []}}


class _Handler(BaseHTTPRequestHandler):
    server: WaveServer

    def do_GET(self) -> None:
        known = self.path == "/get_model_info"
        self.send_response(200 if known else 405)
        self.end_headers()
        self.wfile.write(json.dumps({"model_path": "demo"}).encode() if known else b"")

    def do_POST(self) -> None:
        requests = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.priorities.append(requests.get("priority"))
        self.send_response(200)
        self.end_headers()
        waits = lambda pair: "slow" in pair[1]["text"]  # noqa: E731
        for index, body in sorted(enumerate(requests["requests"]), key=waits):
            if self.server.broken:
                return
            status, answer = self.server.answer(body)
            line = {"index": index, "status_code": status, "body": answer}
            self.wfile.write(json.dumps(line).encode() + b"\n")

    def log_message(self, *args: Any) -> None:
        pass
