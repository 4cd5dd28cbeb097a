"""Mixed steps as two forwards, in real SGLang: nothing changes for the requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import preloaded
import pytest
from forked_children import command

# The last one leaves splitting off.
WAYS = {
    "greedy": ("whole", "threads", "lanes"),
    "shared": ("whole", "threads"),
    "offloaded": ("whole", "threads"),
    "penalties": ("whole", "threads"),
    "grammar": ("whole", "threads"),
    "drawn": ("whole", "threads"),
    "logprobs": ("whole", "threads"),
    "prompt_logprobs": ("whole", "threads"),
    "faulty": ("whole", "fault"),
}


@pytest.fixture(scope="module")
def runs(demo_model: Path) -> dict[str, dict[str, Any]]:
    """Answers and counters by job and way, from one engine."""
    done = preloaded.run(
        command("overlap_engine", str(demo_model), json.dumps(WAYS)),
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    for ways in found.values():
        for one in ways.values():
            one["log"] = done.stdout + done.stderr
    return found


@pytest.mark.parametrize("name", WAYS)
def test_every_token_is_that_of_whole_steps(
    runs: dict[str, dict[str, Any]], name: str
) -> None:
    whole, *others = (runs[name][way] for way in WAYS[name])
    assert whole["split_steps"] == 0
    assert len({tuple(tokens) for tokens in whole["tokens"]}) > 20
    for other in others:
        assert other["tokens"] == whole["tokens"]
        assert other["steps"] == whole["steps"]


@pytest.mark.parametrize(
    "name", [n for n in WAYS if "prompt" not in n and n != "faulty"]
)
def test_every_mixed_step_is_split(runs: dict[str, dict[str, Any]], name: str) -> None:
    for way in WAYS[name][1:]:
        one = runs[name][way]
        assert one["mixed_steps"] == runs[name]["whole"]["mixed_steps"] > 10
        assert one["split_steps"] == one["mixed_steps"]
        assert one["fault"] is None


def test_offloaded_requests_decode_in_split_steps(
    runs: dict[str, dict[str, Any]],
) -> None:
    one = runs["offloaded"]["threads"]
    assert one["offloaded"] == runs["offloaded"]["whole"]["offloaded"] > 0
    assert one["resumed"] > 0


def test_decodes_of_split_steps_read_shared_prefixes_once(
    runs: dict[str, dict[str, Any]],
) -> None:
    one = runs["shared"]["threads"]
    assert one["attention_steps_shared"] > one["steps"] / 2


def test_grammars_are_followed(runs: dict[str, dict[str, Any]]) -> None:
    texts = runs["grammar"]["threads"]["texts"]
    parsed = [json.loads(text) for text in texts[1::2] if text.rstrip().endswith("}")]
    assert len(parsed) > 5
    assert all(each["a"] in ("x", "y") for each in parsed)


def test_logprobs_are_those_of_whole_steps(runs: dict[str, dict[str, Any]]) -> None:
    whole, split = (runs["logprobs"][way]["logprobs"] for way in WAYS["logprobs"])
    assert all(whole)
    for one, other in zip(split, whole, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_steps_with_logprobs_of_prompts_are_not_split(
    runs: dict[str, dict[str, Any]],
) -> None:
    one = runs["prompt_logprobs"]["threads"]
    assert 0 < one["split_steps"] < one["mixed_steps"]
    whole = runs["prompt_logprobs"]["whole"]["prompt_logprobs"]
    assert sum(map(bool, whole)) == 12
    for found, expected in zip(one["prompt_logprobs"], whole, strict=True):
        # The first token has none.
        assert found[1:] == pytest.approx(expected[1:], abs=1e-4)


def test_on_streams_no_operator_races_with_one_of_the_other_half(
    runs: dict[str, dict[str, Any]],
) -> None:
    one = runs["greedy"]["lanes"]
    assert one["races"] == []
    assert one["across"] > 1000


def test_after_a_fault_steps_run_whole(runs: dict[str, dict[str, Any]]) -> None:
    one = runs["faulty"]["fault"]
    assert one["fault"] == "RuntimeError: injected"
    assert one["split_steps"] == 2
    assert one["log"].count("A step could not be split.") == 1


def test_a_trial_leaves_nothing_behind(runs: dict[str, dict[str, Any]]) -> None:
    tried = runs["greedy"]["whole"]["tried"]
    assert tried["leaked"] == 0
    shapes = {
        (cell["prompt_tokens"], cell["rows"], cell["context"])
        for cell in tried["cells"]
    }
    # What does not fit is left out, or has less context.
    assert shapes == {(32, 4, 64), (32, 8, 128), (48, 4, 64), (48, 8, 128)}
    assert tried["exponent"] >= 1
