"""Compares a server's files, uploads and batches with OpenAI's published spec.

    python benchmark/check_openai_spec.py openapi.yaml [--url http://127.0.0.1:30000]

The spec is https://github.com/openai/openai-openapi. Its own example requests are sent,
with ids that exist on the server, and each answer is compared with its schema in the
spec. Without ``--url`` a server with the demo model is started. The last line is one JSON
document. The exit status is 1 if there is a difference that is not in INTENDED.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from openai_spec import NULL, Json, Spec
from report import finish, print_table
from soak_server import ENDED, MODEL_NAME, chat_line, running

from sglang_batch.run.demo_model import write_demo_model

PATIENCE_S, POLL_S = 120, 0.05
FILE_ID, BATCH_ID, UPLOAD_ID = "file-abc123", "batch_abc123", "upload_abc123"
PART_IDS, SIZE = ("part_def456", "part_ghi789"), "2147483648"

# Intended differences: a pattern of "where: what", and the reason.
INTENDED = {
    r"(data\.|file\.)?(status_details|errors|model|(output|error)_file_id|"
    r"(in_progress|finalizing|completed|failed|expire[ds]|cancelling|cancelled)_at): "
    + NULL: "unset fields are null, as in the spec's own examples",
    f"(first|last)_id: {NULL}": "an empty list has none",
    r"(data\.)?usage\.input_tokens_details\.optimal_cached_share: not in the spec": (
        "ours: share of the prompt tokens that a perfect prefix cache would save"
    ),
    r"(data\.)?(priority|paused_reason): not in the spec": "ours: order of batches",
    r"(data\.|file\.)?purpose: 'evals' is not one of .*": (
        "the spec's requests have this purpose, its file object leaves it out"
    ),
}


@dataclass
class Seen:
    """The answers and differences of one call of the spec."""

    answers: int = 0
    differences: set[str] = field(default_factory=set)


class Caller:
    """Makes the calls that the spec shows, and records the differences."""

    def __init__(self, spec: Spec, url: str, scratch: Path) -> None:
        self.spec = spec
        self.http = httpx.Client(base_url=url, timeout=60)
        self.scratch = scratch
        self.seen: dict[str, Seen] = defaultdict(Seen)

    def __call__(
        self, method: str, path: str, names: dict[str, str] | None = None
    ) -> Json:
        """Make the call of an example.

        Args:
            names: replacements in the example's text, such as ids.
        """
        text = self.spec.example(method, path)
        for name, value in (names or {}).items():
            assert name in text, (name, text)
            text = text.replace(name, value)
        answer = self._curl(method, text)
        seen = self.seen[f"{method.upper()} {path}"]
        seen.answers += 1
        if answer.status_code != 200:
            seen.differences.add(f"status {answer.status_code}: {answer.text[:200]}")
            return {}
        if path == "/files/{file_id}/content":
            return {"content": answer.content}
        body: Json = answer.json()
        seen.differences.update(self.spec.differences(method, path, body))
        return body

    def _curl(self, method: str, text: str) -> httpx.Response:
        """Make the call of a ``curl`` command. Some examples leave out the method."""
        parser = argparse.ArgumentParser()
        parser.add_argument("url")
        parser.add_argument("-X", dest="method")
        parser.add_argument("-H", dest="headers", action="append", default=[])
        parser.add_argument("-F", dest="form", action="append", default=[])
        parser.add_argument("-d", dest="data")
        words = shlex.split(text.replace("\\\n", " ").partition(" > ")[0])
        call = parser.parse_args([word for word in words[1:] if word.strip()])
        headers = dict(header.split(": ", 1) for header in call.headers)
        if call.data is not None:
            headers.setdefault("Content-Type", "application/x-www-form-urlencoded")
        files = []
        for name, _, value in (each.partition("=") for each in call.form):
            if value.startswith("@"):
                content = (self.scratch / value[1:]).read_bytes()
                files.append((name, (value[1:], content)))
            else:
                files.append((name, (None, value.encode())))
        return self.http.request(
            call.method or method.upper(),
            call.url.replace("https://api.openai.com", "") or "/",
            headers=headers,
            content=call.data,
            files=files or None,
        )

    def file_of(self, name: str, lines: list[Json]) -> str:
        """Upload lines for a batch. Returns the file's id."""
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (self.scratch / name).write_text(text)
        names = {"mydata.jsonl": name, "fine-tune": "batch"}
        return str(self("post", "/files", names)["id"])

    def ended(self, batch_id: str) -> Json:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            batch = self("get", "/batches/{batch_id}", {BATCH_ID: batch_id})
            if batch["status"] in ENDED:
                return batch
            time.sleep(POLL_S)
        raise SystemExit(f"error: {batch_id} has not ended after {PATIENCE_S} s.")

    def refused(self, method: str, path: str, body: Json | None = None) -> None:
        """A call that fails with an error, whose body the spec describes, too."""
        answer = self.http.request(method, f"/v1{path}", json=body)
        seen = self.seen["errors"]
        seen.answers += 1
        seen.differences.update(self.spec.error_differences(answer.json()))


