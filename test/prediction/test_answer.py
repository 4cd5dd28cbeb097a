"""``plan`` answers in three lines: time, money, advice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_batch.planner.costs.hardware import hardware
from sglang_batch.prediction.report import LeftOut, MachineInfo
from sglang_batch.prediction.table import answer


def report(
    *, calibrated: bool = False, price: float | None = None, **seconds: float
) -> Any:
    """A prediction of 2,000 requests with the seconds of each policy, dfs chosen."""
    runs = {name: SimpleNamespace(seconds=value) for name, value in seconds.items()}
    ranking = sorted(seconds, key=lambda name: seconds[name])
    tree = SimpleNamespace(num_requests=2000, num_unique_tokens=1000)
    job = SimpleNamespace(tree=tree)
    cost = {} if price is None else {"dollars": price}
    return SimpleNamespace(
        chosen="dfs",
        verdict="auto chooses dfs",
        forecast=SimpleNamespace(runs=runs, ranking=ranking, job=job),
        machine=MachineInfo("m", hardware("cpu"), 1, "", calibrated),
        left_out=[],
        late_tokens=0,
        gpu_price=price,
        policy_figures=lambda run: {"seconds": run.seconds, **cost},
    )


def test_rates_that_nobody_measured_are_named_first() -> None:
    time, cost, advice = answer(report(dfs=100.0, lpm=100.5)).splitlines()
    assert time == (
        "Time: 100.0 s for 2,000 requests on cpu (not calibrated: `sglang-batch "
        "calibrate`, or a run, measures the rates)"
    )
    assert cost.startswith("Cost: unknown; ") and "--price-per-gpu-hour" in cost
    assert advice == (
        "Advice: auto chooses dfs; the others are within 1 %. --all prints all figures."
    )


def test_other_orders_are_compared_where_they_differ() -> None:
    said = answer(report(calibrated=True, price=2.5, dfs=100.0, fcfs=250.0))
    time, cost, advice = said.splitlines()
    assert time.endswith("on cpu (costs of timed steps)")
    assert cost == "Cost: $2.50 at $2.5 an hour for each device"
    assert "dfs: 2.5 times as fast as fcfs." in advice


def test_requests_that_are_left_out_are_named() -> None:
    found = report(dfs=100.0)
    found.left_out = [LeftOut("a", "too large")]
    advice, *left_out = answer(found).splitlines()[2:]
    assert advice.startswith("Advice: leave out --policy to compare all orders.")
    assert left_out == ["left out: 1 that cannot run:", "a: too large"]


def test_late_text_is_named_with_its_cost() -> None:
    found = report(dfs=100.0)
    found.late_tokens = 400
    found.forecast.job.machine = SimpleNamespace(
        cost=SimpleNamespace(token_time_s=0.01)
    )
    (said,) = answer(found).splitlines()[3:]
    assert said.startswith(
        "Late text: about 400 tokens of text that many prompts share"
    )
    assert "save 4.000 s" in said
    found.late_tokens = 40
    assert len(answer(found).splitlines()) == 3
