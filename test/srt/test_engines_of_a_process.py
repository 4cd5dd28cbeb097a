"""Several engines of one process, offline and stock: each as in a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest
from forked_children import command

STOCK: dict[str, Any] = {}
OFFLINE = {"offline_batch": True, "offline_batch_config": {"gather_s": 0.02}}
OTHER = {
    "offline_batch": True,
    "offline_batch_config": {"policy": "fcfs", "attention": "stock"},
    "chunked_prefill_size": 64,
}
SENT = {"offline_batch": True, "offline_batch_config": {"scheduler": "stock"}}

ALONE = [["stock", "start", STOCK], ["stock", "ask"], ["stock", "end"]]
ORDERS = {
    "stock, then offline beside it, then stock again": [
        *ALONE[:2],
        ["offline", "start", OFFLINE],
        [["stock", "offline"], "ask"],
        ["offline", "end"],  # SGLang ends the processes of both
        *ALONE,
    ],
    "two offline ones side by side, then stock, then offline beside it": [
        ["offline", "start", OTHER],
        ["sent", "start", SENT],
        [["sent", "offline"], "ask"],
        ["offline", "end"],
        *ALONE[:2],
        ["offline", "start", OFFLINE],
        [["offline", "stock"], "ask"],
        ["stock", "ask"],
        ["offline", "end"],
    ],
}


def run(model: Path, steps: list[Any]) -> Any:
    done = preloaded.run(
        command("engines_in_turn", str(model), json.dumps(steps)),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def alone(demo_model: Path) -> Any:
    """The answers of a stock engine in a process of its own."""
    return run(demo_model, ALONE)


@pytest.mark.parametrize("order", ORDERS)
def test_answers_are_those_of_a_process_of_its_own(
    demo_model: Path, alone: Any, order: str
) -> None:
    [_, expected, _], [_, _, blocking] = alone["answers"]
    found = run(demo_model, ORDERS[order])
    for name, *answer in found["answers"]:
        if answer[0] == "blocking":
            assert alike(answer[1], blocking), name
        else:
            for kind, one in expected.items():
                assert alike(answer[0][kind], one), (name, kind)
            # Lists are planned, and so have ids of a job, on offline engines only.
            assert answer[1] == ([""] if name == "stock" else ["list_"]), name
    assert found["after"] == alone["after"]


def alike(found: Any, expected: Any) -> bool:
    """Whether values are the same, but for the last digit of log probabilities: their sums
    have another order where other requests are in the step, on stock engines, too."""
    if isinstance(expected, list):
        pairs = zip(found, expected, strict=True)
        return len(found) == len(expected) and all(alike(*pair) for pair in pairs)
    if isinstance(expected, float):
        return abs(found - expected) < 1.5e-3
    return bool(found == expected)


HOOKS_THAT_ASK_NOTHING = {
    # They read the flag itself.
    "sglang.srt.server_args.ServerArgs.add_cli_args",
    "sglang.srt.server_args.ServerArgs.from_cli_args",
    # SGLang's backends, with the same names and values, and one more.
    "sglang.srt.disaggregation.utils.TransferBackend",
}


def test_every_hook_leaves_a_stock_engine_alone() -> None:
    """Of those that an offline engine puts into its process. A new one is found here."""
    done = preloaded.run(
        [sys.executable, "-c", "import stock_calls; stock_calls.main()"]
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    asks_nothing = {t for t, said in found["hooks"].items() if said == "asks nothing"}
    assert asks_nothing == HOOKS_THAT_ASK_NOTHING
    others = {t: s for t, s in found["hooks"].items() if t not in asks_nothing}
    assert len(others) > 10
    assert set(others.values()) == {"leaves it alone"}, others
    assert found["changed"] == []
    assert found["steps"] == []


def test_transfer_backends_are_sglangs_and_one_more() -> None:
    from sglang.srt.disaggregation.utils import TransferBackend

    from sglang_batch.srt.disaggregation.backend import TransferBackends

    ours = {each.name: each.value for each in TransferBackends}
    # Ours, if an offline engine was in this process before.
    stock = {each.name: each.value for each in TransferBackend}
    assert ours == stock | {"TCP": "tcp"}


PASSED_ON = """
import pickle, sys
from pathlib import Path
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.entrypoints.engine import Engine
args = Engine.server_args_class(model_path="none", offline_batch=True)
Path(sys.argv[1]).write_bytes(pickle.dumps(args))
"""
UNPICKLE = """
import sys, stock_calls
from pathlib import Path
stock_calls.unpickle(Path(sys.argv[1]).read_bytes())
"""


def test_arguments_passed_to_a_process_of_the_user_make_it_a_main_process(
    tmp_path: Path,
) -> None:
    for code in (PASSED_ON, UNPICKLE):
        done = preloaded.run([sys.executable, "-c", code, str(tmp_path / "args")])
        assert done.returncode == 0, done.stderr[-3000:]
