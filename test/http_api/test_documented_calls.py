"""Executes the examples of docs/batch_api.md (with refused_calls.md) and docs/python.md.

A block after ``<!-- run -->`` is executed. Python blocks share their names, as on the
page. A ``console`` block has commands after ``$ `` and their answers, in which ``...``
matches anything. ``<!-- run: KEY=VALUE -->`` uses a separate server with that setting,
and ``<!-- run: keys -->`` one whose clients have keys. During a Python block after
``<!-- run: while lines run -->`` no line finishes.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import re
import shlex
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from batch_service import make_service
from prometheus_client import CollectorRegistry
from route_server import Server, serving
from wave_server import WaveServer

from sglang_batch.__main__ import main
from sglang_batch.batch_api.protocol import ENDPOINTS
from sglang_batch.config import OfflineBatchConfig
from sglang_batch.run import run_options
from sglang_batch.run.client import client_options
from sglang_batch.server.metrics import BatchMetrics

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "batch_api.md"
REFUSED = Path(__file__).parent / "refused_calls.md"
KEYS = {b"sk-search-1": "search"}
URL = "http://testserver"
CUSTOM_IDS = [f"question-{number}" for number in range(3)]
# Variables in the page's commands, and the Python names of the objects.
VARIABLES = {
    "FILE": "file",
    "OTHER": "other",
    "BATCH": "batch",
    "DONE": "done",
    "UPLOAD": "upload",
    "MESSAGE_BATCH": "message_batch",
}
_BLOCK = re.compile(
    r"^(?:<!-- run(?:: ([^\n>]+))? -->\n)?```(\w*)\n(.*?)^```$", re.M | re.S
)
_STATUS = re.compile(r"HTTP (\d{3})$")
_HEADER = re.compile(r"([\w-]+): (.*)$")


@dataclass(frozen=True)
class Example:
    """One executed block, which begins at ``line`` of the page."""

    line: int
    language: str
    code: str
    setting: str | None


def examples_of(page: Path) -> Iterator[Example]:
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        if found[0].startswith("<!--"):
            line = text.count("\n", 0, found.start(3)) + 1
            yield Example(line, found[2], found[3], found[1])


class AnthropicTransport(httpx2.BaseTransport):
    """Carries Anthropic's client's requests to an application in this process."""

    def __init__(self, server: Server) -> None:
        self._http = server.http

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        answer = self._http.request(
            request.method,
            str(request.url),
            content=request.read(),
            headers=list(request.headers.multi_items()),
        )
        headers = list(answer.headers.multi_items())
        return httpx2.Response(
            answer.status_code, headers=headers, content=answer.content
        )


def redirect_clients(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    """Have both official clients call this server, whatever URL they are given."""
    real_anthropic, sleep = anthropic.Anthropic, time.sleep

    def open_ai(*, api_key: str, **_options: Any) -> openai.OpenAI:
        return server.client_of(api_key)

    def anthropic_client(*, api_key: str, base_url: str) -> anthropic.Anthropic:
        transport = AnthropicTransport(server)
        return real_anthropic(
            api_key=api_key,
            base_url=URL,
            http_client=httpx2.Client(transport=transport),
        )

    monkeypatch.setattr(openai, "OpenAI", open_ai)
    monkeypatch.setattr(anthropic, "Anthropic", anthropic_client)
    monkeypatch.setattr(time, "sleep", lambda _seconds: sleep(0.002))


def test_every_example_of_the_page_does_what_it_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with serving(tmp_path / "server") as server:
        redirect_clients(monkeypatch, server)
        for page, example in [(p, e) for p in (PAGE, REFUSED) for e in examples_of(p)]:
            where = f"{page.name}:{example.line}"
            if example.language == "python":
                # At the same line as on the page, for the traceback of a failure.
                code = "\n" * (example.line - 1) + example.code
                if example.setting is not None:
                    assert example.setting == "while lines run", where
                    server.call(server.engine.hold, CUSTOM_IDS)
                exec(compile(code, str(page), "exec"), names)
                server.call(server.engine.release)
            elif example.setting is None:
                run_console(example.code, server, names, capsys, where)
            else:
                settings = settings_of(example.setting)
                with serving(tmp_path / where, **settings) as other:
                    run_console(example.code, other, names, capsys, where)


def settings_of(text: str) -> dict[str, Any]:
    if text == "keys":
        return {"keys": KEYS}
    name, value = text.split("=")
    return {name: ast.literal_eval(value)}


# Console blocks --------------------------------------------------------------------


def run_console(
    code: str,
    server: Server,
    names: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    where: str,
) -> None:
    ids = {name: names[key].id for name, key in VARIABLES.items() if key in names}
    for step in re.split(r"^\$ ", code, flags=re.M)[1:]:
        command, shown = split_command(substitute(step, {"URL": URL, **ids}))
        words = shlex.split(command)
        about = f"{where}: $ {command}"
        if words[0] == "curl":
            check_answer(curl(words[1:], server), shown, about)
        else:
            assert words[0] == "sglang-batch", about
            check_command(words[1:], shown, capsys, about)


def substitute(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\$([A-Z_]+)", lambda found: values[found[1]], text)


def split_command(step: str) -> tuple[str, str]:
    """A command, which may have several lines, and the text after it."""
    lines = step.splitlines(keepends=True)
    for count in range(1, len(lines) + 1):
        command = "".join(lines[:count])
        try:
            shlex.split(command)
        except ValueError:  # a quotation that is not closed yet
            continue
        return command.strip(), "".join(lines[count:])
    raise AssertionError(f"no whole command: {step}")


def curl(words: list[str], server: Server) -> Any:
    """The server's answer to a call of curl, with the options that the page uses."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("url")
    parser.add_argument("-i", action="store_true")
    parser.add_argument("-X", dest="method")
    parser.add_argument("-H", dest="headers", action="append", default=[])
    parser.add_argument("-d", dest="data")
    parser.add_argument("-F", dest="form", action="append", default=[])
    options = parser.parse_args(words)
    # curl sends "Name;" as a header without a value.
    pairs = [re.split(r"[:;]\s*", header, maxsplit=1) for header in options.headers]
    fields, files = {}, {}
    for each in options.form:
        name, value = each.split("=", 1)
        if value.startswith("@"):
            path, _, filename = value[1:].partition(";filename=")
            files[name] = (filename or path, Path(path).read_bytes())
        else:
            fields[name] = value
    sends = options.data is not None or options.form
    return server.http.request(
        options.method or ("POST" if sends else "GET"),
        options.url,
        headers=dict(pairs),
        content=options.data,
        data=fields or None,
        files=files or None,
    )


