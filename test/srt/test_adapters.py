"""LoRA adapters under the plan, on real SGLang: answers, loads and shared prefixes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from adapter_job import Line, lines, merged_answers, shareable, write_checkpoints
from adapter_runs import run_adapters

NUM_ADAPTERS, MOST = 4, 2
PAGE = 16


@pytest.fixture(scope="module")
def job() -> list[Line]:
    return lines(48, NUM_ADAPTERS, base=8)


@pytest.fixture(scope="module")
def run(
    job: list[Line], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Two policies with little KV, next to online requests; and the right answers."""
    folder = tmp_path_factory.mktemp("adapters")
    model, paths = write_checkpoints(folder, NUM_ADAPTERS)
    found = run_adapters(
        model,
        paths,
        job,
        f"--page-size={PAGE}",
        "--max-total-tokens=1024",
        "--chunked-prefill-size=256",
        most=MOST,
        policies=["dfs", "dual-scan"],
        online=True,
        offload_every=5,
    )
    return found | {"right": {"texts": merged_answers(model, folder, job)}}


@pytest.mark.parametrize("policy", ["dfs", "dual-scan"])
def test_answers_are_those_of_the_adapter(
    run: dict[str, Any], job: list[Line], policy: str
) -> None:
    right, texts = run["right"]["texts"], run[policy]["texts"]
    assert texts[:-1] == right
    # Each adapter has answers of its own, so none had the KV of another.
    assert len({right[i] for i in (0, 1, 2, 3)}) > 1
    for i, text in run[policy]["online"].items():
        assert text == right[int(i)]


@pytest.mark.parametrize("policy", ["dfs", "dual-scan"])
def test_an_unknown_adapter_is_an_error_of_its_line_alone(
    run: dict[str, Any], policy: str
) -> None:
    error = json.loads(run[policy]["texts"][-1])["error"]
    assert "never been loaded: a5" in error["message"]


def test_requests_with_adapters_are_offloaded(run: dict[str, Any]) -> None:
    assert run["dual-scan"]["offloaded"] > 0


def test_what_adapters_share_among_themselves_is_computed_once(
    run: dict[str, Any], job: list[Line]
) -> None:
    in_pages = [
        line._replace(prompt=line.prompt[: len(line.prompt) // PAGE * PAGE])
        for line in job
    ]
    possible = shareable(in_pages)
    for policy in ("dfs", "dual-scan"):
        assert run[policy]["cached"] >= 0.8 * possible
