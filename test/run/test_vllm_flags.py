"""Options of ``vllm run-batch``: each is translated, told to have no effect, or refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from sglang_batch.__main__ import main
from sglang_batch.errors import ConfigError
from sglang_batch.run.vllm_flags import VLLM_FLAGS, FlagUse, sglang_argv
from sglang_batch.srt.compat.command_line import OPTIONS, check_arguments

RUN_PAGE = Path(__file__).parents[2] / "docs" / "run.md"
# Options that SGLang has by the same name, with the same meaning.
SAME_FLAGS = (
    *("--model", "--served-model-name", "--revision", "--trust-remote-code", "--dtype"),
    *("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"),
    *("--quantization", "--load-format", "--download-dir", "--model-impl"),
    *("--model-loader-extra-config", "--tokenizer-mode", "--skip-tokenizer-init"),
    *("--chat-template", "--tool-call-parser", "--reasoning-parser"),
    *(
        "--enable-lora",
        "--max-lora-rank",
        "--cpu-offload-gb",
        "--nnodes",
        "--node-rank",
    ),
    "--disable-custom-all-reduce",
)
# An option that a text names.
OPTION = re.compile(r"--[a-z][a-z-]*[a-z]")
SGLANG = {
    flag
    for option in json.loads(OPTIONS.read_bytes())["options"]
    for flag in option["flags"]
}


def translated(*argv: str) -> list[str]:
    return sglang_argv(list(argv), lambda note: None)


def test_the_table_has_each_name_once_and_only_options_that_sglang_has() -> None:
    names = Counter(name for flag in VLLM_FLAGS for name in flag.names.split())
    assert max(names.values()) == 1
    assert not names.keys() & set(SAME_FLAGS)
    assert set(SAME_FLAGS) <= SGLANG
    renamed = [flag for flag in VLLM_FLAGS if flag.use is FlagUse.RENAMED]
    targets = {target for flag in renamed for target in flag.text.split()}
    assert targets <= SGLANG
    # Options named in the reasons.
    for flag in VLLM_FLAGS:
        for why in (flag.text, *flag.refused.values()):
            named = set(re.findall(r"--[a-z][a-z-]*[a-z](?!\*)\b", why))
            ours = {"--policy", "--ray", *flag.names.split()}
            assert {n for n in named if f"{n}-*" not in why} <= SGLANG | ours, why


def test_the_page_lists_the_table() -> None:
    """Each option is in the list of its use, with the option of SGLang's or ours."""
    section = RUN_PAGE.read_text().partition("## Options of `vllm run-batch`")[2]
    section = section.partition("\n## ")[0]
    lists = dict(
        re.findall(r"^\*\*([\w ]+)\*\*[:,] ?(.*?\n)\n", section + "\n", re.M | re.S)
    )
    assert lists.keys() == {"The same", "Renamed", "No effect", "Refused"}
    for flag in VLLM_FLAGS:
        for item in lists[flag.use.value.capitalize()].split(";"):
            if f"`{flag.names.split()[0]}`" in item:
                break
        else:
            pytest.fail(f"{flag.names} is not in its list of docs/run.md")
        assert all(f"`{name}`" in item for name in flag.names.split())
        if flag.use is not FlagUse.IGNORED:
            assert all(each in item for each in OPTION.findall(flag.text)), flag.names
        for value, why in flag.refused.items():
            assert value == "*" or f"`{value}`" in item, flag.names
            assert set(OPTION.findall(why)) <= set(OPTION.findall(item)), why
    named = set(re.findall(r"`(-[^` ]+)`", re.sub(r"\([^()]*\)", "", section)))
    known = {name for flag in VLLM_FLAGS for name in flag.names.split()}
    ways = {"-i", "-o", "--output-tmp-dir", "--max-inflight", "-1"}
    assert named == known | set(SAME_FLAGS) | ways
    assert all(f"`{name}`" in lists["The same"] for name in SAME_FLAGS)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--tokenizer a", "--tokenizer-path a"),
        ("--tokenizer=a", "--tokenizer-path a"),
        ("--max_model_len 8k", "--context-length 8000"),
        ("--max-model-len 8K", "--context-length 8192"),
        ("--max-model-len 1.5k", "--context-length 1500"),
        ("--max-num-seqs 256", "--max-running-requests 256"),
        ("--seed 7", "--random-seed 7"),
        ("--enforce-eager --dtype half", "--disable-cuda-graph --dtype half"),
        ("-tp 2 -pp 2 -q fp8", "--tensor-parallel-size 2 --pipeline-parallel-size 2 --quantization fp8"),
        ("--kv-cache-dtype fp8", "--kv-cache-dtype fp8_e4m3"),
        ("--kv-cache-dtype fp8_e5m2", "--kv-cache-dtype fp8_e5m2"),
        ("--lora-modules a=b c=d", "--enable-lora --lora-paths a=b c=d"),
        ("--runner pooling", "--is-embedding"),
        ("--task generate", ""),
        ("--generation-config vllm", "--sampling-defaults openai"),
        ("--distributed-executor-backend mp", ""),
        ("--enable-prefix-caching --max-log-len 5", ""),
        ("--mem-fraction-static 0.8", "--mem-fraction-static 0.8"),
    ],
)  # fmt: skip
def test_an_option_becomes_sglangs(given: str, expected: str) -> None:
    assert translated(*given.split()) == expected.split()


