"""Executes docs/quickstart.md in an empty folder.

A block after ``<!-- file: NAME -->`` is saved under that name. A ``console`` block after
``<!-- run -->`` has commands after ``$ ``, which must succeed, and the text that they
print, in which ``...`` stands for anything. After ``<!-- run: status N -->`` the command
ends with that status. After ``<!-- run: interrupt -->`` it gets Ctrl-C when it has its
first result, and after ``<!-- run: server -->`` it runs until the section ends.

The server becomes a new process, as a reader's does. Its children and the other commands are
forks of a process that has SGLang imported, see :mod:`preloaded`. ``test_crash.py`` starts a
run as its user does.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked_children
import preloaded
import pytest
from free_ports import free_port

from sglang_batch.__main__ import main

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
BLOCK = re.compile(r"^<!-- (file|run)(?:: (.+?))? -->\n```\w+\n(.*?)^```$", re.M | re.S)
FILES = ["reviews.csv", "template.json", "client.py", "generate.py"]
RUNS = ["", "", "status 2", "interrupt", "", "", "server", "", ""]
MOST_S = 600


@dataclass
class Folder:
    """The reader's folder and terminal. Port 30000 of the page is a free one here."""

    path: Path
    port: int

    def text(self, shown: str) -> str:
        return shown.replace("30000", str(self.port))

    @property
    def environment(self) -> dict[str, str]:
        own = {"OMP_NUM_THREADS": "1", "XDG_DATA_HOME": str(self.path / "data")}
        # The server's children are its forks.
        return {**os.environ, **own, "SGLANG_BATCH_TEST_FORKS": "sglang.launch_server"}

    def start(self, command: str, output: Path) -> subprocess.Popen[Any]:
        command = self.text(command)
        argv = quick_command(command, self.path)
        if argv is None:
            tools = Path(sys.executable).parent
            argv = ["bash", "-c", f'PATH={shlex.quote(str(tools))}:"$PATH"; {command}']
        with output.open("wb") as file:
            return preloaded.Popen(
                argv,
                cwd=self.path,
                env=self.environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reader who has done what the page shows."""
    outputs = tmp_path_factory.mktemp("quickstart")
    folder = Folder(outputs / "folder", free_port())
    folder.path.mkdir()
    page = PAGE.read_text(encoding="utf-8")
    assert [how for kind, how, _ in BLOCK.findall(page) if kind == "file"] == FILES
    assert [how for kind, how, _ in BLOCK.findall(page) if kind == "run"] == RUNS
    for section in re.split(r"^## ", page, flags=re.M):
        follow(section, folder, outputs)
    return folder.path


def test_the_page_does_what_it_shows(followed: Path) -> None:
    assert {path.name for path in followed.iterdir()} >= {*FILES, "labelled.csv"}


def test_the_real_model_answers(
    followed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = followed / "model"
    assert main(["demo-model", "--real", str(folder)]) == 0
    assert capsys.readouterr().out == f"the same demo model is already in {folder}\n"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert text == "The capital of France is Paris.<|im_end|>"
    # The random model does not replace it by mistake.
    assert main(["demo-model", str(folder)]) == 2
    assert "another demo model (model SmolLM2-135M-Instruct)" in capsys.readouterr().err


def quick_command(command: str, folder: Path) -> list[str] | None:
    """The command for a fork, if it starts an engine that can be one."""
    tool, what, *argv = shlex.split(command.replace("\\\n", " "))
    if tool == "sglang-batch" and what == "serve":  # which becomes a new process
        code = "from sglang_batch.__main__ import command; command()"
        return [sys.executable, "-c", code, what, *argv]
    if tool == "sglang-batch":
        return forked_children.command("cli_main", what, *argv)
    if tool == "python":
        return forked_children.script_command(folder / what, *argv)
    return None


def follow(section: str, folder: Folder, outputs: Path) -> None:
    """Follow the steps of a section of the page."""
    output, server_output = outputs / "printed", outputs / "server"
    with ExitStack() as servers:
        for kind, how, text in BLOCK.findall(section):
            if kind == "file":
                (folder.path / how).write_text(folder.text(text))
                continue
            for command, shown in commands(text):
                if how == "server":
                    server = folder.start(command, server_output)
                    servers.enter_context(ended(server))
                    wait_until_ready(server, folder.port, server_output)
                    continue
                process = folder.start(command, output)
                with ended(process):
                    if how == "interrupt":
                        wait_for_a_result(process, folder.path, output)
                        os.killpg(process.pid, signal.SIGINT)
                    status = process.wait(MOST_S)
                printed = output.read_text(errors="replace")
                assert status == status_of(how), f"$ {command}\n{printed[-4000:]}"
                assert is_shown(printed, shown), f"$ {command}\n{printed[-4000:]}"
                if command.startswith("sglang-batch"):
                    # SGLang's, of devices that this machine lacks, are kept out.
                    assert "Warning:" not in printed, f"$ {command}\n{printed[:4000]}"


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block, which may go on after a backslash, and its output."""
    for step in re.split(r"^\$ ", text, flags=re.M)[1:]:
        found = re.match(r"((?:[^\n]*\\\n)*[^\n]*\n)(.*)", step, re.S)
        assert found
        yield found[1], found[2]


def status_of(how: str) -> int:
    if how == "interrupt":
        return 130
    return int(how.removeprefix("status ")) if how.startswith("status ") else 0


def is_shown(printed: str, shown: str) -> bool:
    """Whether these lines were printed in this order, with anything before and after."""
    wanted = re.sub(r"^(\.\.\.|\^C)\n", "...", shown, flags=re.M)
    pattern = re.escape(wanted.rstrip("\n")).replace(re.escape("..."), ".*")
    return re.search(pattern, printed, re.S) is not None


def wait_for_a_result(
    process: subprocess.Popen[bytes], folder: Path, output: Path
) -> None:
    results = folder / "labelled.csv.job" / "results.jsonl"
    while not (results.exists() and results.stat().st_size):
        assert process.poll() is None, output.read_text(errors="replace")[-4000:]
        time.sleep(0.01)


def wait_until_ready(process: subprocess.Popen[bytes], port: int, output: Path) -> None:
    while True:
        assert process.poll() is None, output.read_text(errors="replace")[-4000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10):
                return
        except OSError:  # not there yet, or too busy to answer
            time.sleep(0.1)


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Afterwards, nothing of the process's group is left."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGINT)
            process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
