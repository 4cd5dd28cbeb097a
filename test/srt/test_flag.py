"""``--offline-batch`` reaches every process; what cannot work fails at the start."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import preloaded
import pytest
from batches import client, jsonl, line, results, submit, wait
from prompts import MAX_TOKENS, Case
from servers import Server, server

CONFIG = '{"policy": "%s", "max_inflight": 77}'


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def assert_answers(running: Server, cases: list[Case]) -> None:
    api = client(running.url)
    lines = [
        line(
            case.custom_id,
            {
                "messages": case.messages,
                "max_tokens": MAX_TOKENS,
                "return_token_ids": True,
            },
        )
        for case in cases
    ]
    batch = wait(api, submit(api, jsonl(lines)).id)
    found = [
        result["response"]["body"]["choices"][0]["response_token_ids"]
        for result in results(api, batch.output_file_id)
    ]
    assert found == [case.output_ids for case in cases]


def assert_replicas_share(running: Server, cases: list[Case]) -> None:
    """Lines of unknown length, some six times as long as others, run on both replicas
    with the answers that they have alone."""
    chosen = [cases[i % len(cases)] for i in range(400)]
    most = [MAX_TOKENS if i % 8 < 4 else 2 for i in range(400)]
    lines = [
        line(
            f"line-{i}",
            {
                "messages": case.messages,
                "max_tokens": most[i],
                "return_token_ids": True,
            },
        )
        for i, case in enumerate(chosen)
    ]
    before = [decode_tokens(state) for state in states_of(running)]
    api = client(running.url)
    batch = wait(api, submit(api, jsonl(lines)).id)
    found = {
        result["custom_id"]: result["response"]["body"]["choices"][0]
        for result in results(api, batch.output_file_id)
    }
    for i, case in enumerate(chosen):
        assert found[f"line-{i}"]["response_token_ids"] == case.output_ids[: most[i]]
    after = [decode_tokens(state) for state in states_of(running)]
    assert all(b > a for a, b in zip(before, after, strict=True))


def states_of(running: Server) -> Any:
    return get(f"{running.url}/server_info")["internal_states"]


def decode_tokens(state: Any) -> int:
    return int(state["offline_batch"]["decode_tokens"])


@pytest.mark.parametrize(
    ("args", "policy", "num_dp_ranks"),
    [
        pytest.param(
            ["--dp=2", "--tokenizer-worker-num=2"], "dfs", 2, id="dp2-workers2"
        ),
        # So little KV that prefixes are evicted and admission has to wait.
        pytest.param(["--tp=2", "--max-total-tokens=1500"], "dual-scan", 1, id="tp2"),
    ],
)
def test_flag_reaches_every_scheduler(
    demo_model: Path,
    tmp_path: Path,
    cases: list[Case],
    args: list[str],
    policy: str,
    num_dp_ranks: int,
) -> None:
    with server(
        demo_model,
        "--offline-batch",
        f"--offline-batch-dir={tmp_path / 'batches'}",
        f"--offline-batch-config={CONFIG % policy}",
        *args,
        log_dir=tmp_path,
        # On a CPU, SGLang wants to be told which cores each rank may use.
        env={
            "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
            # Ranks that decide differently kill the server: a clock or a chance in a
            # decision would.
            "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
        },
    ) as running:
        ready = [
            entry
            for entry in running.log.splitlines()
            if "Offline batch scheduler ready" in entry
        ]
        assert len(ready) == 2, running.log[-3000:]
        assert all("max_inflight=77" in entry for entry in ready)
        info = get(f"{running.url}/server_info")
        assert info["offline_batch"] is True
        states = info["internal_states"]
        assert len(states) == num_dp_ranks
        assert all(
            "max_inflight=77" in state["offline_batch"]["config"] for state in states
        )
        assert_answers(running, cases)
        if num_dp_ranks > 1:
            assert_replicas_share(running, cases)
        # However long it took to start, no tokenizer worker was taken for dead.
        assert not re.search(r"Child process .* died", running.log)
        # No process spins, not even the one that spreads requests over the replicas.
        running.assert_idle()


FLAGS = ("--offline-batch", "--offline-batch-config", "--offline-batch-dir")
LAUNCH = "import runpy; runpy.run_module('sglang.launch_server', run_name='__main__')"
OFFLINE = "import sys; sys.argv = ['x', '--offline-batch', '--model-path', 'm']; "
OLD = "import sglang.version; sglang.version.__version__ = '0.4.0'; "
BAD_SETTINGS = (
    (["--offline-batch", "--offline-batch-config={"], "is not valid JSON"),
    (
        ["--offline-batch", '--offline-batch-config={"polcy": 1}'],
        "no setting 'polcy'; the settings are policy, ",
    ),
    (
        ["--offline-batch", '--offline-batch-config={"policy": "best"}'],
        "policy='best' is not known; choose one of ",
    ),
    (
        ["--offline-batch", '--offline-batch-config={"scheduler": "own"}'],
        "scheduler='own' is not known; choose one of offline, stock.",
    ),
    (
        ["--offline-batch", '--offline-batch-config={"attention": "fast"}'],
        "attention='fast' is not known; choose one of auto, triton, torch, stock.",
    ),
    (
        [
            "--offline-batch",
            '--offline-batch-config={"attention": "stock"}',
            "--decode-attention-backend=shared_prefix",
        ],
        'attention="stock" contradicts --attention-backend shared_prefix; drop one.',
    ),
    (
        ["--decode-attention-backend=shared_prefix"],
        "--decode-attention-backend shared_prefix needs --offline-batch.",
    ),
    (
        ["--offline-batch", '--offline-batch-config={"max_line_tries": 0}'],
        "max_line_attempts=0 must be a whole number of 1 or more.",
    ),
    (["--offline-batch", "--use-ray"], "does not work with --use-ray"),
    (["--offline-batch-dir=/tmp"], "--offline-batch-dir needs --offline-batch."),
)
PROGRAMS = {
    "help of launch_server": f"import sys; sys.argv = ['x', '--help']; {LAUNCH}",
    "old server": f"{OLD}{OFFLINE}{LAUNCH}",
    "old engine": (
        f"{OLD}import sglang; sglang.Engine(model_path='m', offline_batch=True)"
    ),
    "hook gone": (
        f"{OFFLINE}import sglang_batch.srt.compat.offline_hooks as hooks; "
        "hooks.SERVER_HOOK = 'sglang.srt.entrypoints.http_server.gone'; "
        f"{LAUNCH}"
    ),
    "bad settings": (
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.server_args import prepare_server_args\n"
        f"for args in {[args for args, _ in BAD_SETTINGS]!r}:\n"
        "    try: prepare_server_args(['--model-path=m', *args])\n"
        "    except SystemExit as end: assert end.code == 2\n"
    ),
}


@pytest.fixture(scope="module")
def runs() -> dict[str, subprocess.CompletedProcess[str]]:
    """How each of PROGRAMS ended."""
    return {
        name: preloaded.run([sys.executable, "-c", program])
        for name, program in PROGRAMS.items()
    }


def test_flags_are_in_both_helps(
    runs: dict[str, subprocess.CompletedProcess[str]],
) -> None:
    # It loads plugins as it imports SGLang.
    serve = str(Path(sys.executable).with_name("sglang"))
    for done in (
        runs["help of launch_server"],
        subprocess.run([serve, "serve", "--help"], capture_output=True, text=True),
    ):
        assert done.returncode == 0, done.stderr[-2000:]
        assert all(flag in done.stdout for flag in FLAGS), done


@pytest.mark.parametrize("name", ["old server", "old engine"])
def test_unsupported_sglang_is_refused_in_one_sentence(
    runs: dict[str, subprocess.CompletedProcess[str]], name: str
) -> None:
    done = runs[name]
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "extends sglang 0.5.23, but sglang 0.4.0 is installed" in last


def test_hook_that_did_not_take_is_refused_in_one_sentence(
    runs: dict[str, subprocess.CompletedProcess[str]],
) -> None:
    done = runs["hook gone"]
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: --offline-batch: the hook on ")
    assert "did not take effect" in last


def test_bad_settings_are_refused_in_one_sentence(
    runs: dict[str, subprocess.CompletedProcess[str]],
) -> None:
    done = runs["bad settings"]
    assert done.returncode == 0, done.stderr[-2000:]
    said = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    assert len(said) == len(BAD_SETTINGS), done.stderr[-2000:]
    assert "max_line_tries is now called max_line_attempts" in done.stderr
    for sentence, (_, reason) in zip(said, BAD_SETTINGS, strict=True):
        assert reason in sentence