def check_answer(answer: Any, shown: str, about: str) -> None:
    """Compare with a status line, header lines if any, and a body in JSON."""
    status, *rest = shown.splitlines()
    found = _STATUS.match(status)
    assert found, f"{about}\nno status is shown: {status!r}"
    assert answer.status_code == int(found[1]), f"{about}\n{answer.text}"
    while rest and (header := _HEADER.match(rest[0])):
        value = answer.headers.get(header[1], "")
        assert matches(value, header[2]), f"{about}\n{header[1]}: {value}"
        del rest[0]
    told, wanted = answer.json(), json.loads("\n".join(rest))
    assert is_as_shown(told, wanted), f"{about}\n{json.dumps(told)}"


def is_as_shown(told: Any, shown: Any) -> bool:
    """Whether an answer matches the page, except for times and ``...``."""
    if isinstance(shown, dict):
        return (
            isinstance(told, dict)
            and told.keys() == shown.keys()
            and all(
                isinstance(told[key], int)
                if key.endswith("_at") and isinstance(shown[key], int)
                else is_as_shown(told[key], shown[key])
                for key in shown
            )
        )
    if isinstance(shown, list):
        return (
            isinstance(told, list)
            and len(told) == len(shown)
            and all(map(is_as_shown, told, shown))
        )
    if shown == "...":
        return True
    if isinstance(shown, str) and "..." in shown:
        return isinstance(told, str) and matches(told, shown)
    return type(told) is type(shown) and bool(told == shown)


def matches(text: str, shown: str) -> bool:
    pattern = re.escape(shown).replace(re.escape("..."), ".*")
    return re.fullmatch(pattern, text, re.S) is not None


def check_command(
    words: list[str], shown: str, capsys: pytest.CaptureFixture[str], about: str
) -> None:
    """Check that a command succeeds and prints the text on the page."""
    capsys.readouterr()
    assert main(words) == 0, f"{about}\n{capsys.readouterr()}"
    printed = capsys.readouterr().out
    # A command that waits for the end of a batch also prints the result.
    wanted = shown if "--follow" not in words else f"{shown.rstrip()}..."
    assert matches(printed.strip(), wanted.strip()), f"{about}\n{printed}"


# Frontend programs -------------------------------------------------------------------