# The calls ------------------------------------------------------------------------


def call_files(call: Caller) -> None:
    call("get", "/files")
    (call.scratch / "mydata.jsonl").write_text("{}\n")
    for purpose in call.spec.purposes():
        file_id = call("post", "/files", {"fine-tune": purpose})["id"]
        call("get", "/files/{file_id}", {FILE_ID: file_id})
    call("get", "/files")
    content = call("get", "/files/{file_id}/content", {FILE_ID: file_id})
    assert content == {"content": b"{}\n"}, content
    call("delete", "/files/{file_id}", {FILE_ID: file_id})
    for method in ("GET", "DELETE"):
        call.refused(method, f"/files/{file_id}")


def call_uploads(call: Caller) -> None:
    upload = call("post", "/uploads")
    call("post", "/uploads/{upload_id}/cancel", {UPLOAD_ID: upload["id"]})
    example = call.spec.example("post", "/uploads/{upload_id}/parts")
    match = re.search('data="(.*)"', example)
    assert match, example
    upload = call("post", "/uploads", {SIZE: str(2 * len(match[1]))})
    names = {UPLOAD_ID: upload["id"]}
    for example_id in PART_IDS:
        part = call("post", "/uploads/{upload_id}/parts", {UPLOAD_ID: upload["id"]})
        names[example_id] = part.get("id", "")
    call("post", "/uploads/{upload_id}/complete", names)
    call.refused("POST", f"/uploads/{upload['id']}/cancel")
    call.refused("POST", "/uploads", {"bytes": -1})


def call_batches(call: Caller) -> None:
    lines = [chat_line(f"line-{i}", "Hello", max_tokens=4) for i in range(3)]
    wrong = chat_line("wrong", "Hello", max_tokens=-1)
    long = [chat_line(f"long-{i}", "Hi", max_tokens=500) for i in range(100)]
    inputs = {
        "good.jsonl": [*lines, wrong],
        "long.jsonl": long,
        "invalid.jsonl": [{"custom_id": "none"}],
    }
    ids = {name: call.file_of(name, lines) for name, lines in inputs.items()}
    more = {
        '"24h"': '"24h", "metadata": {"a": "b"}, "output_expires_after": '
        '{"anchor": "created_at", "seconds": 3600}'
    }
    for file_id, names in (
        (ids["good.jsonl"], {}),
        (ids["good.jsonl"], more),
        (ids["invalid.jsonl"], {}),
        ("file-none", {}),
    ):
        made = call("post", "/batches", {FILE_ID: file_id, **names})
        ended = call.ended(made["id"])
        for key in ("output_file_id", "error_file_id"):
            if ended[key] is not None:
                call("get", "/files/{file_id}", {FILE_ID: ended[key]})
                call("get", "/files/{file_id}/content", {FILE_ID: ended[key]})
    made = call("post", "/batches", {FILE_ID: ids["long.jsonl"]})
    call("post", "/batches/{batch_id}/cancel", {BATCH_ID: made["id"]})
    call.ended(made["id"])
    call("get", "/batches")
    call("get", "/batches", {"limit=2": "limit=100"})
    call("get", "/files")
    call.refused("GET", "/batches/batch_none")
    call.refused("POST", "/batches", {})


def check(spec: Spec, url: str) -> bool:
    """Make all calls and print the results. Returns whether all are as intended."""
    with tempfile.TemporaryDirectory() as scratch:
        call = Caller(spec, url, Path(scratch))
        for make in (call_files, call_uploads, call_batches):
            make(call)
    names = {f"{method.upper()} {path}" for method, path in spec.operations()}
    rows, found = [], []
    intended: dict[str, set[str]] = defaultdict(set)
    for name in sorted(names | call.seen.keys()):
        seen = call.seen[name]
        if not seen.answers:
            seen.differences.add("not called")
        wrong = []
        for difference in sorted(seen.differences):
            reasons = [
                why for p, why in INTENDED.items() if re.fullmatch(p, difference)
            ]
            if reasons:
                intended[reasons[0]].add(difference.partition(":")[0])
            else:
                wrong.append(difference)
        found += [f"{name}: {difference}" for difference in wrong]
        rows.append([name, seen.answers, "; ".join(wrong) or "ok"])
    print_table("Calls of the spec", ["call", "answers", ""], rows)
    table = [[why, ", ".join(sorted(names))] for why, names in intended.items()]
    print_table("Differs on purpose", ["why", "where"], table)
    answers = sum(seen.answers for seen in call.seen.values())
    finish({"spec": spec.version, "answers": answers, "differences": found})
    return not found


@contextmanager
def toy_server() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / MODEL_NAME
        write_demo_model(model)
        with running(model, Path(scratch) / "server") as server:
            yield server.url


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("spec", type=Path, help="openapi.yaml of the spec")
    parser.add_argument("--url", help="URL of a running server (default: start one)")
    args = parser.parse_args()
    spec = Spec(args.spec)
    if args.url is not None:
        sys.exit(not check(spec, args.url))
    with toy_server() as url:
        good = check(spec, url)
    sys.exit(not good)


if __name__ == "__main__":
    main()