def test_all_that_a_run_batch_script_has_is_known_to_sglang() -> None:
    argv = translated(
        *("--model", "m", "-tp", "2", "--max-model-len", "8K", "--max-num-seqs=256"),
        *(
            "--seed",
            "7",
            "--dtype",
            "bfloat16",
            "--trust-remote-code",
            "--enforce-eager",
        ),
        *("--kv-cache-dtype", "fp8", "--block-size", "16", "--enable-prefix-caching"),
        *("--disable-log-requests", "--served-model-name", "x", "--response-role"),
        *("assistant", "--enable-metrics", "--port", "8000", "--quantization", "fp8"),
    )
    known = check_arguments(argv)
    assert (known.model_path, known.tp_size, known.random_seed) == ("m", 2, 7)
    assert (known.context_length, known.max_running_requests) == (8192, 256)
    assert (known.kv_cache_dtype, known.page_size) == ("fp8_e4m3", 16)
    assert known.disable_cuda_graph and not hasattr(known, "port")


def test_what_has_no_effect_is_said_once_each() -> None:
    notes: list[str] = []
    sglang_argv(["--enable-prefix-caching", "--port", "1", "--seed", "2"], notes.append)
    assert notes == [
        "--enable-prefix-caching has no effect: prefixes are always shared.",
        "--port has no effect: a run has no HTTP server for metrics.",
    ]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--gpu-memory-utilization 0.9", "--mem-fraction-static"),
        ("--gpu_memory_utilization=0.9", "--mem-fraction-static"),
        ("--max-num-batched-tokens 8192", "--chunked-prefill-size"),
        ("--no-enable-prefix-caching", "the plan shares prefixes"),
        ("--max-model-len auto", "leave it out"),
        ("--max-model-len lots", "--max-model-len lots must be a whole number"),
        ("--max-num-seqs 1.5", "must be a whole number"),
        ("--response-role system", "--response-role system"),
        ("--runner draft", "--is-embedding"),
        ("--generation-config /x", "use auto or vllm"),
        ("--distributed-executor-backend ray", "--ray"),
        ("--seed", "--seed needs a value"),
        ("--enforce-eager=yes", "takes no value"),
    ],
)
def test_what_means_something_else_is_refused_in_a_sentence(
    given: str, says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        translated(*given.split())
    assert says in str(refused.value)
    assert str(refused.value).endswith(".") and "\n" not in str(refused.value)


def test_run_takes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{}\n")
    run = ["run", "-i", str(source), "-o", str(tmp_path / "out.jsonl"), "--model", "m"]
    assert main([*run, "--gpu-memory-utilization", "0.9"]) == 2
    assert "--mem-fraction-static" in capsys.readouterr().err
    # The next error is of the model, which is no folder.
    assert main([*run, "-tp", "1", "--max-num-seqs", "4", "--port", "8000"]) == 2
    said = capsys.readouterr().err
    assert "--port has no effect" in said
    assert "unrecognized" not in said
