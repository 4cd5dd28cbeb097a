"""Mistakes end with the documented status, in one sentence, before torch is imported."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from builders import make_file

from sglang_batch.store.files import FileLock

# Runs each list of arguments, and prints the statuses and the messages.
PROGRAM = """\
import contextlib, io, json, sys
from sglang_batch.__main__ import main
found = []
for arguments in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
    found.append((status, said.getvalue()))
heavy = sorted({"torch", "sglang", "numba"} & set(sys.modules))
print(json.dumps([found, heavy]))
"""


class Mistake(NamedTuple):
    arguments: str
    status: int
    said: str


RUN = "run -i in.jsonl -o out --model-path model"
MISTAKES = {
    "no model": Mistake("run -i in.jsonl -o out", 2, "--model-path MODEL is required"),
    "empty model": Mistake(
        "run -i in.jsonl -o out --model-path=", 2, "--model-path has an empty value"
    ),
    "no such model": Mistake(
        f"{RUN}/none/x", 2, "cannot be the name of a Hugging Face"
    ),
    "model not cached": Mistake(f"{RUN}/none", 2, "and HF_HUB_OFFLINE is set"),
    "no model's directory": Mistake(f"{RUN}/../empty", 2, "has no config.json"),
    "no such adapter": Mistake(f"{RUN} --lora-paths a=x/y", 2, "--lora-paths x/y is"),
    "no adapter": Mistake(f"{RUN} --lora-paths empty", 2, "not a LoRA adapter's"),
    "no such draft": Mistake(
        f"{RUN} --speculative-draft-model-path ./none",
        2,
        "--speculative-draft-model-path ./none: there is no",
    ),
    "no such chat template": Mistake(
        f"{RUN} --chat-template none.jinja", 2, "none.jinja: there is no such file"
    ),
    "no such template of SGLang's": Mistake(
        f"{RUN} --chat-template chatmal", 2, "nor a template of SGLang's with this name"
    ),
    "no overrides": Mistake(
        f"{RUN} --json-model-override-args {{{{", 2, "override-args is not JSON"
    ),
    "no devices": Mistake(f"{RUN} --tp 0", 2, "--tp-size 0 must be 1 or more"),
    "no tokens": Mistake(
        f"{RUN} --max-total-tokens=-5", 2, "--max-total-tokens -5 must be 1 or more"
    ),
    "no number of steps": Mistake(
        f"{RUN} --decode-log-interval 0", 2, "--decode-log-interval 0 must be 1 or more"
    ),
    "no room": Mistake(
        f"{RUN} --cpu-offload-gb=-1", 2, "--cpu-offload-gb -1 must be 0 or more"
    ),
    "more than all memory": Mistake(
        f"{RUN} --mem-fraction-static 1.5", 2, "1.5 must be 0.01 or more and at most 1"
    ),
    "no size": Mistake(f"{RUN} --context-length 8q", 2, "invalid size value: '8q'"),
    "no JSON": Mistake(f"{RUN} --mm-process-config x", 2, "--mm-process-config: inv"),
    "too long a context": Mistake(
        f"{RUN} --context-length 64k", 2, "64000 is more than the model's, 8192"
    ),
    "overrides that are none": Mistake(
        f"{RUN} --json-model-override-args 5", 2, "override-args must be a JSON object"
    ),
    "no options of a loader": Mistake(
        f"{RUN} --model-loader-extra-config x", 2, "extra-config is not JSON"
    ),
    "no log level": Mistake(f"{RUN} --log-level loud", 2, "invalid choice: 'loud'"),
    "serve: no log level": Mistake(
        "serve --model-path model --log-level loud", 2, "invalid choice: 'loud'"
    ),
    "not with a plan": Mistake(
        f"{RUN} --schedule-policy lpm", 2, "--schedule-policy lpm does not work with"
    ),
    "too many tokens": Mistake(
        "run -i long -o out --model-path model", 2, "max_tokens: 8192 and a prompt"
    ),
    "a shorter context": Mistake(
        "run -i in.jsonl -o out --model-path model --context-length 9",
        2,
        "max_tokens: 9 and a prompt exceed the model's context length of 9 tokens",
    ),
    "no adapter of that name": Mistake(
        "run -i adapted -o out --model-path model",
        2,
        "there is no LoRA adapter 'fr'; --lora-paths names none",
    ),
    "no such cache": Mistake(
        "run -i in.jsonl -o out --model-path model --answer-cache in.jsonl/cache",
        2,
        "answer_cache in.jsonl/cache is not a directory that can be written",
    ),
    "serve: no such directory": Mistake(
        "serve --model-path model --port {free} --offline-batch-dir in.jsonl/x",
        2,
        "--offline-batch-dir in.jsonl/x is not a directory that can be written",
    ),
    "no such tokenizer": Mistake(
        f"{RUN} --tokenizer-path ./none", 2, "--tokenizer-path ./none: there is no"
    ),
    "unknown option": Mistake(
        f"{RUN} --max-totl-tokens 9", 2, "Did you mean '--max-total-tokens'?"
    ),
    "option of ours": Mistake(f"{RUN} --polcy dfs", 2, "Did you mean '--policy'?"),
    "serve: option of ours": Mistake(
        "serve --model-path model --worker-key x", 2, "Did you mean '--workers-key'?"
    ),
    "transformers: option": Mistake(
        f"{RUN} --backend transformers --max-runing-requests 4",
        2,
        "Did you mean '--max-running-requests'?",
    ),
    "workers: option": Mistake(
        "serve --workers http://127.0.0.1:{free} --logg-level info",
        2,
        "Did you mean '--log-level'?",
    ),
    "stray word": Mistake(f"{RUN} more", 2, "unrecognized arguments: more"),
    "no number": Mistake(f"{RUN} --tp two", 2, "invalid int value: 'two'"),
    "no choice": Mistake(f"{RUN} --load-format zip", 2, "invalid choice: 'zip'"),
    "no input": Mistake("run -i none -o out --model-path model", 2, "does not exist"),
    "bad line": Mistake("run -i bad -o out --model-path model", 2, "line 2: "),
    "output elsewhere": Mistake(
        "run -i in.jsonl -o none/out --model-path model", 2, "directory does not exist"
    ),
    "output of another": Mistake(
        "run -i in.jsonl -o bad --model-path model",
        2,
        "was not written by this command",
    ),
    "output in use": Mistake(
        "run -i in.jsonl -o busy --model-path model", 1, "is in use by another test"
    ),
    "damaged record": Mistake(
        "run -i in.jsonl -o torn --model-path model",
        2,
        "pass --overwrite to start again",
    ),
    "changed model": Mistake(
        "run -i in.jsonl -o done --model-path empty", 2, "with another --model-path"
    ),
    "serve: port in use": Mistake(
        "serve --model-path model --port {port}", 1, "in use"
    ),
    "serve: bad port": Mistake("serve --model-path model --port 99999", 2, "99999"),
    "serve: directory in use": Mistake(
        "serve --model-path model --port {free} --offline-batch-dir busy.job",
        1,
        "in use",
    ),
    "serve: no setting": Mistake(
        'serve --model-path model --offline-batch-config {{"x":1}}', 2, "no setting 'x'"
    ),
    "no such file of options": Mistake(
        "run -i in.jsonl -o out --config none.yaml", 2, "--config none.yaml: there is"
    ),
    "serve: no worker": Mistake(
        "serve --workers http://127.0.0.1:{free} --port {other}", 2, "does not answer"
    ),
    "serve: no URL": Mistake("serve --workers 10.0.0.2", 2, "is not the URL"),
    "serve: workers and a model": Mistake(
        "serve --workers http://127.0.0.1:{free} --model-path model",
        2,
        "--model-path: the servers of --workers have their model",
    ),
    "serve: workers and a backend": Mistake(
        "serve --workers http://127.0.0.1:{free} --backend auto", 2, "leave it out"
    ),
    "serve: workers, and the port in use": Mistake(
        "serve --workers http://127.0.0.1:{free} --port {port}", 1, "in use"
    ),
    "serve: a key without workers": Mistake(
        "serve --workers-key key --model-path model", 2, "add --workers"
    ),
    "serve: no model": Mistake("serve --model-path ./none", 2, "no such directory"),
}
LINE: dict[str, Any] = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9},
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[object]]]:
    """How each of MISTAKES ended, and the heavy modules that were imported."""
    home = tmp_path_factory.mktemp("mistakes")
    make_file(home, [json.dumps(LINE)], "in.jsonl")
    make_file(home, [json.dumps(LINE), "nope"], "bad")
    for name in ("model", "empty", "busy.job", "torn.job", "done.job"):
        (home / name).mkdir()
    lines = {"long": {"max_tokens": 8192}, "adapted": {"model": "model:fr"}}
    for name, fields in lines.items():
        body = {**LINE["body"], **fields}
        make_file(home, [json.dumps({**LINE, "body": body})], name)
    config = {"max_position_embeddings": 8192, "vocab_size": 300}
    make_file(home / "model", json.dumps(config).encode(), "config.json")
    make_file(home / "torn.job", b"{", "job.json")
    record = {"input_sha256": _sha256(home / "in.jsonl"), "model": "model"}
    record |= {"num_requests": 1, "complete": True}
    make_file(home / "done.job", json.dumps(record).encode(), "job.json")
    make_file(home, b"", "done")
    lock = FileLock(home / "busy.job" / "lock")
    assert lock.acquire("another test") is None
    with socket.socket() as taken, socket.socket() as free, socket.socket() as other:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        sockets = {"port": taken, "free": free, "other": other}
        ports = {name: each.getsockname()[1] for name, each in sockets.items()}
        free.close()
        other.close()
        commands = [m.arguments.format(**ports).split() for m in MISTAKES.values()]
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(commands)],
            cwd=home,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
    lock.release()
    assert done.returncode == 0, done.stderr
    found, heavy = json.loads(done.stdout.splitlines()[-1])
    yield {**dict(zip(MISTAKES, found, strict=True)), "heavy": heavy}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_with_its_status_and_one_sentence(
    name: str, ends: dict[str, list[object]]
) -> None:
    status, said = ends[name]
    mistake = MISTAKES[name]
    assert mistake.said in str(said)
    assert status == mistake.status
    assert str(said).startswith("error: ") and "Traceback" not in str(said)
    listed = "line 1: " in str(said) or "line 2: " in str(said)  # each has its own
    assert listed or len(str(said).splitlines()) == 1


def test_nothing_heavy_is_imported_for_it(ends: dict[str, list[object]]) -> None:
    assert ends["heavy"] == []


def _sha256(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()