def test_every_example_of_programs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        # Without an accelerator, importing SGLang warns.
        warnings.simplefilter("ignore")
        from sglang_batch import lang
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with WaveServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            monkeypatch.setattr(lang, "BatchBackend", redirected(lang, server.url))
            run_programs(DOCS / "python.md", tmp_path / "module.py")
        finally:
            server.shutdown()
            thread.join()
    # Three of the four programs of the job were finished before its second run.
    assert len(server.calls) == 3 + 3 + 1


def redirected(lang: Any, url: str) -> type:
    """A BatchBackend that calls this server, whatever URL it is given."""

    class Redirected(lang.BatchBackend):  # type: ignore[misc]
        def __init__(self, _url: str, **options: Any) -> None:
            super().__init__(url, **options)

    return Redirected


def run_programs(page: Path, module: Path) -> None:
    """Execute a page's blocks from a file, because SGLang reads programs' source."""
    names: dict[str, Any] = {"__name__": "documented"}
    source = ""
    for example in examples_of(page):
        source += "\n" * (example.line - 1 - source.count("\n")) + example.code
    module.write_text(source)
    exec(compile(source, str(module), "exec"), names)


# Tables ------------------------------------------------------------------------------


def section_of(page: str, title: str) -> str:
    text = (DOCS / page).read_text(encoding="utf-8")
    section = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert section, f"{page} has no section {title}"
    return section


def rows_of_tables(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def test_the_tables_of_settings_have_each_with_its_default() -> None:
    shown = {
        row[0].strip("` "): json.loads(row[1].strip("`"))
        for page in ("operating.md", "experimental.md")
        for row in rows_of_tables(section_of(page, "Settings"))
    }
    assert shown == {
        field.name: list(field.default)
        if isinstance(field.default, tuple)
        else field.default
        for field in dataclasses.fields(OfflineBatchConfig)
    }


def test_settings_in_examples_are_accepted() -> None:
    pages = [DOCS.parent / "README.md", *DOCS.glob("*.md")]
    pattern = re.compile(r"--offline-batch-config '(\{.*?\})'")
    found = [text for page in pages for text in pattern.findall(page.read_text())]
    assert len(found) >= 3
    for text in found:
        OfflineBatchConfig.from_json(text)


@pytest.mark.slow
def test_the_lists_of_metrics_have_each_once(tmp_path: Path) -> None:
    """Deprecated metrics are not in the lists, but name one that is."""
    with warnings.catch_warnings():
        # Without an accelerator, importing SGLang warns.
        warnings.simplefilter("ignore")
        from sglang_batch.srt.scheduler.step_recorder import StepMetrics
    registry = CollectorRegistry()
    service = make_service(tmp_path)
    try:
        BatchMetrics(service, registry=registry)
        StepMetrics({"model_name": "demo"}, registry=registry)
        help_texts = {
            metric.name + ("_total" if metric.type == "counter" else ""): (
                metric.documentation
            )
            for metric in registry.collect()
        }
    finally:
        service.store.close()
    lists = re.findall(
        r"^- .*\n(?:  .*\n)*", section_of("operating.md", "Metrics"), re.M
    )
    metrics = re.findall(r"`(sglang_batch_\w+)`", "".join(lists))
    deprecated = {
        name: text
        for name, text in help_texts.items()
        if text.startswith("Deprecated: use ")
    }
    assert sorted(metrics) == sorted(help_texts.keys() - deprecated.keys())
    for text in deprecated.values():
        assert text.split()[2] in metrics


def test_the_table_of_endpoints_has_their_required_keys() -> None:
    shown = {
        row[0].strip("` "): tuple(re.findall(r"`(\w+)`", row[1]))
        for row in rows_of_tables(section_of("batch_api.md", "Lines and endpoints"))
        if row[0].startswith(" `/v1/") or row[0].startswith("`/v1/")
    }
    assert shown == {url: each.required for url, each in ENDPOINTS.items()}


def test_links_between_pages_lead_somewhere() -> None:
    for page in [DOCS.parent / "README.md", *DOCS.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_commands_in_examples_have_options_that_exist() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    run_options.add_run(commands, lambda: 0)
    client_options.add(commands)
    pages = [DOCS.parent / "README.md", *DOCS.glob("*.md")]
    for page in pages:
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:2] == ["sglang-batch", "run"]:
                    options, rest = parser.parse_known_args(words[1:])
                    assert set(rest[::2]) <= {"--model-path", "--tp"}, line
                    run_options.job_input(options)
